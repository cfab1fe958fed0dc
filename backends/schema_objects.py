"""Objects of JSON schemas whose keys cannot exist, so that the output would stop before a key."""

from __future__ import annotations

from typing import Any, Final

from draftgate.backends.schema_probe import has_key, schema_refusal
from draftgate.backends.schema_walk import ANNOTATIONS, Schema, required_names, types_of

_NULL: Final = {"type": "null"}


def without_dead_keys(schema: Schema, _: str = "") -> Any:
    """Return an object's schema without patterns that match only its named properties.

    llguidance generates the other properties after the named ones. If no other name matches a
    pattern, the grammar allows a comma after which nothing can follow.
    """
    schema = _merged(schema)
    patterns, named = schema.get("patternProperties"), schema.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(named, dict) or not patterns:
        return schema
    if any(map(_is_unusable, patterns)):
        return schema  # llguidance refuses it
    named, taken = dict(named), {*named, *required_names(schema)}
    kept = dict[str, Any]()
    for pattern, value in patterns.items():
        if value is not False and has_key(_only({pattern: _NULL}, taken, more=False)):
            kept[pattern] = value
            continue
        for name in sorted(taken):
            if not schema_refusal({"const": name, "pattern": pattern}):
                own = named.get(name, True)
                named[name] = value if own is True else {"allOf": [own, value]}
        if value is False:
            kept[pattern] = value  # it excludes names from the additional properties
    found = {**schema, "properties": named, "patternProperties": kept}
    more = schema.get("additionalProperties", True)
    everywhere = dict.fromkeys(patterns, False)
    if more is not False and not has_key(_only(everywhere, taken, more=_NULL)):
        found["additionalProperties"] = False
    if not named:
        del found["properties"]
    if not kept:
        del found["patternProperties"]
    return found


def _is_unusable(pattern: str) -> bool:
    return bool(schema_refusal({"type": "object", "patternProperties": {pattern: _NULL}}))


def _only(patterns: dict[str, Any], taken: set[str], *, more: Any) -> Schema:
    """Return the schema of objects that have a property, and none with a taken name."""
    return {
        "type": "object",
        "properties": dict.fromkeys(sorted(taken), False),
        "patternProperties": patterns,
        "additionalProperties": more,
        "minProperties": 1,
    }


_MERGED: Final = frozenset(
    {"type", "properties", "patternProperties", "additionalProperties", "required"}
)


def _merged(schema: Schema) -> Schema:
    """Merge the objects of `allOf` into one, because a pattern of one may match names of another.

    The order of the properties stays, as llguidance merges them in the same order.
    """
    options = schema.get("allOf")
    if not isinstance(options, list) or "$ref" in schema or "object" not in types_of(schema):
        return schema
    objects = [_without_annotations(one) for one in options if isinstance(one, dict)]
    mergeable = all(one.get("type") == "object" and set(one) <= _MERGED for one in objects)
    if not mergeable or len(objects) != len(options):
        return schema
    if not any("patternProperties" in one for one in (schema, *objects)):
        return schema
    own = {key: value for key, value in schema.items() if key in _MERGED}
    merged = own
    for one in objects:
        merged = _both(merged, one)
    rest = {key: value for key, value in schema.items() if key not in _MERGED and key != "allOf"}
    return {**rest, **merged, "type": "object"}


def _without_annotations(schema: Schema) -> Schema:
    return {key: value for key, value in schema.items() if key not in ANNOTATIONS}


def _both(one: Schema, other: Schema) -> Schema:
    """Return the schema of objects that satisfy two schemas of objects."""
    names = dict.fromkeys([*one.get("properties", {}), *other.get("properties", {})])
    patterns = dict.fromkeys(
        [*one.get("patternProperties", {}), *other.get("patternProperties", {})]
    )
    return {
        "properties": {n: _all([*_for_name(one, n), *_for_name(other, n)]) for n in names},
        "patternProperties": {
            p: _all([_for_pattern(one, p), _for_pattern(other, p)]) for p in patterns
        },
        "required": list(dict.fromkeys([*required_names(one), *required_names(other)])),
        "additionalProperties": _all(
            [part.get("additionalProperties", True) for part in (one, other)]
        ),
    }


def _for_name(schema: Schema, name: str) -> list[Any]:
    """Return the schemas that apply to a named property."""
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    found = [named[name]] if name in named else []
    found += [
        value
        for pattern, value in patterns.items()
        if not schema_refusal({"const": name, "pattern": pattern})
    ]
    return found or [schema.get("additionalProperties", True)]


def _for_pattern(schema: Schema, pattern: str) -> Any:
    patterns = schema.get("patternProperties", {})
    return patterns.get(pattern, schema.get("additionalProperties", True))


def _all(schemas: list[Any]) -> Any:
    """Return a schema for values that satisfy all schemas."""
    if False in schemas:
        return False
    found = [one for one in schemas if one not in ({}, True)]
    if not found:
        return True
    return found[0] if len(found) == 1 else {"allOf": found}
