"""code: continue a Python source where a block has just been opened, as an editor asks."""

from __future__ import annotations

from typing import Final

from draftgate.loadgen.types import RequestSpec
from draftgate.loadgen.workloads.base import Lengths, WorkloadSettings

PROMPT: Final = Lengths(median=1469, sigma=1.15, least=17, most=7436)
ANSWER: Final = Lengths(median=13, sigma=0.85, least=6, most=251)
"""Azure's code completion trace of 2023 (8,819 requests; Patel et al., Splitwise, ISCA 2024): its
medians, spreads (of prompts the quartiles', as the trace is cut off at about 7,400) and its 1st and
99th percentiles. Its answers are short; `max_tokens` sets another length."""

LEAST_KEPT: Final = 0.75
"""Of the wanted prompt, when it is cut back to where a block opens."""


class Code:
    """Completions of standard library code. Prompts are independent of each other."""

    name = "code"

    def __init__(self, setting: WorkloadSettings) -> None:
        self._setting = setting

    def request(self, index: int) -> RequestSpec:
        setting = self._setting
        rng = setting.rng(self.name, index)
        answer = setting.answer_tokens(ANSWER.draw(rng))
        tokens = setting.prompt_tokens(PROMPT.draw(rng), answer)
        return RequestSpec(
            prompt=_up_to_an_opened_block(setting.text(setting.corpus.code, rng, tokens)),
            messages=(),
            max_tokens=answer,
            seed=setting.seed + index,
            class_name=self.name,
            slo=setting.slo,
        )


def _up_to_an_opened_block(source: str) -> str:
    """Cut a source after its last line that opens a block, else its last line, if most stays."""
    for end in (":\n", "\n"):
        kept = source.rfind(end) + len(end)
        if kept >= max(len(source) * LEAST_KEPT, len(end)):
            return source[:kept]
    return source
