"""Function calls in the text of an answer, found while it is written.

The parser is a function of the text: however it comes in pieces, the calls and the content are the
same. Text that may be the beginning of a call is held back. Once the name of a function on offer
and the brace of its arguments are there, it is a call: its arguments are passed on as the model
writes them. All else is content, and no character is lost (`Piece.source`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from draftgate.gateway.http.tools.dialects import OBJECT_ENDS, Dialect
from draftgate.gateway.http.tools.patterns import Found, Pattern, Unsure, beginnings, first_match


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the text; all sources in order are the text.

    Attributes:
        source: the characters. What is none of the below is framing: tags, keys, commas.
        content: what of it the answer says.
        name: of a function whose call begins with this piece.
        arguments: what it adds to the arguments of the call that began last.
    """

    source: str
    content: str = ""
    name: str = ""
    arguments: str = ""


class _Mode(Enum):
    """What is read next."""

    BEGINNING = "the first thing of the answer"
    TEXT = "content, or a call"
    ARGUMENTS = "the inside of a call's arguments"
    OBJECT_END = "the end of a call's object"
    BEHIND = "the end of calls, or another one"
    PLAIN = "content only"


class CallParser:
    """Reads one choice's answer."""

    def __init__(self, dialect: Dialect, names: Collection[str], *, several: bool = True) -> None:
        """Read calls of the functions `names`; not `several`, and there is one call at most."""
        self._dialect = dialect
        self._names = names
        self._several = several
        self._begins = beginnings(dialect.anywhere)
        self._mode = _Mode.BEGINNING
        self._held = ""
        self._brackets = _Brackets()
        self.calls = 0

    def add(self, text: str) -> list[Piece]:
        """Return what is certain with more of the text."""
        self._held += text
        pieces: list[Piece] = []
        while self._held and self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was held back: the text has ended."""
        held, self._held = self._held, ""
        if not held:
            return []
        closing = self._mode is _Mode.OBJECT_END or (
            self._mode is _Mode.BEHIND
            and first_match(self._dialect.closing, held, 0, ()) is Unsure.NOT_YET
        )
        if closing or (self.calls and held.isspace()):
            return [Piece(held)]
        return [Piece(held, content=held)]

    def _step(self, pieces: list[Piece]) -> bool:
        """Read on by one piece; return whether more may be certain."""
        match self._mode:
            case _Mode.BEGINNING:
                return self._call(pieces, self._dialect.at_start, _Mode.TEXT)
            case _Mode.TEXT:
                return self._text(pieces)
            case _Mode.ARGUMENTS:
                return self._arguments(pieces)
            case _Mode.OBJECT_END:
                return self._framing(pieces, OBJECT_ENDS, _Mode.BEHIND, _Mode.TEXT)
            case _Mode.BEHIND:
                return self._behind(pieces)
            case _Mode.PLAIN:
                held = self._take(len(self._held))
                pieces.append(Piece(held, content=held))
                return False

    def _call(self, pieces: list[Piece], patterns: tuple[Pattern, ...], otherwise: _Mode) -> bool:
        """Begin a call if one begins here."""
        found = first_match(patterns, self._held, 0, self._names)
        if isinstance(found, Found):
            source = self._take(found.end - 1)
            pieces.append(Piece(source, name=found.name))
            self.calls += 1
            self._brackets = _Brackets()
            self._mode = _Mode.ARGUMENTS
            return True
        if found is Unsure.NOT_YET:
            return False
        self._mode = otherwise
        return True

    def _text(self, pieces: list[Piece]) -> bool:
        """Pass content on, up to where a call begins or may begin."""
        if self.calls and not self._several:
            self._mode = _Mode.PLAIN
            return True
        patterns = self._dialect.anywhere
        for begin in self._begins.finditer(self._held):
            found = first_match(patterns, self._held, begin.start(), self._names)
            if found is not Unsure.NEVER:
                self._content(pieces, begin.start())
                return isinstance(found, Found) and self._call(pieces, patterns, _Mode.TEXT)
        self._content(pieces, len(self._held))
        return False

    def _content(self, pieces: list[Piece], length: int) -> None:
        if length:
            text = self._take(length)
            pieces.append(Piece(text, content=text))

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

    def _framing(
        self, pieces: list[Piece], patterns: tuple[Pattern, ...], then: _Mode, otherwise: _Mode
    ) -> bool:
        """Take what is neither content nor call, if it stands here."""
        found = first_match(patterns, self._held, 0, self._names)
        if found is Unsure.NOT_YET:
            return False
        if isinstance(found, Found):
            pieces.append(Piece(self._take(found.end)))
            self._mode = then
        else:
            self._mode = otherwise
        return True

    def _behind(self, pieces: list[Piece]) -> bool:
        following = self._dialect.following if self._several else ()
        if following and first_match(following, self._held, 0, self._names) is not Unsure.NEVER:
            return self._call(pieces, following, _Mode.TEXT)
        return self._framing(pieces, self._dialect.closing, _Mode.TEXT, _Mode.TEXT)

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken


class _Brackets:
    """Finds the end of a JSON object by its brackets and strings; values are not looked at."""

    def __init__(self) -> None:
        self._open: list[str] = []  # what closes each
        self._in_string = False
        self._escaped = False
        self.closed = False
        self.broken = False  # by a bracket that closes another one

    def read(self, text: str) -> int:
        """Return how many characters belong to the object."""
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
