"""Workload `code`: continue a Python source after a newly opened block, as an editor requests."""

from __future__ import annotations

from typing import Final

from draftgate.loadgen.types import RequestSpec
from draftgate.loadgen.workloads.base import LengthDistribution, WorkloadSettings

_PROMPT: Final = LengthDistribution(median=1469, sigma=1.15, least=17, most=7436)
_ANSWER: Final = LengthDistribution(median=13, sigma=0.85, least=6, most=251)
"""Medians, spreads, and 1st and 99th percentiles of Azure's code completion trace of 2023 (8,819
requests, Patel et al., Splitwise, ISCA 2024). The spread of prompts uses the quartiles, because the
trace ends at about 7,400 tokens. Its responses are short, and `max_tokens` sets another length."""

LEAST_KEPT: Final = 0.75
"""Least share of the prompt that remains after a cut back to the last opened block."""


class Code:
    """Completions of standard library code. Prompts are independent of each other."""

    name = "code"

    def __init__(self, settings: WorkloadSettings) -> None:
        self._settings = settings

    def request(self, index: int) -> RequestSpec:
        settings = self._settings
        rng = settings.rng(self.name, index)
        answer = settings.answer_tokens(_ANSWER.draw(rng))
        tokens = settings.prompt_tokens(_PROMPT.draw(rng), answer)
        source = settings.text(settings.corpus.code, rng, tokens)
        return settings.spec(self.name, index, answer, _up_to_an_opened_block(source))


def _up_to_an_opened_block(source: str) -> str:
    """Cut a source after its last line that opens a block, or else after its last line.

    The cut never drops more than 1 - `LEAST_KEPT` of the source.
    """
    for end in (":\n", "\n"):
        kept = source.rfind(end) + len(end)
        if kept >= max(len(source) * LEAST_KEPT, len(end)):
            return source[:kept]
    return source
