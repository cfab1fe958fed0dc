"""JSON schemas of the wire structs, with the bounds that validation checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from draftgate.gateway.batches.batch import ENDPOINTS
from draftgate.gateway.config.schema import MAX_REQUEST_TOKENS
from draftgate.gateway.http.requests.inventory import FieldLists
from draftgate.gateway.http.requests.limits import (
    KEYWORDS,
    LEAST_TOKENS,
    MAX_EMBEDDED_TEXTS,
    RANGES,
    REQUIRED,
)
from draftgate.gateway.http.requests.messages import PART_TYPES, ROLES
from draftgate.gateway.http.requests.responses import (
    INPUT_PART_TYPES,
    ITEM_TYPES,
    PART_FIELDS,
)
from draftgate.gateway.http.requests.schemas import Body
from draftgate.gateway.http.requests.tools import CHOICES
from draftgate.gateway.served_model import ServedModel

Schema = dict[str, Any]

_REF: Final = "#/components/schemas/{name}"

_ENUMS: Final[Mapping[str, tuple[str, ...]]] = {
    "Message.role": tuple(ROLES),
    "ContentPart.type": PART_TYPES,
    "InputItem.type": ITEM_TYPES,
    "InputPart.type": tuple(PART_FIELDS),
    "tool_choice": CHOICES,
    "BatchBody.endpoint": ENDPOINTS,
}
"""The allowed strings, by field or by struct and field."""

_PROMPTS: Final = {
    ("CompletionBody", "prompt"): MAX_REQUEST_TOKENS // LEAST_TOKENS,
    ("EmbeddingBody", "input"): MAX_EMBEDDED_TEXTS,
}
"""The largest number of prompts, by struct and field."""

_TYPE_IS_OPTIONAL: Final = {
    *("AllowedTool", "FlatAllowedTool", "FlatTool", "JsonSchemaOutput", "Prediction", "TextPart"),
    *("Tool", "ToolCallMessage"),
}
"""Structs whose `type` has only one value and is therefore optional."""


def _alternative(
    required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None
) -> Schema:
    """Return one form of an object, with the fields that this form requires."""
    return {"properties": {**required, **(optional or {})}, "required": [*required]}


def _kinds(field: str, *kinds: tuple[str, Mapping[str, Schema]]) -> list[Schema]:
    """Return the alternatives of an object, with the fields that each value of a field requires."""
    return [_alternative({field: {"const": value}, **more}) for value, more in kinds]


def _content(*types: str) -> Schema:
    """Return the schema of a content, which is a text or a list of parts of some types."""
    parts = {"properties": {"type": {"enum": [*types]}}}
    return {"type": ["string", "array"], "items": parts}


_TEXT: Final = {"type": "string"}
_NULL: Final = {"type": "null"}
_ASSISTANT: Final = {"role": {"const": "assistant"}}
_OTHERS: Final = {"role": {"enum": [role for role in ROLES if role != "assistant"]}}
_NO_REFUSAL: Final = {"refusal": {"enum": [None, ""]}}
_MESSAGE: Final = {"type": {"const": "message"}}
_INPUT_TEXTS: Final = _content(*(kind for kind, of in INPUT_PART_TYPES.items() if of == "text"))
_ANSWER: Final = {"content": {"anyOf": [_NULL, _content(*INPUT_PART_TYPES)]}}

_ALTERNATIVES: Final[Mapping[str, list[Schema]]] = {
    "ContentPart": _kinds("type", *((kind, {kind: _TEXT}) for kind in PART_TYPES)),
    "InputPart": _kinds("type", *((kind, {field: _TEXT}) for kind, field in PART_FIELDS.items())),
    "Message": [
        _alternative(_ASSISTANT),
        _alternative({**_OTHERS, "content": _content("text")}, _NO_REFUSAL),
    ],
    "InputItem": [
        _alternative(_ASSISTANT, {**_MESSAGE, **_ANSWER}),
        _alternative({**_OTHERS, "content": _INPUT_TEXTS}, _MESSAGE),
        *_kinds(
            "type",
            ("function_call", {"call_id": _TEXT, "name": _TEXT, "arguments": _TEXT}),
            ("function_call_output", {"call_id": _TEXT, "output": _INPUT_TEXTS}),
            ("reasoning", {}),
        ),
    ],
    "ToolChoice": _kinds(
        "type", ("tool", {"name": _TEXT}), ("auto", {}), ("any", {}), ("none", {})
    ),
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
"""Combinations of fields that validation requires, by struct."""

_NEEDS_STREAM: Final = ("stream_options", {"stream": {"const": True}})
_IMPLIED: Final[Mapping[str, tuple[tuple[str, Mapping[str, Schema]], ...]]] = {
    "ChatBody": (_NEEDS_STREAM, ("top_logprobs", {"logprobs": {"const": True}})),
    "CompletionBody": (_NEEDS_STREAM,),
    "StreamOptions": (("continuous_usage_stats", {"include_usage": {"const": True}}),),
}
"""Fields that need others unless they are empty, by struct."""


_CLOSED: Final = {"KeyBody", "KeyChangesBody", "RotationBody"}
"""Bodies whose unknown fields are errors, because they could be misspelt limits."""

_NOT_EMPTY: Final = {"KeyChangesBody"}
"""Bodies that must have a field."""


def _implication(field: str, others: Mapping[str, Schema]) -> Schema:
    """Return the schema of an object in which a field is empty, or others have their values."""
    empty = {"properties": {field: {"enum": [None, False, 0]}}}
    return {"anyOf": [empty, _alternative(others)]}


def components(types: Iterable[Any], served: ServedModel | None) -> tuple[list[Schema], Schema]:
    """Return the schemas of types, and the schemas to which they refer, by name.

    Args:
        types: structs of requests and replies.
        served: the model, once it is loaded. Its name and vocabulary become bounds.
    """
    types = list(types)
    found, named = msgspec.json.schema_components(types, ref_template=_REF)
    lists = {kind.__name__: kind.lists for kind in types if _is_body(kind)}
    for name, schema in named.items():
        if name not in _CLOSED:
            schema.pop("additionalProperties", None)  # only says that another module reads them
        for field, of_field in schema.get("properties", {}).items():
            schema["properties"][field] = _bounded(name, field, of_field, served)
        if name in lists:
            _add_unlisted(schema["properties"], lists[name])
        _require(name, schema)
        if name in _NOT_EMPTY:
            schema["minProperties"] = 1
        if name in _TYPE_IS_OPTIONAL:
            schema["required"].remove("type")
        if name in _ALTERNATIVES:
            schema["anyOf"] = _ALTERNATIVES[name]
        if name in _IMPLIED:
            schema["allOf"] = [_implication(*needed) for needed in _IMPLIED[name]]
        if "description" in schema:
            schema["description"] = " ".join(schema["description"].split())
    return list(found), named


def _is_body(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Body)


def _add_unlisted(properties: dict[str, Schema], lists: FieldLists) -> None:
    """Add the refused fields with their neutral values, and the other names of fields."""
    for path, (advice, neutral) in lists.refused.items():
        if path not in properties and "." not in path:
            properties[path] = {
                "description": f"Not supported: {advice}. The values here change nothing.",
                "enum": [None, *neutral],
            }
    for alias, names in lists.aliases.items():
        usual = next((name for name in names if name in properties), None)
        if usual is not None and alias not in properties:
            properties[alias] = {**properties[usual], "description": f"The same as {usual}."}


def _bounded(name: str, field: str, schema: Schema, served: ServedModel | None) -> Schema:
    """Return a field's schema with its bounds."""
    if field == "schema" and name not in {"JsonObjectFormat", "JsonSchemaFormat"}:
        return {"type": "object"}
    if (name, field) in _PROMPTS:
        return _prompt(_PROMPTS[name, field], served)
    if name == "DetokenizeBody" and field == "tokens":
        return {"type": "array", "items": _token(served)}
    if not name.endswith("Body") and field in RANGES and name != "SpeculationOptions":
        return schema  # the struct belongs to a response
    branches = schema.get("anyOf", [schema])
    for branch in branches:
        _restrict(branch, name, field)
        if field in {"allowed_token_ids", "stop_token_ids"} and "items" in branch:
            branch["items"] = _token(served)
        if field == "model" and served is not None and name.endswith("Body"):
            branch.update({"enum": [served.name]} if branch.get("type") == "string" else {})
    return schema


