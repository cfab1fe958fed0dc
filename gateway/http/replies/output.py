"""A parser of the output of one choice, with its reasoning and its function calls."""

from __future__ import annotations

from draftgate.gateway.http.replies.reasoning import ReasoningParser
from draftgate.gateway.http.requests.validation import ParsedRequest
from draftgate.gateway.tools.parsing import Piece

Output = tuple[str, list[Piece]]
"""Reasoning, and the pieces of content and of calls that follow it."""


class OutputParser:
    """A parser that splits the output of one choice into reasoning, content and calls.

    The result depends only on the text, not on its division into deltas.
    """

    def __init__(self, parsed: ParsedRequest) -> None:
        self._reasoning = None if parsed.reasoning is None else ReasoningParser(parsed.reasoning)
        self._calls = None if parsed.tools is None else parsed.tools.parser()

    @property
    def is_after_reasoning(self) -> bool:
        """Whether all further text follows the reasoning."""
        return self._reasoning is None or self._reasoning.is_over

    def add(self, text: str) -> Output:
        """Add text, and return the output that is now certain."""
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.add(text)
        return reasoning, self._pieces(text)

    def finish(self, *, cut: bool) -> Output:
        """End the text, and return the output that was held back.

        Args:
            cut: whether `max_tokens` cut the text short.
        """
        reasoning, pieces = "", list[Piece]()
        if self._reasoning is not None:
            reasoning, text = self._reasoning.finish()
            pieces = self._pieces(text)
        return reasoning, pieces if self._calls is None else pieces + self._calls.finish(cut=cut)

    def _pieces(self, text: str) -> list[Piece]:
        if self._calls is not None:
            return self._calls.add(text)
        return [Piece(text, content=text)] if text else []
