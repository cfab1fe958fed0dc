"""code: continue a Python source where a block has just been opened, as an editor would ask."""

from __future__ import annotations

from typing import Final

from draftgate.loadgen.types import RequestSpec
from draftgate.loadgen.workloads.base import Lengths, WorkloadSettings

PROMPT: Final = Lengths(median=1469, sigma=1.15, least=17, most=7436)
ANSWER: Final = Lengths(median=13, sigma=0.85, least=6, most=251)
"""Azure's code completion trace of 2023 (8,819 requests; Patel et al., Splitwise, ISCA 2024): its
medians, spreads (for prompts from the quartiles, as the trace is cut off at about 7,400), and 1st
and 99th percentiles. Its answers are short; `max_tokens` sets another length."""

LEAST_KEPT: Final = 0.75
"""Share of the prompt that is kept when it is cut back to the last opened block."""


class Code:
    """Completions of standard library code. Prompts are independent of each other."""

    name = "code"

    def __init__(self, settings: WorkloadSettings) -> None:
        self._settings = settings

    def request(self, index: int) -> RequestSpec:
        settings = self._settings
        rng = settings.rng(self.name, index)
        answer = settings.answer_tokens(ANSWER.draw(rng))
        tokens = settings.prompt_tokens(PROMPT.draw(rng), answer)
        source = settings.text(settings.corpus.code, rng, tokens)
        return settings.spec(self.name, index, answer, _up_to_an_opened_block(source))


def _up_to_an_opened_block(source: str) -> str:
    """Cut a source after its last line that opens a block, else after its last line.

    A cut that would drop more than 1 - `LEAST_KEPT` of the source is not made.
    """
    for end in (":\n", "\n"):
        kept = source.rfind(end) + len(end)
        if kept >= max(len(source) * LEAST_KEPT, len(end)):
            return source[:kept]
    return source
