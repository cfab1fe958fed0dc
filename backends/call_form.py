"""Function calls as a form that an output is held to: what stands around arguments, and schemas.

What asks for calls and what masks tokens are far apart, maybe in two processes: a `CallForm` is
what both know, and it travels as JSON in a `GrammarSpec`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from draftgate.backends.schema_bounds import check_schema


class FunctionForm(msgspec.Struct, frozen=True):
    """A call of one function: head, arguments of a schema, tail."""

    head: str
    schema: dict[str, Any]
    tail: str


class CallForm(msgspec.Struct, frozen=True):
    """Calls of functions, and nothing else.

    Attributes:
        opened, between, closed: what is written before the first call, between two, and behind the
            last; without `between` there is one call only.
        markers: texts in these which are a token of their own where the vocabulary has it.
    """

    functions: tuple[FunctionForm, ...]
    opened: str = ""
    between: str | None = None
    closed: str = ""
    markers: tuple[str, ...] = ()


def calls_as_lark(text: str, vocabulary: Mapping[str, int], layout: Mapping[str, Any]) -> str:
    """Return the Lark grammar of a `CallForm`, as llguidance reads it.

    Args:
        text: the form's JSON.
        vocabulary: ids by token.
        layout: options of JSON, llguidance's `x-guidance`.

    Raises:
        ValueError: a schema is beyond our bounds.
    """
    form = msgspec.json.decode(text, type=CallForm)

    def literal(part: str) -> str:
        return _literal(part, form.markers, vocabulary)

    calls = "call" if form.between is None else f"call ({literal(form.between)} call)*"
    rules = [f"start: {literal(form.opened)} {calls} {literal(form.closed)}"]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(form.functions))))
    for index, function in enumerate(form.functions):
        check_schema(json.dumps(function.schema))
        schema = json.dumps({**function.schema, "x-guidance": dict(layout)})
        rules.append(
            f"call_{index}: {literal(function.head)} args_{index} {literal(function.tail)}"
        )
        rules.append(f"args_{index}: %json {schema}")
    return "\n".join(rules) + "\n"


def _literal(text: str, markers: tuple[str, ...], vocabulary: Mapping[str, int]) -> str:
    """Return the terms of a text; markers that are tokens stand as such."""
    tokens = {marker: vocabulary[marker] for marker in markers if marker in vocabulary}
    if not tokens:
        return json.dumps(text) if text else ""
    parts = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text)
    terms = (f"<[{tokens[p]}]>" if p in tokens else json.dumps(p) for p in parts if p)
    return " ".join(terms)
