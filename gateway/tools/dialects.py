"""The formats of function calls, with one dialect for each family of chat templates.

All dialects write a JSON object with a name and arguments, but differ in the text around it.
Patterns are matched against text that the model is still writing, so a match can be incomplete. The
module `re` does not report incomplete matches.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Final

Pattern = tuple[str, ...]
"""Literals with optional white space between them. `NAME` and `ID` match JSON strings."""

NAME: Final = "NAME"
"""The name of a function on offer."""

ID: Final = "ID"
"""The id that Mistral's models give a call, which has letters and digits."""

MOST_SPACE: Final = 64
"""Maximum consecutive white space in a pattern. The parser holds back text that may match, so the
length must be bounded. Models write one or two characters."""

_WHITE: Final = " \t\r\n"
_ID: Final = re.compile(r'"[a-zA-Z0-9]{0,63}')


@dataclass(frozen=True, slots=True)
class Match:
    """A match of a pattern.

    Attributes:
        end: index of the first character after the match.
        name: name of the function, if the pattern has one.
    """

    end: int
    name: str = ""


class NoMatch(Enum):
    """The reason why a pattern does not match."""

    NEVER = "further text cannot make it match"
    INCOMPLETE = "further text may make it match"


def match(pattern: Pattern, text: str, at: int, names: Collection[str]) -> Match | NoMatch:
    """Match a pattern at an index of a text that may continue.

    Args:
        names: names of the functions on offer.
    """
    name = ""
    for index, element in enumerate(pattern):
        if index:
            near = text[at : at + MOST_SPACE]
            at += len(near) - len(near.lstrip(_WHITE))
        if element == ID:
            digits = _ID.match(text, at)
            literals = [(digits[0] if digits else '"') + '"']
        else:
            literals = [f'"{one}"' for one in names] if element == NAME else [element]
        literal = next((one for one in literals if text.startswith(one, at)), None)
        if literal is None:
            incomplete = any(one.startswith(text[at:]) for one in literals)
            return NoMatch.INCOMPLETE if incomplete else NoMatch.NEVER
        at += len(literal)
        name = literal[1:-1] if element == NAME else name
    return Match(at, name)


def first_match(
    patterns: Sequence[Pattern], text: str, at: int, names: Collection[str]
) -> Match | NoMatch:
    """Return the shortest match of several patterns, as `match` does for one pattern."""
    results = [match(pattern, text, at, names) for pattern in patterns]
    found = [result for result in results if isinstance(result, Match)]
    if found:
        return min(found, key=lambda one: one.end)
    return NoMatch.INCOMPLETE if NoMatch.INCOMPLETE in results else NoMatch.NEVER


@cache
def beginnings(patterns: tuple[Pattern, ...]) -> re.Pattern[str]:
    """Return a regular expression for the characters with which the patterns may begin."""
    first: set[str] = set()
    for pattern in patterns:
        if not pattern[0]:
            first |= set(_WHITE)
        first.add(next(element for element in pattern if element)[0])
    return re.compile("[" + re.escape("".join(sorted(first))) + "]" if first else "(?!)")


@dataclass(frozen=True, slots=True)
class Dialect:
    """The format of calls in a response.

    Attributes:
        at_start: patterns of a call at the start of a response, up to the brace of its arguments.
        anywhere: patterns of a call anywhere in a text, up to the same brace.
        following: patterns of another call directly after a call.
        closing: patterns of the optional end of the calls, which is not part of the text.
        arguments: the key of the arguments.
        opened, between, closed: the text around the objects of forced calls. The value of `between`
            is None if a response can have only one call.
        markers: the strings of the dialect that the vocabulary may have as one token.
    """

    name: str
    at_start: tuple[Pattern, ...]
    anywhere: tuple[Pattern, ...]
    following: tuple[Pattern, ...]
    closing: tuple[Pattern, ...]
    arguments: str
    opened: str
    between: str | None
    closed: str
    markers: tuple[str, ...] = ()


def _pattern(text: str) -> Pattern:
    """Return the pattern of a text in which a space means optional white space."""
    return tuple(text.split(" "))


def _objects(before: str, keys: tuple[str, ...] = ("arguments",)) -> tuple[Pattern, ...]:
    """Return patterns of a call's object up to its arguments, with or without a type."""
    return tuple(
        _pattern(f'{before} {{ {kind}"name" : {NAME} , "{key}" : {{')
        for kind in ("", '"type" : "function" , ')
        for key in keys
    )


OBJECT_ENDS: Final = (_pattern(" }"), _pattern(f' , "id" : {ID} }}'))
"""Patterns that may follow the arguments of a call."""

HERMES: Final = Dialect(
    "hermes",
    at_start=(),
    anywhere=_objects(" <tool_call>"),
    following=(),
    closing=(_pattern(" </tool_call>"),),
    arguments="arguments",
    opened="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    closed="\n</tool_call>",
    markers=("<tool_call>", "</tool_call>"),
)
"""The dialect of Hermes, Qwen2.5 and Qwen3, with JSON between a pair of tags for each call."""

MISTRAL: Final = Dialect(
    "mistral",
    at_start=_objects(" ["),  # the marker is a special token and leaves no text
    anywhere=_objects(" [TOOL_CALLS] ["),
    following=_objects(" ,"),
    closing=(_pattern(" ]"),),
    arguments="arguments",
    opened="[TOOL_CALLS][",
    between=", ",
    closed="]",
    markers=("[TOOL_CALLS]",),
)
"""The dialect of Mistral 7B v0.3 and Nemo, with a marker and a JSON list of calls."""

DESCRIBED: Final = replace(HERMES, name="described", at_start=_objects(""))
"""The dialect of models whose template has no tools in a known format, for which the prompt
describes the tools (`described`). Small models often omit the tags, and some vocabularies have them
as special tokens, which leave no text."""

_LLAMA_KEYS: Final = ("parameters", "arguments")

LLAMA: Final = Dialect(
    "llama",
    at_start=(*_objects("", _LLAMA_KEYS), *_objects(" <|python_tag|>", _LLAMA_KEYS)),
    anywhere=(),
    following=_objects(" ;", _LLAMA_KEYS),
    closing=(),
    arguments="parameters",
    opened="",
    between=None,
    closed="",
)
"""The dialect of Llama 3.1 and 3.2, with one or more JSON objects separated by semicolons."""


def dialect_for(template: str | None, *, describes_tools: bool) -> Dialect | None:
    """Return the dialect in which a model gets tools, or None if it gets none.

    Args:
        template: the chat template, or None for a model without chats.
        describes_tools: whether the prompt may describe tools that the template cannot.
    """
    known = dialect_of(template)
    return DESCRIBED if known is None and template is not None and describes_tools else known


def dialect_of(template: str | None) -> Dialect | None:
    """Return the dialect of a model from its chat template.

    The result is None for templates without tools, and for unsupported layouts (`<function=...>`,
    `name[ARGS]`).
    """
    if template is None or "tools" not in template:
        return None
    if "<tool_call>" in template:
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else MISTRAL
    if '{"name": function name, "parameters"' in template:
        return LLAMA
    return None
