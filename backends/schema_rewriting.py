"""JSON schemas in the keywords that llguidance enforces, without dead ends.

llguidance refuses keywords that it does not know, also if they have no effect or other keywords can
express them. It compiles some objects without any possible key, where the output cannot continue.
Parts that refer to themselves without end are removed, because no value satisfies them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from draftgate.backends.schema_bounds import check_property_counts, check_schema
from draftgate.backends.schema_formats import key_pattern, with_known_strings
from draftgate.backends.schema_objects import without_dead_keys
from draftgate.backends.schema_probe import schema_refusal
from draftgate.backends.schema_walk import (
    ANNOTATIONS,
    Schema,
    are_disjoint,
    parts,
    referenced,
    required_names,
    resolve,
    schema_values,
    transform,
    types_of,
)

_MOST_NUMBER: Final = 9_000_000_000_000_000_000
"""Bounds of numbers are moved to this, because llguidance compares them as 64-bit integers."""

_UNENFORCED: Final = frozenset(
    {
        "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentSchemas",
        "dependentRequired", "dependencies", "unevaluatedItems", "unevaluatedProperties",
        "propertyNames", "uniqueItems", "$dynamicRef", "$dynamicAnchor", "$recursiveRef",
        "$recursiveAnchor", "$vocabulary",
    }
)  # fmt: skip
"""Keywords without exact enforcement, which are dropped on request."""


def prepare_schema(text: str, *, strict: bool | None = None) -> str:
    """Return a schema for llguidance, which accepts only values of the given schema.

    Args:
        strict: what happens to keywords that cannot be enforced. True leaves them, so llguidance
            refuses them. False drops them. None drops only `uniqueItems`, which describes sets,
            and readers of sets drop duplicates themselves.

    Raises:
        ValueError: the schema exceeds a bound, is not JSON, or no value can satisfy it.
    """
    check_schema(text)
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError("it must be an object")  # noqa: TRY004 - an error of the client
    try:
        found = _Rewriting(schema, strict).schema
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_property_counts(found)
    return text if found == schema else json.dumps(found)


class _Rewriting:
    """The rewriting of one schema."""

    def __init__(self, root: Schema, strict: bool | None) -> None:
        """Rewrite a schema.

        Args:
            root: the whole schema, to which references refer.
            strict: as for `prepare_schema`.
        """
        self._root = root
        self._strict = strict
        found = transform(root, self._rewritten)
        if "$ref" in json.dumps(found):
            found = without_endless(found)
        self.schema = transform(found, without_dead_keys)

    def _rewritten(self, schema: Schema, _: str) -> Any:
        """Return a schema whose parts are rewritten, with its own keywords rewritten too."""
        if schema.get("not") in ({}, True):
            return False
        schema = _with_plain_dialect(with_known_strings(schema, strict=self._strict))
        schema = _with_small_numbers(schema)
        schema = _with_dependent_properties(schema)
        schema = self._with_names(schema)
        schema = self._with_evaluated(schema)
        schema = self._without_one_of(schema)
        if "uniqueItems" in schema and self._may_repeat(schema):
            schema = {key: value for key, value in schema.items() if key != "uniqueItems"}
        return self._lenient(schema) if self._strict is False else schema

    def _may_repeat(self, schema: Schema) -> bool:
        """Return whether `uniqueItems` has no effect, or need not be enforced."""
        has_effect = schema["uniqueItems"] is not False and schema.get("maxItems") not in {0, 1}
        return not has_effect or self._strict is not True

    def _lenient(self, schema: Schema) -> Schema:
        """Return a schema without the keywords that cannot be enforced."""
        found = {key: value for key, value in schema.items() if key not in _UNENFORCED}
        if "oneOf" in found and schema_refusal({"oneOf": found["oneOf"], **self._definitions}):
            found["allOf"] = [*found.get("allOf", ()), {"anyOf": found.pop("oneOf")}]
        counts = {"minProperties", "maxProperties"} & set(found)
        if counts and set(found.get("properties", ())) - set(found.get("required", ())):
            found = {key: value for key, value in found.items() if key not in counts}
        return found

    @property
    def _definitions(self) -> Schema:
        return {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}

    def _with_names(self, schema: Schema) -> Schema:
        """Express `propertyNames` by properties or patterns of properties."""
        if "propertyNames" not in schema:
            return schema
        names = resolve(self._root, schema["propertyNames"])
        if isinstance(names, dict):
            names = with_known_strings(names, strict=self._strict)
            types = names.get("type", "string")
            keeps = types == "string" or (isinstance(types, list) and "string" in types)
            ignored = ANNOTATIONS | ({"type"} if keeps else set())
            names = {key: value for key, value in names.items() if key not in ignored}
        rest = {key: value for key, value in schema.items() if key != "propertyNames"}
        if names in ({}, True):
            return rest
        if names is False:
            return _with_listed_names(rest, [])
        if not isinstance(names, dict) or "patternProperties" in rest:
            return schema
        if set(names) == {"const"} or set(names) == {"enum"}:
            listed = names.get("enum", [names.get("const")])
            return _with_listed_names(rest, [name for name in listed if isinstance(name, str)])
        pattern = key_pattern(names)
        if pattern is None or schema_refusal({"pattern": pattern}):
            return schema
        return _with_patterned_names(rest, pattern)

    def _with_evaluated(self, schema: Schema) -> Schema:
        """Express `unevaluatedProperties` by `additionalProperties`, beside plain objects."""
        if "unevaluatedProperties" not in schema:
            return schema
        names = list(schema.get("properties", ()))
        reference = {key: schema[key] for key in ("$ref",) if key in schema}
        for part in (*schema.get("allOf", ()), reference):
            inner = resolve(self._root, part)
            keys = {"type", "properties", "required", *ANNOTATIONS}
            if not isinstance(inner, dict) or not set(inner) <= keys:
                return schema
            names += inner.get("properties", ())
        keys = {"anyOf", "oneOf", "if", "dependentSchemas", "patternProperties", "propertyNames"}
        if keys & set(schema) or "additionalProperties" in schema:
            return schema
        own = schema.get("properties", {})
        found = {key: value for key, value in schema.items() if key != "unevaluatedProperties"}
        found["properties"] = {**own, **{name: True for name in names if name not in own}}
        return {**found, "additionalProperties": schema["unevaluatedProperties"]}

    def _without_one_of(self, schema: Schema) -> Schema:
        """Replace `oneOf` by `anyOf` if no value satisfies two of its options."""
        options = schema.get("oneOf")
        if not isinstance(options, list) or "anyOf" in schema:
            return schema
        disjoint = all(
            are_disjoint(self._root, one, other)
            for i, one in enumerate(options)
            for other in options[:i]
        )
        if not disjoint or "/oneOf/" in json.dumps(self._root):  # a reference by place
            return schema
        return {"anyOf" if key == "oneOf" else key: value for key, value in schema.items()}


def _with_plain_dialect(schema: Schema) -> Schema:
    """Drop a dialect that llguidance does not know."""
    dialect = schema.get("$schema", "")
    if isinstance(dialect, str) and (not dialect or "//json-schema.org/" in dialect):
        return schema
    return {key: value for key, value in schema.items() if key != "$schema"}


def _with_small_numbers(schema: Schema) -> Schema:
    """Move bounds of numbers that llguidance cannot compare, without allowing more numbers."""
    found = dict(schema)
    for keyword, sign in (("minimum", -1), ("maximum", 1)):
        for name in (keyword, f"exclusive{keyword.capitalize()}"):
            bound = found.get(name)
            if isinstance(bound, int | float) and bound * sign > _MOST_NUMBER:
                found[name] = sign * _MOST_NUMBER
    return found


def _with_dependent_properties(schema: Schema) -> Schema:
    """Express `dependentRequired` by alternatives."""
    dependent = schema.get("dependentRequired")
    if not isinstance(dependent, dict) or not all(isinstance(v, list) for v in dependent.values()):
        return schema
    found = {key: value for key, value in schema.items() if key != "dependentRequired"}
    needs = [_needs(name, required) for name, required in dependent.items() if required]
    return {**found, "allOf": [*found.get("allOf", ()), *needs]} if needs else found


def _needs(name: str, required: list[Any]) -> Schema:
    """Return a schema for objects that lack a property, or have it together with others."""
    return {"anyOf": [{"properties": {name: False}}, {"required": [name, *required]}]}


def _with_listed_names(schema: Schema, names: list[str]) -> Schema:
    """Return the schema of objects that can have only these properties."""
    more = schema.get("additionalProperties", True)
    own = {key: one if key in names else False for key, one in _properties(schema).items()}
    properties = {**own, **{name: more for name in names if name not in own}}
    return {**schema, "properties": properties, "additionalProperties": False}


def _with_patterned_names(schema: Schema, pattern: str) -> Schema:
    """Return the schema of objects whose properties have names of a pattern."""
    more = schema.get("additionalProperties", True)
    own = {
        name: False if schema_refusal({"const": name, "pattern": pattern}) else one
        for name, one in _properties(schema).items()
    }
    found = {**schema, "patternProperties": {pattern: more}, "additionalProperties": False}
    return {**found, "properties": own} if own else found


def _properties(schema: Schema) -> dict[str, Any]:
    properties = schema.get("properties", {})
    return properties if isinstance(properties, dict) else {}


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
    listed = schema_values(schema)
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
