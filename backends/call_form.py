"""Grammars of function calls: the text around the calls, and the schemas of their arguments.

The API layer writes a `CallForm` for a model's call syntax, and the engine masks tokens with it.
The form travels to the engine, which may be another process, as JSON in a `GrammarSpec`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from draftgate.backends.schema_bounds import check_schema


class FunctionForm(msgspec.Struct, frozen=True):
    """The call of a function: a head, arguments with a schema, and a tail."""

    head: str
    schema: dict[str, Any]
    tail: str


class CallForm(msgspec.Struct, frozen=True):
    """An output that consists of function calls.

    Attributes:
        opened: text before the first call.
        between: text between two calls, or None to allow only one call.
        closed: text after the last call.
        markers: parts of these texts that are single tokens if the vocabulary contains them.
    """

    functions: tuple[FunctionForm, ...]
    opened: str = ""
    between: str | None = None
    closed: str = ""
    markers: tuple[str, ...] = ()


def calls_as_lark(text: str, vocabulary: Mapping[str, int], layout: Mapping[str, Any]) -> str:
    """Return the Lark grammar of a `CallForm` for llguidance.

    Args:
        text: the form as JSON.
        vocabulary: token ids by token.
        layout: JSON options of llguidance (`x-guidance`).

    Raises:
        ValueError: a schema exceeds the bounds of `check_schema`.
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
    """Return the Lark terms of a text, with a token for each marker in the vocabulary."""
    tokens = {marker: vocabulary[marker] for marker in markers if marker in vocabulary}
    if not tokens:
        return json.dumps(text) if text else ""
    parts = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text)
    terms = (f"<[{tokens[p]}]>" if p in tokens else json.dumps(p) for p in parts if p)
    return " ".join(terms)
