"""A parser of function calls in the text of a response, during generation.

The calls and the content depend only on the text, not on its division into deltas. The parser holds
back text that may begin a call. A call is certain once the text has the name of a function on offer
and the brace of its arguments. The parser then passes on the arguments as the model writes them.
After a call, the beginning of another call that the end of the text cuts short is framing. All
other text is content, and no character is lost (`Piece.source`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Final

from draftgate.gateway.tools.dialects import (
    OBJECT_ENDS,
    Dialect,
    Match,
    NoMatch,
    Pattern,
    beginnings,
    first_match,
)

ID_CHARACTERS: Final = 9
"""Length of a call's id. Mistral's templates require this length, and others accept it."""


def call_id(seed: str, index: int) -> str:
    """Return the id of a call.

    Args:
        seed: a text unique to the request and the choice.
        index: index of the call in the choice.
    """
    return hashlib.sha256(f"{seed}/{index}".encode()).hexdigest()[:ID_CHARACTERS]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the text.

    The joined sources of all pieces are the text.

    Attributes:
        source: the characters. Characters in no other attribute are framing, such as tags and keys.
        content: the characters that the piece adds to the content of the response.
        name: name of a function whose call begins with this piece.
        call_id: the id of this call, or empty if the text has none.
        arguments: the characters that the piece adds to the arguments of the last call.
    """

    source: str
    content: str = ""
    name: str = ""
    arguments: str = ""
    call_id: str = ""


class _Mode(Enum):
    """The text that the parser expects next."""

    BEGINNING = "the beginning of the response"
    TEXT = "content, or a call"
    ARGUMENTS = "the inside of a call's arguments"
    OBJECT_END = "the end of a call's object"
    AFTER_CALL = "the end of calls, or another call"
    PLAIN = "content only"


