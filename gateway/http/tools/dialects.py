"""How models write function calls: one dialect for each family of chat templates.

All of them write an object of a name and arguments; they differ in what stands around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from draftgate.gateway.http.tools.patterns import Element, Pattern

SPACE: Final = Element.SPACE

OBJECT_ENDS: Final[tuple[Pattern, ...]] = (
    (SPACE, "}"),
    (SPACE, ",", SPACE, '"id"', SPACE, ":", SPACE, Element.ID, SPACE, "}"),
)
"""What may stand behind the arguments: the end, or the id which Mistral's models give a call."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How calls stand in an answer.

    Attributes:
        at_start: what begins a call as the first thing of an answer, up to its arguments' brace.
        anywhere: what begins one anywhere in a text.
        following: what begins another one right behind a call.
        closing: what belongs to the calls behind them; it is not text, if it is there.
        arguments: the key of the arguments.
        opened, between, closed: what is written around objects when calls are forced; `between`
            is None where there is one call only.
        markers: of these, what the vocabulary may have as one token.
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


def _objects(*before: str | Element, keys: tuple[str, ...] = ("arguments",)) -> tuple[Pattern, ...]:
    """Return what stands up to the arguments, with a type before the name or without."""
    kind = ('"type"', SPACE, ":", SPACE, '"function"', SPACE, ",", SPACE)
    name = ('"name"', SPACE, ":", SPACE, Element.NAME, SPACE, ",", SPACE)
    return tuple(
        (*before, SPACE, "{", SPACE, *more, *name, f'"{key}"', SPACE, ":", SPACE, "{")
        for more in ((), kind)
        for key in keys
    )


HERMES: Final = Dialect(
    "hermes",
    at_start=(),
    anywhere=_objects(SPACE, "<tool_call>"),
    following=(),
    closing=((SPACE, "</tool_call>"),),
    arguments="arguments",
    opened="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    closed="\n</tool_call>",
    markers=("<tool_call>", "</tool_call>"),
)
"""Hermes, Qwen2.5 and Qwen3: JSON between tags, one pair for each call."""

MISTRAL: Final = Dialect(
    "mistral",
    # The marker is a special token, which leaves no text.
    at_start=_objects(SPACE, "["),
    anywhere=_objects(SPACE, "[TOOL_CALLS]", SPACE, "["),
    following=_objects(SPACE, ","),
    closing=((SPACE, "]"),),
    arguments="arguments",
    opened="[TOOL_CALLS][",
    between=", ",
    closed="]",
    markers=("[TOOL_CALLS]",),
)
"""Mistral 7B v0.3 and Nemo: a marker, and a JSON list of calls."""

LLAMA: Final = Dialect(
    "llama",
    at_start=(
        *_objects(keys=("parameters", "arguments")),
        *_objects(SPACE, "<|python_tag|>", keys=("parameters", "arguments")),
    ),
    anywhere=(),
    following=_objects(SPACE, ";", keys=("parameters", "arguments")),
    closing=(),
    arguments="parameters",
    opened="",
    between=None,
    closed="",
)
"""Llama 3.1 and 3.2: the answer is a JSON object, or several between semicolons."""


def dialect_of(template: str | None) -> Dialect | None:
    """Return how a model writes calls, by what its chat template says about tools.

    None for templates that know no tools, and for those which lay calls out in a way that is not
    known here (`<function=...>`, `name[ARGS]`).
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
