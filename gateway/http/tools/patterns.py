"""Patterns that know whether a text may still become one: what `re` does not tell of a prefix."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Final

MOST_SPACE: Final = 64
"""White space characters in a row that may belong to a pattern: what is held back is bounded.
Models lay calls out with one or two."""

MOST_ID: Final = 64
"""Characters of an id that a model gives its call."""

_WHITE: Final = frozenset(" \t\r\n")


class Element(Enum):
    """A part of a pattern that is no literal."""

    SPACE = "any white space, or none"
    NAME = "the name of a function on offer, as a JSON string"
    ID = "letters and digits, as a JSON string"


Pattern = tuple["str | Element", ...]


@dataclass(frozen=True, slots=True)
class Found:
    """A pattern that matches.

    Attributes:
        end: where the text goes on behind it.
        name: of the function.
    """

    end: int
    name: str = ""


class Unsure(Enum):
    """What a pattern says of a text that it does not match."""

    NEVER = "whatever follows"
    NOT_YET = "it may match once more text is there"


def match(pattern: Pattern, text: str, at: int, names: Collection[str]) -> Found | Unsure:
    """Return whether a pattern begins at a place of a text that may go on."""
    name = ""
    for element in pattern:
        if element is Element.SPACE:
            at += _white(text, at)
        elif element is Element.ID:
            end = _id_end(text, at)
            if isinstance(end, Unsure):
                return end
            at = end
        else:
            literals = [f'"{n}"' for n in names] if element is Element.NAME else [str(element)]
            literal = next((one for one in literals if text.startswith(one, at)), None)
            if literal is None:
                rest = text[at:]
                open_end = any(one.startswith(rest) for one in literals)
                return Unsure.NOT_YET if open_end else Unsure.NEVER
            at += len(literal)
            name = literal[1:-1] if element is Element.NAME else name
    return Found(at, name)


def first_match(
    patterns: Sequence[Pattern], text: str, at: int, names: Collection[str]
) -> Found | Unsure:
    """Return the shortest match of several patterns, whichever text is there already."""
    results = [match(pattern, text, at, names) for pattern in patterns]
    found = [result for result in results if isinstance(result, Found)]
    if found:
        return min(found, key=lambda one: one.end)
    return Unsure.NOT_YET if Unsure.NOT_YET in results else Unsure.NEVER


@cache
def beginnings(patterns: tuple[Pattern, ...]) -> re.Pattern[str]:
    """Return what finds the characters with which one of the patterns may begin."""
    first: set[str] = set()
    for pattern in patterns:
        if pattern[0] is Element.SPACE:
            first |= _WHITE
        literal = next(element for element in pattern if element is not Element.SPACE)
        first.add('"' if isinstance(literal, Element) else literal[0])
    return re.compile("[" + re.escape("".join(sorted(first))) + "]" if first else "(?!)")


def _white(text: str, at: int) -> int:
    """Return how many white space characters stand there, up to the bound."""
    count = 0
    while count < MOST_SPACE and at + count < len(text) and text[at + count] in _WHITE:
        count += 1
    return count


def _id_end(text: str, at: int) -> int | Unsure:
    if at >= len(text):
        return Unsure.NOT_YET
    if text[at] != '"':
        return Unsure.NEVER
    end = at + 1
    while end < len(text) and text[end].isascii() and text[end].isalnum():
        end += 1
    if end - at > MOST_ID:
        return Unsure.NEVER
    if end == len(text):
        return Unsure.NOT_YET
    return end + 1 if text[end] == '"' else Unsure.NEVER
