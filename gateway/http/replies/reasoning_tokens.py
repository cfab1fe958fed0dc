"""The number of tokens that a response spends on reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.http.requests.reasoning import CLOSED, OPENED, Reasoning

_MARKER_TOKENS: Final = len(CLOSED)
"""Maximum number of tokens of a marker, because each of its tokens has a character."""


class ReasoningTokens:
    """A counter of the reasoning tokens of one choice.

    The markers count as reasoning. All other output tokens therefore belong to the content.

    Attributes:
        count: the reasoning tokens so far. Tokens that may begin the start marker count later.
    """

    def __init__(self, reasoning: Reasoning, tokenizer: Tokenizer) -> None:
        self.count = 0
        self._tokenizer = tokenizer
        self._begun = reasoning is Reasoning.BEGUN
        self._over = False
        self._recent: list[int] = []  # before the beginning, all tokens

    def add(self, token_ids: Sequence[int]) -> None:
        """Count the next tokens."""
        if self._over:
            return
        if not self._begun:
            self._recent += token_ids
            text = self._text(self._recent).lstrip()
            self._begun = text.startswith(OPENED)
            self._over = not self._begun and not OPENED.startswith(text)
            if not self._begun:
                return
            token_ids, self._recent = self._recent, []
        self._count_up_to_marker(token_ids)

    def _count_up_to_marker(self, token_ids: Sequence[int]) -> None:
        earlier = self._recent[-_MARKER_TOKENS:]
        reasoning = len(token_ids)
        if CLOSED in self._text([*earlier, *token_ids]):
            self._over = True
            reasoning = next(
                count
                for count in range(1, len(token_ids) + 1)
                if CLOSED in self._text([*earlier, *token_ids[:count]])
            )
        self.count += reasoning
        self._recent = [*earlier, *token_ids]

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
