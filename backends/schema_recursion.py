"""Parts of JSON schemas that refer to themselves without end, so that no value satisfies them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draftgate.backends.schema_walk import (
    Schema,
    parts,
    referenced,
    required_names,
    transform,
    types_of,
    values_of,
)


def without_endless(root: Schema) -> Schema:
    """Return a schema whose unsatisfiable parts are false.

    llguidance compiles a required property that contains its own object, and the output of such a
    grammar never ends.

    Raises:
        ValueError: no value satisfies the whole schema.
    """
    places = [(pointer, part) for pointer, part in parts(root)]
    ending = set[int]()
    grows = True
    while grows:  # the least fixed point: an ending part needs only parts that end
        found = {
            id(part) for _, part in places if id(part) not in ending and _ends(root, part, ending)
        }
        ending |= found
        grows = bool(found)
    endless = [pointer for pointer, part in places if id(part) not in ending]
    if not endless:
        return root
    if id(root) not in ending:
        where = max(endless, key=lambda pointer: pointer.count("/"))
        raise ValueError(f"no value satisfies it, because {where} contains itself or is impossible")
    keep = {pointer for pointer, part in places if id(part) in ending}
    return transform(root, lambda part, pointer: part if pointer in keep else False)


def _ends(root: Schema, schema: Schema, ending: set[int]) -> bool:
    """Return whether some value satisfies a schema, if only the parts in `ending` have values."""

    def has_value(part: Any) -> bool:
        return id(part) in ending if isinstance(part, dict) else part is not False

    if "$ref" in schema and not has_value(referenced(root, schema["$ref"])):
        return False
    for keyword, combine in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        options = schema.get(keyword)
        if isinstance(options, list) and not combine(map(has_value, options)):
            return False
    listed = values_of(schema)
    if listed is not None:
        return bool(listed)
    members = list(_members(root, schema))
    return any(all(map(has_value, _needed(members, schema, one))) for one in types_of(schema))


def _needed(members: list[Schema], schema: Schema, type_: str) -> Iterator[Any]:
    """Yield the schemas of the items or properties that every value of a type has."""
    if type_ == "array":
        first = schema.get("prefixItems")
        count = schema.get("minItems", 0)
        count = count if isinstance(count, int) else 0
        listed = first[:count] if isinstance(first, list) else []
        yield from listed
        if len(listed) < count:
            yield schema.get("items", True)
    if type_ == "object":
        for name in {name for member in members for name in required_names(member)}:
            for member in members:
                named = member.get("properties")
                if isinstance(named, dict) and name in named:
                    yield named[name]
                elif "patternProperties" not in member:
                    yield member.get("additionalProperties", True)


def _members(root: Schema, schema: Schema, depth: int = 8) -> Iterator[Schema]:
    """Yield a schema and the schemas that apply to the same value."""
    yield schema
    more = schema.get("allOf")
    others = [*more] if isinstance(more, list) else []
    others += [referenced(root, schema["$ref"])] if "$ref" in schema else []
    for other in others:
        if isinstance(other, dict) and depth:
            yield from _members(root, other, depth - 1)
