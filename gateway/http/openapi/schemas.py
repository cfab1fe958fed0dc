"""JSON schemas of the wire structs, with the bounds that validation checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from draftgate.gateway.http.requests.decoding import neutral_values
from draftgate.gateway.http.requests.limits import KEYWORDS, RANGES, REQUIRED
from draftgate.gateway.http.requests.messages import ROLES
from draftgate.gateway.http.requests.responses import (
    ITEM_TYPES,
    PART_TYPES,
    UnsupportedResponsesFields,
)
from draftgate.gateway.http.requests.schemas import UnsupportedFields
from draftgate.gateway.http.requests.tools import CHOICES
from draftgate.gateway.served import Served

REF: Final = "#/components/schemas/{name}"

Schema = dict[str, Any]

_ENUMS: Final[Mapping[str, tuple[str, ...]]] = {
    "Message.role": tuple(ROLES),
    "ContentPart.type": ("text",),
    "InputItem.type": ITEM_TYPES,
    "InputPart.type": PART_TYPES,
    "tool_choice": CHOICES,
    "verbosity": ("medium",),
}
"""Texts of which only these are taken, by field or struct and field."""

_NEUTRAL_ONLY: Final = {
    "CompletionBody": (*UnsupportedFields.__struct_fields__, "tools", "tool_choice"),
    "ChatBody": UnsupportedFields.__struct_fields__,
    "ResponsesBody": UnsupportedResponsesFields.__struct_fields__,
}
"""Fields that cannot be honoured, by struct."""


def _kinds(field: str, *kinds: tuple[str, Mapping[str, Schema]]) -> list[Schema]:
    """Return alternatives of an object: what else must be there at which value of a field."""
    return [
        {"properties": {field: {"const": value}, **more}, "required": [field, *more]}
        for value, more in kinds
    ]


_TEXT: Final = {"type": "string"}
_NULL: Final = {"type": "null"}
_CONTENT: Final = {"content": {"type": ["string", "array"]}}

_ALTERNATIVES: Final[Mapping[str, list[Schema]]] = {
    "Message": _kinds("role", *((role, {} if role == "assistant" else _CONTENT) for role in ROLES)),
    "InputItem": [
        *_kinds("role", *((role, {} if role == "assistant" else _CONTENT) for role in ROLES)),
        *_kinds(
            "type",
            ("function_call", {"call_id": _TEXT, "name": _TEXT, "arguments": _TEXT}),
            ("function_call_output", {"call_id": _TEXT, "output": {"type": ["string", "array"]}}),
        ),
    ],
    "TokenizeBody": [
        {
            "properties": {"prompt": _TEXT, "messages": _NULL, "tools": _NULL},
            "required": ["prompt"],
        },
        {
            "properties": {"messages": {"type": "array"}, "prompt": _NULL},
            "required": ["messages"],
        },
    ],
}
"""What validation demands beyond fields by themselves, by struct."""


def components(types: Iterable[Any], served: Served | None) -> tuple[list[Schema], Schema]:
    """Return the schemas of types, and those they refer to by name.

    Args:
        types: structs, of requests and of replies.
        served: the model, once it is loaded: its name and vocabulary are bounds, too.
    """
    found, named = msgspec.json.schema_components(types, ref_template=REF)
    lone = _lone_kinds(found, named)
    for name, schema in named.items():
        for field, of_field in schema.get("properties", {}).items():
            schema["properties"][field] = _bounded(name, field, of_field, served)
        _require(name, schema)
        if name in lone:
            schema["required"].remove("type")
        if name in _ALTERNATIVES:
            schema["anyOf"] = _ALTERNATIVES[name]
        if "description" in schema:
            schema["description"] = " ".join(schema["description"].split())
    return list(found), named


def _lone_kinds(found: Iterable[Schema], named: Mapping[str, Schema]) -> set[str]:
    """Return the structs whose `type` has one value and tells nothing: it may be left out."""
    told = set(_kinds_told([*found, *named.values()]))
    tagged = {name for name, schema in named.items() if len(_types(schema)) == 1}
    return {name for name in tagged if REF.format(name=name) not in told}


def _types(schema: Schema) -> Sequence[str]:
    """Return the values of the tag by which msgspec tells structs apart."""
    of_type = schema.get("properties", {}).get("type", {})
    return of_type["enum"] if of_type.keys() == {"enum"} else ()


def _kinds_told(schema: object) -> Iterator[str]:
    """Yield the references of which a `type` chooses one, anywhere in schemas."""
    if isinstance(schema, dict):
        yield from schema.get("discriminator", {}).get("mapping", {}).values()
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _kinds_told(part)


def _bounded(name: str, field: str, schema: Schema, served: Served | None) -> Schema:
    """Return a field's schema with its bounds."""
    if field in _NEUTRAL_ONLY.get(name, ()):
        return {
            "description": "Not supported: takes only values that change nothing.",
            "enum": neutral_values(field),
        }
    if (name, field) == ("Message", "function_call"):
        return {"description": "Not supported.", "enum": [None]}
    if (name, field) == ("CompletionBody", "prompt"):
        return _prompt(served)
    if name == "DetokenizeBody" and field == "tokens":
        return {"type": "array", "items": _token(served)}
    if not name.endswith("Body") and field in RANGES and name != "SpeculationOptions":
        return schema  # of a reply
    branches = schema.get("anyOf", [schema])
    for branch in branches:
        _restrict(branch, name, field)
        if field == "model" and served is not None and name.endswith("Body"):
            branch.update({"enum": [served.name]} if branch.get("type") == "string" else {})
    return schema


def _restrict(branch: Schema, name: str, field: str) -> None:
    """Add what holds for values of one type."""
    kind = branch.get("type")
    if kind in {"integer", "number"} and field in RANGES:
        branch.update(RANGES[field].keywords())
    keywords = KEYWORDS.get(f"{name}.{field}", KEYWORDS.get(field, {}))
    branch.update(keywords.get(str(kind), {}))
    enum = _ENUMS.get(f"{name}.{field}", _ENUMS.get(field))
    if kind == "string" and enum is not None:
        branch["enum"] = list(enum)


def _require(name: str, schema: Schema) -> None:
    """Demand fields that decoding alone would not miss."""
    for field, of_field in schema.get("properties", {}).items():
        if f"{name}.{field}" in REQUIRED:
            schema.setdefault("required", []).append(field)
            of_field.pop("default", None)
            of_field["anyOf"] = [one for one in of_field["anyOf"] if one.get("type") != "null"]
    if not schema.get("required", True):
        del schema["required"]


def _prompt(served: Served | None) -> Schema:
    """Return the four forms of a prompt."""
    ids = {"type": "array", "minItems": 1, "items": _token(served)}
    several = KEYWORDS["prompt"]["array"]
    texts = {"type": "array", **several, "items": {"type": "string"}}
    return {"anyOf": [{"type": "string"}, texts, ids, {"type": "array", **several, "items": ids}]}


def _token(served: Served | None) -> Schema:
    token: Schema = {"type": "integer", "minimum": 0}
    return token if served is None else {**token, "maximum": served.tokenizer.vocab_size - 1}
