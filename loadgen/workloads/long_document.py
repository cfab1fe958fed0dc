"""Workload `long_document`: responses that quote the prompt, where n-gram drafts can find them."""

from __future__ import annotations

from typing import Final

from draftgate.loadgen.types import RequestSpec
from draftgate.loadgen.workloads.base import LengthDistribution, WorkloadSettings, cut

DOCUMENT: Final = LengthDistribution(median=6909, sigma=1.2, least=894, most=16_384)
"""Median, spread and 1st percentile of input lengths in Mooncake's conversation trace (12,031
requests, Qin et al., FAST 2025). Its longest input has 126,195 tokens, but this workload ends at
16,384."""

QUOTED: Final = LengthDistribution(median=128, sigma=0.5, least=32, most=512)
"""Tokens of the passage to quote, a paragraph (assumed)."""

BEGUN_TOKENS: Final = 12
"""Tokens of the quotation in the prompt, enough to find the passage."""

QUOTE: Final = "\n\nQuote from the text above, word for word, what begins so:\n\n"


class LongDocument:
    """A long document, followed by the beginning of a quotation from it.

    Base models and instruction-tuned models both continue the quotation, so the right response is
    known (`answer`). Documents are independent of each other.
    """

    name = "long_document"

    def __init__(self, settings: WorkloadSettings) -> None:
        self._settings = settings

    def request(self, index: int) -> RequestSpec:
        document, quotation, tokens = self._draw(index)
        begun = cut(quotation, BEGUN_TOKENS, self._settings.counter)
        return self._settings.spec(self.name, index, tokens, f"{document}{QUOTE}{begun}")

    def answer(self, index: int) -> str:
        """Return the rest of the quotation, with which a perfect response starts."""
        _, quotation, _ = self._draw(index)
        return quotation[len(cut(quotation, BEGUN_TOKENS, self._settings.counter)) :]

    def _draw(self, index: int) -> tuple[str, str, int]:
        """Return a document, a quotation from it, and the limit of the response."""
        settings = self._settings
        rng = settings.rng(self.name, index)
        answer = settings.answer_tokens(QUOTED.draw(rng))
        question_tokens = settings.counter.count(QUOTE) + BEGUN_TOKENS
        tokens = settings.prompt_tokens(DOCUMENT.draw(rng), answer, beside=question_tokens)
        document = settings.text(settings.corpus.prose, rng, tokens)
        longest = cut(document, BEGUN_TOKENS + answer, settings.counter)
        quoted = min(len(longest), len(document) // 2)
        drawn = rng.randrange(len(document) - quoted + 1)
        start = max(document.rfind("\n", 0, drawn), document.rfind(" ", 0, drawn)) + 1
        return document, document[start : start + quoted], answer
