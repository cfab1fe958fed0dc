"""The parameters that constrain the output to a form: `response_format` and those of vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from draftgate.backends.types import GrammarKind, GrammarSpec
from draftgate.gateway.errors import Unsupported, invalid
from draftgate.gateway.http.requests.limits import MAX_GUIDED_CHOICES
from draftgate.gateway.http.requests.schemas import (
    GenerationFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    StructuredOutputs,
)

ANY_OBJECT: Final = '{"type": "object"}'


def grammar_of(wire: GenerationFields) -> GrammarSpec | None:
    """Return the grammar that a request sets, which the worker later compiles, or None.

    Raises:
        InvalidRequest: a parameter is malformed, or several parameters set a grammar.
        Unsupported: an option of `structured_outputs` is not supported.
    """
    found = [*_of_format(wire.response_format), *_of_guided(wire)]
    if wire.structured_outputs is not None:
        found += _of_structured(wire.structured_outputs)
    if len(found) > 1:
        raise invalid(found[1].param, f"cannot be combined with {found[0].param}")
    return found[0] if found else None


def _of_format(wanted: ResponseFormat | None) -> Iterator[GrammarSpec]:
    match wanted:
        case JsonObjectFormat():
            yield GrammarSpec(GrammarKind.JSON_SCHEMA, ANY_OBJECT)
        case JsonSchemaFormat(options):
            yield GrammarSpec(GrammarKind.JSON_SCHEMA, _raw_schema(bytes(options.schema)))
        case RegexFormat(pattern):
            yield GrammarSpec(GrammarKind.REGEX, pattern)


def _of_guided(wire: GenerationFields) -> Iterator[GrammarSpec]:
    if wire.guided_json is not None:
        yield _schema(wire.guided_json, "guided_json")
    if wire.guided_regex is not None:
        yield GrammarSpec(GrammarKind.REGEX, wire.guided_regex, "guided_regex")
    if wire.guided_choice is not None:
        yield _choice(wire.guided_choice, "guided_choice")
    if wire.guided_grammar is not None:
        yield GrammarSpec(GrammarKind.GRAMMAR, wire.guided_grammar, "guided_grammar")


def _of_structured(options: StructuredOutputs) -> Iterator[GrammarSpec]:
    for name in ("structural_tag", "whitespace_pattern", "disable_additional_properties"):
        if getattr(options, name):
            raise Unsupported(f"structured_outputs.{name}")
    if options.json is not None:
        yield _schema(options.json, "structured_outputs.json")
    if options.json_object:
        yield GrammarSpec(GrammarKind.JSON_SCHEMA, ANY_OBJECT, "structured_outputs.json_object")
    if options.regex is not None:
        yield GrammarSpec(GrammarKind.REGEX, options.regex, "structured_outputs.regex")
    if options.choice is not None:
        yield _choice(options.choice, "structured_outputs.choice")
    if options.grammar is not None:
        yield GrammarSpec(GrammarKind.GRAMMAR, options.grammar, "structured_outputs.grammar")


def _raw_schema(raw: bytes) -> str:
    param = "response_format.json_schema.schema"
    if not raw.startswith(b"{"):
        raise invalid(param, "must be an object")
    try:
        return raw.decode()
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
