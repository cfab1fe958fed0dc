"""The parameters that constrain the output to a form: `response_format` and those of vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec import Raw

from draftgate.backends.types import GrammarKind, GrammarSpec
from draftgate.gateway.errors import invalid
from draftgate.gateway.http.requests.decoding import values_of
from draftgate.gateway.http.requests.limits import MAX_GUIDED_CHOICES
from draftgate.gateway.http.requests.schemas import (
    JsonObjectFormat,
    JsonSchemaFormat,
    JsonSchemaOptions,
    RegexFormat,
    ResponseFormat,
    SharedFields,
    StructuredOutputs,
)

_GUIDED: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_PLAIN: Final = ("json_schema", "regex", "grammar", "ebnf")
_FIELDS: Final = ("response_format", "structured_outputs", *_GUIDED, *_PLAIN)

FORMAT_PARAMS: Final = ("response_format.json_schema", "response_format")
"""The paths of parameters that endpoints with a format of their own name differently."""

ANY_OBJECT: Final = '{"type": "object"}'


def grammar_of(wire: SharedFields) -> GrammarSpec | None:
    """Return the grammar that a request sets, which the worker later compiles, or None.

    Raises:
        InvalidRequest: a parameter is malformed, or several parameters set a grammar.
    """
    if values_of(wire, _FIELDS).count(None) == len(_FIELDS):
        return None  # the usual case
    found = [*_of_format(wire.response_format), *_of_guided(wire)]
    if wire.structured_outputs is not None:
        found += _of_structured(wire.structured_outputs)
    if len(found) > 1:
        raise invalid(found[1].param, f"cannot be combined with {found[0].param}")
    return found[0] if found else None


def _of_format(wanted: ResponseFormat | None) -> Iterator[GrammarSpec]:
    match wanted:
        case JsonObjectFormat(None):
            yield GrammarSpec(GrammarKind.JSON_SCHEMA, ANY_OBJECT)
        case JsonObjectFormat(dict(schema)):
            yield _schema(schema, "response_format.schema")
        case JsonSchemaFormat(options, schema):
            yield _of_json_schema(options, schema)
        case RegexFormat(pattern):
            yield GrammarSpec(GrammarKind.REGEX, pattern)


def _of_json_schema(
    options: JsonSchemaOptions | None, schema: dict[str, Any] | None
) -> GrammarSpec:
    if options is not None and schema is not None:
        raise invalid("response_format.schema", "cannot be combined with json_schema")
    if options is not None:
        param = "response_format.json_schema.schema"
        return _raw_schema(options.schema, param, strict=options.strict)
    if schema is not None:
        return _schema(schema, "response_format.schema")
    raise invalid("response_format.json_schema", "must be given")


def _of_guided(wire: SharedFields) -> Iterator[GrammarSpec]:
    """Yield the grammars of vLLM's older names, and of the names of llama.cpp and SGLang."""
    yield from _of_forms(*values_of(wire, _GUIDED), prefix="guided_")
    if wire.json_schema is not None:
        yield _schema(wire.json_schema, "json_schema")
    yield from _of_forms(None, wire.regex, None, wire.grammar, prefix="")
    if wire.ebnf is not None:
        yield GrammarSpec(GrammarKind.GRAMMAR, wire.ebnf, "ebnf")


def _of_structured(options: StructuredOutputs) -> Iterator[GrammarSpec]:
    forms = (options.json, options.regex, options.choice, options.grammar)
    yield from _of_forms(*forms, prefix="structured_outputs.", any_object=options.json_object)


def _of_forms(
    schema: str | dict[str, Any] | None,
    regex: str | None,
    choice: Sequence[str] | None,
    grammar: str | None,
    *,
    prefix: str,
    any_object: bool | None = False,
) -> Iterator[GrammarSpec]:
    """Yield the grammars that are set, whose parameters begin with a prefix."""
    if schema is not None:
        yield _schema(schema, f"{prefix}json")
    if any_object:
        yield GrammarSpec(GrammarKind.JSON_SCHEMA, ANY_OBJECT, f"{prefix}json_object")
    if regex is not None:
        yield GrammarSpec(GrammarKind.REGEX, regex, f"{prefix}regex")
    if choice is not None:
        yield _choice(choice, f"{prefix}choice")
    if grammar is not None:
        yield GrammarSpec(GrammarKind.GRAMMAR, grammar, f"{prefix}grammar")


def _raw_schema(raw: Raw, param: str, *, strict: bool | None = None) -> GrammarSpec:
    if not bytes(raw).startswith(b"{"):
        raise invalid(param, "must be an object")
    try:
        return GrammarSpec(GrammarKind.JSON_SCHEMA, bytes(raw).decode(), strict=strict)
    except UnicodeDecodeError as error:
        raise invalid(param, str(error)) from None


def _schema(schema: str | dict[str, Any], param: str) -> GrammarSpec:
    """Return the grammar of a JSON schema, which is an object or its text."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    if not text.lstrip().startswith("{"):
        raise invalid(param, "must be a JSON schema that is an object")
    return GrammarSpec(GrammarKind.JSON_SCHEMA, text, param)


def _choice(texts: Sequence[str], param: str) -> GrammarSpec:
    if not 0 < len(texts) <= MAX_GUIDED_CHOICES:
        raise invalid(param, f"must have 1 to {MAX_GUIDED_CHOICES} texts, not {len(texts)}")
    if not all(texts):
        raise invalid(param, "must not contain an empty text")
    return GrammarSpec(GrammarKind.CHOICE, json.dumps(texts), param)
