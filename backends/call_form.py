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

from draftgate.backends.grammar_errors import choice_problem, grammar_problem, schema_problem
from draftgate.backends.schema_bounds import check_pattern
from draftgate.backends.schema_probe import schema_refusal
from draftgate.backends.schema_rewriting import prepare_schema
from draftgate.backends.types import GrammarKind


class FunctionForm(msgspec.Struct, frozen=True):
    """The call of a function: a head, arguments with a schema, and a tail.

    The field `strict` is that of `GrammarSpec`.
    """

    head: str
    schema: dict[str, Any]
    tail: str
    strict: bool | None = None


class ContentForm(msgspec.Struct, frozen=True):
    """The form of an output without calls: a grammar of any kind but calls, and its text."""

    kind: GrammarKind
    text: str
    strict: bool | None = None


class CallForm(msgspec.Struct, frozen=True):
    """An output that consists of function calls, or of content.

    Attributes:
        opened: text before the first call.
        between: text between two calls, or None to allow only one call.
        closed: text after the last call.
        markers: parts of these texts that are single tokens if the vocabulary contains them.
        content: form of an output without calls, or None to force a call.
    """

    functions: tuple[FunctionForm, ...]
    opened: str = ""
    between: str | None = None
    closed: str = ""
    markers: tuple[str, ...] = ()
    content: ContentForm | None = None


def calls_as_lark(text: str, vocabulary: Mapping[str, int], layout: Mapping[str, Any]) -> str:
    """Return the Lark grammar of a `CallForm` for llguidance.

    Args:
        text: the form as JSON.
        vocabulary: token ids by token.
        layout: JSON options of llguidance (`x-guidance`).

    Raises:
        ValueError: a schema or a pattern exceeds its bounds, or the content has a grammar of its
            own, whose rules could have the same names.
    """
    form = msgspec.json.decode(text, type=CallForm)

    def literal(part: str) -> str:
        return _literal(part, form.markers, vocabulary)

    calls = "call" if form.between is None else f"call ({literal(form.between)} call)*"
    rules = [f"called: {literal(form.opened)} {calls} {literal(form.closed)}"]
    if form.content is None:
        rules.append("start: called")
    else:
        rules += ["start: called | content", f"content: {_content(form.content, layout)}"]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(form.functions))))
    for index, function in enumerate(form.functions):
        schema = _schema(json.dumps(function.schema), layout, function.strict)
        rules.append(
            f"call_{index}: {literal(function.head)} args_{index} {literal(function.tail)}"
        )
        rules.append(f"args_{index}: %json {schema}")
    return "\n".join(rules) + "\n"


def call_problem(text: str, error: str) -> str:
    """Return why the calls cannot be compiled, in words about the function or content at fault.

    Args:
        text: the form as JSON.
        error: the error of llguidance, about the grammar of the whole output.
    """
    form = msgspec.json.decode(text, type=CallForm)
    for function in form.functions:
        schema = prepare_schema(json.dumps(function.schema), strict=function.strict)
        problem = schema_refusal(json.loads(schema))
        if problem:
            return f"{function.head.strip()}: {schema_problem(schema, problem)}"
    if form.content is not None and form.content.kind is GrammarKind.JSON_SCHEMA:
        schema = prepare_schema(form.content.text, strict=form.content.strict)
        return schema_problem(schema, schema_refusal(json.loads(schema)) or error)
    return grammar_problem("::=", error)  # without positions, which are those of the whole


def _content(form: ContentForm, layout: Mapping[str, Any]) -> str:
    """Return the Lark terms of content."""
    if form.kind is GrammarKind.JSON_SCHEMA:
        return f"%json {_schema(form.text, layout, form.strict)}"
    if form.kind is GrammarKind.REGEX:
        check_pattern(form.text)
        # A slash or a line break would end the pattern.
        escaped = re.sub(r"\\.|/", lambda found: f"\\{found[0]}"[-2:], form.text, flags=re.DOTALL)
        return "/" + escaped.replace("\n", "\\n") + "/"
    if form.kind is GrammarKind.CHOICE:
        return choice_as_lark(form.text)
    raise ValueError("a context-free grammar cannot be combined with tools")


def _schema(text: str, layout: Mapping[str, Any], strict: bool | None) -> str:
    """Return a schema for llguidance, with a layout."""
    schema = json.loads(prepare_schema(text, strict=strict))
    return json.dumps({**schema, "x-guidance": dict(layout)})


def choice_as_lark(text: str) -> str:
    """Return the Lark alternatives of a JSON list of texts.

    Raises:
        ValueError: the text is not such a list, or contains half of a surrogate pair.
    """
    try:
        texts = msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError:
        raise ValueError(choice_problem(text)) from None
    return " | ".join(map(json.dumps, texts))


def _literal(text: str, markers: tuple[str, ...], vocabulary: Mapping[str, int]) -> str:
    """Return the Lark terms of a text, with a token for each marker in the vocabulary."""
    tokens = {marker: vocabulary[marker] for marker in markers if marker in vocabulary}
    if not tokens:
        return json.dumps(text) if text else ""
    parts = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text)
    terms = (f"<[{tokens[p]}]>" if p in tokens else json.dumps(p) for p in parts if p)
    return " ".join(terms)
