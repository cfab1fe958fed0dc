"""The parts of JSON schemas: transformation, references, and options that exclude each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import unquote

Schema = dict[str, Any]

_SCHEMA: Final = frozenset(
    {
        "items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not",
        "unevaluatedProperties", "unevaluatedItems", "if", "then", "else",
    }
)  # fmt: skip
_SCHEMAS: Final = frozenset({"anyOf", "allOf", "oneOf", "prefixItems", "items"})
_NAMED: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
"""Keywords whose value is a schema, a list of schemas, or an object of schemas."""

ANNOTATIONS: Final = frozenset(
    {
        "title", "description", "default", "examples", "example", "deprecated", "readOnly",
        "writeOnly", "$comment", "$schema", "$id", "id", "$anchor", "contentEncoding",
        "contentMediaType", "contentSchema",
    }
)  # fmt: skip

_SCALARS: Final = ("null", "boolean", "number", "integer", "string")
TYPES: Final = (*_SCALARS, "array", "object")
_MOST_REFERENCES: Final = 32


def transform(schema: Schema, change: Callable[[Schema, str], Any]) -> Schema:
    """Return a schema whose parts a function has replaced, the inner parts first.

    Args:
        change: returns the replacement of a part with a JSON pointer.

    Raises:
        ValueError: the whole schema was replaced by false.
    """
    found = _transformed(schema, "#", change)
    if not isinstance(found, dict):
        raise ValueError("no value satisfies it: the schema is false (at #)")  # noqa: TRY004
    return found


def _transformed(schema: Any, pointer: str, change: Callable[[Schema, str], Any]) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for keyword, value in schema.items():
        place = f"{pointer}/{escaped(keyword)}"
        if keyword in _SCHEMA and isinstance(value, dict):
            found[keyword] = _transformed(value, place, change)
        elif keyword in _SCHEMAS and isinstance(value, list):
            found[keyword] = [
                _transformed(one, f"{place}/{i}", change) for i, one in enumerate(value)
            ]
        elif keyword in _NAMED and isinstance(value, dict):
            found[keyword] = {
                name: _transformed(one, f"{place}/{escaped(name)}", change)
                for name, one in value.items()
            }
    return change(found, pointer)


def parts(schema: Any, pointer: str = "#") -> Iterator[tuple[str, Schema]]:
    """Yield the schema and all its parts with their JSON pointers, the inner parts first."""
    if not isinstance(schema, dict):
        return
    for place, inner in children(schema, pointer):
        yield from parts(inner, place)
    yield pointer, schema


def children(schema: Schema, pointer: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly in a schema with their JSON pointers."""
    for keyword, value in schema.items():
        place = f"{pointer}/{escaped(keyword)}"
        if keyword in _SCHEMA and isinstance(value, dict):
            yield place, value
        elif keyword in _SCHEMAS and isinstance(value, list):
            yield from ((f"{place}/{i}", one) for i, one in enumerate(value))
        elif keyword in _NAMED and isinstance(value, dict):
            yield from ((f"{place}/{escaped(name)}", one) for name, one in value.items())


def escaped(name: str) -> str:
    """Return a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def referenced(root: Any, reference: Any) -> Any:
    """Return the part of a schema to which a reference points, or None."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for name in unquote(reference[1:]).split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def resolve(root: Any, schema: Any) -> Any:
    """Return a schema, or the schema to which it only refers."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, dict) or set(schema) - ANNOTATIONS != {"$ref"}:
            break
        target = referenced(root, schema["$ref"])
        if target is None:
            break
        schema = target
    return schema


def types_of(schema: Schema) -> list[str]:
    """Return the types that a schema names, or all types."""
    types = schema.get("type", list(TYPES))
    return [one for one in ([types] if isinstance(types, str) else types) if isinstance(one, str)]


def type_of(value: Any) -> str:
    """Return the type of a JSON value."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def schema_values(schema: Schema) -> list[Any] | None:
    """Return the values that a schema lists, or None if it lists none."""
    listed = schema.get("enum")
    values = [schema["const"]] if "const" in schema else listed
    if not isinstance(values, list):
        return None
    types = set(types_of(schema))
    if "number" in types:
        types.add("integer")
    return [one for one in values if type_of(one) in types]


def are_disjoint(root: Any, one: Any, other: Any, depth: int = 8) -> bool:
    """Return whether surely no value satisfies both of two schemas."""
    one, other = resolve(root, one), resolve(root, other)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or not depth:
        return False
    for left, right in ((one, other), (other, one)):
        for keyword in ("anyOf", "oneOf"):
            options = left.get(keyword)
            if isinstance(options, list) and all(
                are_disjoint(root, option, right, depth - 1) for option in options
            ):
                return True
    values = schema_values(one), schema_values(other)
    if values[0] is not None and values[1] is not None:
        texts = [{json.dumps(_exact(value)) for value in listed} for listed in values if listed]
        return len(texts) < 2 or not texts[0] & texts[1]
    types = [_types(listed, part) for listed, part in zip(values, (one, other), strict=True)]
    common = types[0] & types[1]
    if common - {"object"}:
        return False
    if not common:
        return True
    return _differ_in_a_property(root, one, other, depth)


def _exact(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value == int(value) else value


def _types(values: list[Any] | None, schema: Schema) -> set[str]:
    types = set(types_of(schema)) if values is None else set(map(type_of, values))
    return types | {"integer"} if "number" in types else types


def _differ_in_a_property(root: Any, one: Schema, other: Schema, depth: int) -> bool:
    """Return whether a required property has values that exclude each other."""
    first, second = one.get("properties"), other.get("properties")
    if not isinstance(first, dict) or not isinstance(second, dict):
        return False
    required = {*required_names(one), *required_names(other)}
    return any(
        are_disjoint(root, first[name], second[name], depth - 1)
        for name in first
        if name in required and name in second
    )


def required_names(schema: Schema) -> list[str]:
    """Return the names of the required properties."""
    required = schema.get("required")
    listed = required if isinstance(required, list) else []
    return [name for name in listed if isinstance(name, str)]
