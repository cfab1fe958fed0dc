"""Random JSON schemas for measurements and tests.

Objects have required properties, so `{}` is not valid. Strings, lists and numbers are bounded. Some
schemas are recursive and therefore allow unbounded texts.
"""

from __future__ import annotations

import random
from typing import Any, Final

Schema = dict[str, Any]

_DEPTH: Final = 3
"""The maximum nesting of containers. Deeper values are scalars."""

_NAMES: Final = (
    "name", "kind", "value", "user_id", "is_active", "created at", "path", "größe", "next",
    "line_number", "default", "a/b", "tags", 'quote"d', "x", "error_message",
)  # fmt: skip

_WORDS: Final = ("red", "reddish", "green", "", "a b", "über", 'say "hi"', "None", "null", "1.5")

_PATTERNS: Final = (
    "^[a-z]{2,6}$", "^[A-Z][a-z]{1,5}( [A-Z][a-z]{1,5})?$", "^(GET|PUT|POST) /[a-z]{1,8}$",
    "^[0-9]{3}-[0-9]{2}$", "^v[0-9]\\.[0-9]{1,2}$", "^\\w{3}$", "^[^a]{1,4}$",
)  # fmt: skip

_FORMATS: Final = ("date", "time", "uuid", "ipv4")


def random_schemas(count: int, *, seed: int = 0) -> list[Schema]:
    """Return object schemas with required properties, determined by the seed.

    A shorter list is a prefix of a longer list with the same seed.
    """
    rng = random.Random(seed)
    return [_root(rng) for _ in range(count)]


def _root(rng: random.Random) -> Schema:
    """Return an object schema, which may share a part between properties or be recursive."""
    if rng.random() < 0.7:
        return _object(rng, _DEPTH, least=1)
    shared = _object(rng, 1, least=1) if rng.random() < 0.5 else _scalar(rng)
    item: Schema = {"$ref": "#/$defs/shared"}
    properties = {"first": item, "more": _array_of(rng, item), "other": _value(rng, 1)}
    definitions = {"shared": shared}
    if rng.random() < 0.3:
        below: Schema = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
        definitions["node"] = _closed({"item": item, "below": below}, ["item", "below"])
        properties["root"] = {"$ref": "#/$defs/node"}
    return _closed(properties, list(properties)) | {"$defs": definitions}


def _value(rng: random.Random, depth: int) -> Schema:
    kind = rng.random()
    if depth and kind < 0.2:
        return _object(rng, depth - 1)
    if depth and kind < 0.35:
        return _array_of(rng, _value(rng, depth - 1))
    if depth and kind < 0.5:
        return {"anyOf": [_value(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
    return _scalar(rng)


def _object(rng: random.Random, depth: int, *, least: int = 0) -> Schema:
    """Return an object schema with at least this many properties, most of which are required."""
    names = rng.sample(_NAMES, rng.randint(max(least, 1), 4))
    required = [name for name in names if rng.random() < 0.8] or names[:least]
    return _closed({name: _value(rng, depth) for name in names}, required)


def _closed(properties: Schema, required: list[str]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _array_of(rng: random.Random, items: Schema) -> Schema:
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": items,
        "minItems": least,
        "maxItems": least + rng.randint(0, 2) or 1,
    }


def _scalar(rng: random.Random) -> Schema:
    return rng.choice((_integer, _number, _string, _enum, _const, _plain))(rng)


def _integer(rng: random.Random) -> Schema:
    least = rng.choice((-1000, -7, 0, 1, 95))
    most = least + rng.choice((0, 1, 9, 250, 10_000))
    if rng.random() < 0.3:
        return {"type": "integer", "exclusiveMinimum": least - 1, "exclusiveMaximum": most + 1}
    return {"type": "integer", "minimum": least, "maximum": most}


def _number(rng: random.Random) -> Schema:
    # Numbers could have any number of digits otherwise.
    return {"type": "number", "multipleOf": 0.25, "minimum": rng.randint(-3, 3), "maximum": 64}


def _string(rng: random.Random) -> Schema:
    kind = rng.random()
    if kind < 0.3:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    if kind < 0.4:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    least = rng.randint(0, 5)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 20)}


def _enum(rng: random.Random) -> Schema:
    values: list[Any] = rng.sample(_WORDS, rng.randint(1, 4))
    if rng.random() < 0.3:
        values += [rng.randint(-5, 500), None, [1, "two"]]
    return {"enum": values}


def _const(rng: random.Random) -> Schema:
    return {"const": rng.choice((True, None, 42, "a fixed sentence, word by word", {"k": [1, 2]}))}


def _plain(rng: random.Random) -> Schema:
    return {"type": rng.choice(("boolean", "null", ["boolean", "null"]))}
