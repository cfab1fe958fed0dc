"""long_document: answers that stand in what was sent, where n-gram drafts can find them."""

from __future__ import annotations

from typing import Final

from draftgate.loadgen.types import RequestSpec
from draftgate.loadgen.workloads.base import Lengths, WorkloadSettings
from draftgate.loadgen.workloads.tokens import cut

DOCUMENT: Final = Lengths(median=6909, sigma=1.2, least=894, most=16_384)
"""Mooncake's conversation trace (12,031 requests; Qin et al., FAST 2025): median, spread and 1st
percentile of input lengths. Its longest are 126,195 tokens; ours end at 16,384."""

QUOTED: Final = Lengths(median=128, sigma=0.5, least=32, most=512)
"""Tokens of the passage to quote: a paragraph. Assumed."""

BEGUN_TOKENS: Final = 12
"""Of the quotation, told in the question: enough to find it by."""

QUOTE: Final = "\n\nQuote from the text above, word for word, what begins so:\n\n"


class LongDocument:
    """A long document, and a quotation from it begun at the prompt's end.

    A plain text model continues the quotation as an instructed one does, so the right answer is
    known: `answer`. Documents are independent of each other.
    """

    name = "long_document"

    def __init__(self, setting: WorkloadSettings) -> None:
        self._setting = setting

    def request(self, index: int) -> RequestSpec:
        document, start, quoted, tokens = self._drawn(index)
        begun = cut(document[start : start + quoted], BEGUN_TOKENS, self._setting.counter)
        return RequestSpec(
            prompt=f"{document}{QUOTE}{begun}",
            messages=(),
            max_tokens=tokens,
            seed=self._setting.seed + index,
            class_name=self.name,
            slo=self._setting.slo,
        )

    def answer(self, index: int) -> str:
        """Return the rest of the quotation: what a perfect answer begins with."""
        document, start, quoted, _ = self._drawn(index)
        quotation = document[start : start + quoted]
        return quotation[len(cut(quotation, BEGUN_TOKENS, self._setting.counter)) :]

    def _drawn(self, index: int) -> tuple[str, int, int, int]:
        """Return a document, where the quotation starts, its characters, the answer's tokens."""
        setting = self._setting
        rng = setting.rng(self.name, index)
        answer = setting.answer_tokens(QUOTED.draw(rng))
        asking = setting.counter.count(QUOTE) + BEGUN_TOKENS
        tokens = setting.prompt_tokens(DOCUMENT.draw(rng), answer, beside=asking)
        document = setting.text(setting.corpus.prose, rng, tokens)
        quoted = min(len(cut(document, BEGUN_TOKENS + answer, setting.counter)), len(document) // 2)
        drawn = rng.randrange(len(document) - quoted + 1)
        start = max(document.rfind("\n", 0, drawn), document.rfind(" ", 0, drawn)) + 1
        return document, start, quoted, answer