class CallParser:
    """A parser that splits the response of one choice into content and calls.

    Attributes:
        calls: number of calls found so far.
    """

    def __init__(
        self,
        dialect: Dialect,
        names: Collection[str],
        *,
        several: bool = True,
        forced: bool = False,
    ) -> None:
        """Start at the beginning of a response.

        Args:
            dialect: the model's format of calls.
            names: names of the functions on offer.
            several: whether a response may have more than one call.
            forced: whether the response consists of calls only, so that it has no content.
        """
        self._dialect = dialect
        self._forced = forced
        self._names = names
        self._several = several
        self._begins = beginnings(dialect.anywhere)
        self._mode = _Mode.BEGINNING
        self._held = ""
        self._brackets = _Brackets()
        self._has_text_after_call = False
        self.calls = 0

    def add(self, text: str) -> list[Piece]:
        """Add text, and return the pieces that are now certain."""
        self._held += text
        pieces: list[Piece] = []
        while self._held and self._step(pieces):
            pass
        return pieces

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """End the text, and return the piece that was held back, if any.

        Args:
            cut: whether `max_tokens` cut the text short.
        """
        held, self._held = self._held, ""
        if not held:
            return []
        closing = self._mode in {_Mode.OBJECT_END, _Mode.AFTER_CALL}
        # After a call, text that may begin another call is a call that `max_tokens` cut short.
        if closing or (self.calls and (held.isspace() or not self._has_text_after_call)):
            return [Piece(held)]
        if self._forced or (cut and self._has_begun_call(held)):
            return [Piece(held, name=self._only_name(held))]
        return [Piece(held, content=held)]

    def _has_begun_call(self, held: str) -> bool:
        """Return whether a text has the marker of a call, which is not part of other content."""
        markers = self._dialect.markers[:1]
        return any(held.lstrip().startswith(marker) for marker in markers)

    def _only_name(self, held: str) -> str:
        """Return the function of a call that ends before its arguments, or nothing if unclear.

        The model chooses among all functions, unless only one of them can continue the text.
        """
        patterns = (*self._dialect.anywhere, *self._dialect.at_start)
        names = [
            name
            for name in self._names
            if first_match(patterns, held, 0, {name}) is NoMatch.INCOMPLETE
        ]
        if len(names) != 1 or not (self._forced or f'"{names[0]}"' in held):
            return ""
        self.calls += 1
        return names[0]

    def _step(self, pieces: list[Piece]) -> bool:
        """Consume at most one piece, and return whether another step may consume more."""
        match self._mode:
            case _Mode.BEGINNING:
                return self._call(pieces, self._dialect.at_start)
            case _Mode.TEXT:
                return self._text(pieces)
            case _Mode.ARGUMENTS:
                return self._arguments(pieces)
            case _Mode.OBJECT_END:
                return self._framing(pieces, OBJECT_ENDS, _Mode.AFTER_CALL)
            case _Mode.AFTER_CALL:
                return self._after_call(pieces)
            case _Mode.PLAIN:
                self._content(pieces, len(self._held))
                return False

    def _call(self, pieces: list[Piece], patterns: tuple[Pattern, ...]) -> bool:
        """Begin a call if the held text begins one."""
        found = first_match(patterns, self._held, 0, self._names)
        if isinstance(found, Match):
            source = self._take(found.end - 1)  # the brace belongs to the arguments
            pieces.append(Piece(source, name=found.name))
            self.calls += 1
            self._brackets = _Brackets()
            self._has_text_after_call = False
            self._mode = _Mode.ARGUMENTS
        elif found is NoMatch.NEVER:
            self._mode = _Mode.TEXT
        return found is not NoMatch.INCOMPLETE

    def _text(self, pieces: list[Piece]) -> bool:
        """Consume content up to the index where a call begins or may begin."""
        if self.calls and not self._several:
            self._mode = _Mode.PLAIN
            return True
        patterns = self._dialect.anywhere
        for begin in self._begins.finditer(self._held):
            found = first_match(patterns, self._held, begin.start(), self._names)
            if found is not NoMatch.NEVER:
                self._content(pieces, begin.start())
                return isinstance(found, Match) and self._call(pieces, patterns)
        self._content(pieces, len(self._held))
        return False

    def _content(self, pieces: list[Piece], length: int) -> None:
        if length:
            text = self._take(length)
            pieces.append(Piece(text, content=text))
            self._has_text_after_call |= not text.isspace()

    def _arguments(self, pieces: list[Piece]) -> bool:
        length = self._brackets.read(self._held)
        if length:
            text = self._take(length)
            pieces.append(Piece(text, arguments=text))
        if self._brackets.broken:
            self._mode = _Mode.TEXT
        elif self._brackets.closed:
            self._mode = _Mode.OBJECT_END
        return bool(self._held) and self._mode is not _Mode.ARGUMENTS

    def _framing(self, pieces: list[Piece], patterns: tuple[Pattern, ...], then: _Mode) -> bool:
        """Consume framing, if the held text begins with it."""
        found = first_match(patterns, self._held, 0, self._names)
        if isinstance(found, Match):
            pieces.append(Piece(self._take(found.end)))
            self._mode = then
        elif found is NoMatch.NEVER:
            self._mode = _Mode.TEXT
        return found is not NoMatch.INCOMPLETE

    def _after_call(self, pieces: list[Piece]) -> bool:
        following = self._dialect.following if self._several else ()
        if following and first_match(following, self._held, 0, self._names) is not NoMatch.NEVER:
            return self._call(pieces, following)
        return self._framing(pieces, self._dialect.closing, _Mode.TEXT)

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken


class _Brackets:
    """A scanner that finds the end of a JSON object by its brackets and strings.

    The scanner does not check the values.
    """

    def __init__(self) -> None:
        self._open: list[str] = []  # the missing closing brackets
        self._in_string = False
        self._escaped = False
        self.closed = False
        self.broken = False  # by a closing bracket of the wrong kind

    def read(self, text: str) -> int:
        """Return how many characters of the text belong to the object."""
        for at, character in enumerate(text):
            if self._in_string:
                self._read_in_string(character)
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._open.append("}" if character == "{" else "]")
            elif character in "}]":
                if self._open[-1] != character:
                    self.broken = True
                    return at
                self._open.pop()
                if not self._open:
                    self.closed = True
                    return at + 1
        return len(text)

    def _read_in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
