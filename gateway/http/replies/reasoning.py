"""A parser of reasoning in the text of a response, during generation."""

from __future__ import annotations

from enum import Enum

from draftgate.gateway.http.requests.reasoning import CLOSED, OPENED, Reasoning


class _Mode(Enum):
    """The text that the parser expects next."""

    BEGINNING = "the beginning of the response"
    REASONING = "reasoning, up to its end marker"
    LINE_BREAKS = "line breaks between the end marker and the content"
    CONTENT = "content only"


class ReasoningParser:
    """A parser that splits the response of one choice into reasoning and content.

    The result depends only on the text, not on its division into deltas. White space around the
    reasoning, and line breaks after it, belong to neither part.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        begun = reasoning is Reasoning.BEGUN
        self._mode = _Mode.REASONING if begun else _Mode.BEGINNING
        self._held = ""
        self._found = False

    @property
    def is_over(self) -> bool:
        """Whether all further text is content."""
        return self._mode is _Mode.CONTENT

    def add(self, text: str) -> tuple[str, str]:
        """Add text, and return the reasoning and the content that are now certain."""
        if self._mode is _Mode.CONTENT:
            return "", text
        self._held += text
        if self._mode is _Mode.BEGINNING:
            self._begin()
        reasoning = self._reasoning() if self._mode is _Mode.REASONING else ""
        if self._mode is _Mode.LINE_BREAKS:
            self._held = self._held.lstrip("\n")
            if self._held:
                self._mode = _Mode.CONTENT
        return reasoning, self._take_all() if self._mode is _Mode.CONTENT else ""

    def finish(self) -> tuple[str, str]:
        """End the text, and return the reasoning and the content that were held back."""
        held = self._take_all()
        return (held.rstrip(), "") if self._mode is _Mode.REASONING else ("", held)

    def _begin(self) -> None:
        begin = self._held.lstrip()
        if begin.startswith(OPENED):
            self._held = begin.removeprefix(OPENED)
            self._mode = _Mode.REASONING
        elif not OPENED.startswith(begin):
            self._mode = _Mode.CONTENT

    def _reasoning(self) -> str:
        """Take the reasoning that is certain, without white space that may be at its end."""
        if not self._found:
            self._held = self._held.lstrip()
            self._found = bool(self._held)
        before, marker, after = self._held.partition(CLOSED)
        if marker:
            self._held, self._mode = after, _Mode.LINE_BREAKS
            return before.rstrip()
        lengths = range(len(CLOSED) - 1, -1, -1)
        partial = next(length for length in lengths if self._held.endswith(CLOSED[:length]))
        certain = self._held[: len(self._held) - partial].rstrip()
        self._held = self._held[len(certain) :]
        return certain

    def _take_all(self) -> str:
        taken, self._held = self._held, ""
        return taken