def _restrict(branch: Schema, name: str, field: str) -> None:
    """Add the bounds of one type of a field's values."""
    kind = branch.get("type")
    if kind in {"integer", "number"} and field in RANGES:
        branch.update(RANGES[field].keywords())
    keywords = KEYWORDS.get(f"{name}.{field}", KEYWORDS.get(field, {}))
    branch.update(keywords.get(str(kind), {}))
    enum = _ENUMS.get(f"{name}.{field}", _ENUMS.get(field))
    if kind == "string" and enum is not None:
        branch["enum"] = list(enum)


def _require(name: str, schema: Schema) -> None:
    """Require the fields that decoding does not require."""
    for field, of_field in schema.get("properties", {}).items():
        if f"{name}.{field}" in REQUIRED:
            schema.setdefault("required", []).append(field)
            of_field.pop("default", None)
            of_field["anyOf"] = [one for one in of_field["anyOf"] if one.get("type") != "null"]
    if not schema.get("required", True):
        del schema["required"]


def _prompt(most: int, served: ServedModel | None) -> Schema:
    """Return the schema of a prompt: text, token ids, or a list of at most `most` of either."""
    ids = {"type": "array", "minItems": 1, "items": _token(served)}
    several = {"type": "array", "minItems": 1, "maxItems": most}
    texts = {**several, "items": {"type": "string"}}
    return {"anyOf": [{"type": "string"}, texts, ids, {**several, "items": ids}]}


def _token(served: ServedModel | None) -> Schema:
    token: Schema = {"type": "integer", "minimum": 0}
    return token if served is None else {**token, "maximum": served.tokenizer.vocab_size - 1}
