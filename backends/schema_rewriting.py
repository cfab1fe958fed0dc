"""Keywords of JSON schemas that llguidance does not know, written with keywords that it knows."""

from __future__ import annotations

import json
from typing import Any, Final

_SCHEMA: Final = frozenset({"items", "additionalProperties", "contains", "propertyNames"})
_SCHEMAS: Final = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose value is a schema, a list of schemas, or an object of schemas."""


def rewrite_schema(text: str) -> str:
    """Return an equivalent schema without the keywords that can be expressed by others.

    The function expresses `dependentRequired` by alternatives. It drops a `uniqueItems` that every
    array satisfies: false, or with at most one item.

    Raises:
        ValueError: the text is not JSON.
    """
    if '"dependentRequired"' not in text and '"uniqueItems"' not in text:
        return text  # the usual case
    return json.dumps(_rewritten(json.loads(text)))


def _rewritten(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = {keyword: _value(keyword, value) for keyword, value in schema.items()}
    most = found.get("maxItems")
    if found.get("uniqueItems") is False or most in (0, 1):
        found.pop("uniqueItems", None)
    dependent = found.get("dependentRequired")
    if isinstance(dependent, dict) and all(isinstance(v, list) for v in dependent.values()):
        del found["dependentRequired"]
        needs = [_needs(name, required) for name, required in dependent.items() if required]
        if needs:
            found["allOf"] = [*found.get("allOf", ()), *needs]
    return found


def _value(keyword: str, value: Any) -> Any:
    """Return the value of a keyword with its schemas rewritten."""
    if keyword in _SCHEMA and not isinstance(value, list):
        return _rewritten(value)
    if keyword in _SCHEMAS and isinstance(value, list):
        return [_rewritten(one) for one in value]
    if keyword in _NAMED and isinstance(value, dict):
        return {name: _rewritten(one) for name, one in value.items()}
    return value


def _needs(name: str, required: list[Any]) -> dict[str, Any]:
    """Return a schema for objects that lack a property, or have it together with others."""
    return {"anyOf": [{"properties": {name: False}}, {"required": [name, *required]}]}
