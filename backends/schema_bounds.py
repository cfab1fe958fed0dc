"""Bounds on JSON schemas and other grammars, checked before llguidance compiles them.

llguidance limits most of its work, but not all. Each bound is far above the values of schemas in
use. The slowest schema found within the bounds, with 5000 optional properties, takes 2 s (AMD EPYC
Zen 4, 2026-11-21). Beyond the bounds, some schemas take minutes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from math import lcm
from typing import Any, Final, TypeGuard

from draftgate.backends.schema_walk import escaped

MOST_SCHEMA_CHARACTERS: Final = 1 << 16
MOST_PATTERN_CHARACTERS: Final = 1 << 12
"""Maximum length of a regular expression, or of all expressions of a schema together."""

MOST_GRAMMAR_CHARACTERS: Final = 1 << 14
"""Maximum length of a context-free grammar. llguidance limits the automaton that results."""

MOST_NAME_PATTERNS: Final = 32
"""Maximum number of patterns in `patternProperties`, which are compared in pairs."""

MOST_MULTIPLES: Final = 10_000
"""Maximum number of states for remainders. It limits both the sum of all `multipleOf` and their
least common multiple."""

_DATA_KEYWORDS: Final = frozenset({"const", "enum", "default", "examples"})
"""Keywords of JSON schemas whose values are data and not schemas."""


def check_schema(text: str) -> None:
    """Check that a schema is within the bounds.

    Raises:
        ValueError: the schema exceeds a bound, or is not JSON.
    """
    _check("characters", len(text), MOST_SCHEMA_CHARACTERS)
    try:
        places = dict(_parts(json.loads(text)))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    parts = places.values()
    names = [name for part in parts for name in _names(part)]
    patterns = [p for part in parts if isinstance(p := part.get("pattern"), str)]
    _check("patternProperties", len(names), MOST_NAME_PATTERNS)
    _check("characters of patterns", sum(map(len, names + patterns)), MOST_PATTERN_CHARACTERS)
    multiples = {place: part.get("multipleOf") for place, part in places.items()}
    _check_multiples({place: one for place, one in multiples.items() if _is_number(one)})


def check_property_counts(schema: object) -> None:
    """Check that no object of a schema can reach its `minProperties` by repeating a key.

    Raises:
        ValueError: an object can.
    """
    for place, part in _parts(schema):
        _check_property_count(part, place)


def check_pattern(text: str) -> None:
    """Check that a regular expression is within the bounds.

    Raises:
        ValueError: the expression exceeds a bound.
    """
    _check("characters", len(text), MOST_PATTERN_CHARACTERS)


def check_grammar(text: str) -> None:
    """Check that a context-free grammar is within the bounds.

    Raises:
        ValueError: the grammar is too long, or contains a JSON schema.
    """
    _check("characters", len(text), MOST_GRAMMAR_CHARACTERS)
    if "%json" in text:
        raise ValueError("%json is not supported; use a JSON schema instead of a grammar")


def _check(what: str, number: int, most: int) -> None:
    if number > most:
        raise ValueError(f"it has {number} {what}, and at most {most} are allowed")


def _check_multiples(multiples: dict[str, float]) -> None:
    """Check that few states suffice for the remainders of all multiples, by their places."""
    exact = [abs(Decimal(str(multiple))) for multiple in multiples.values()]
    for place, number in zip(multiples, exact, strict=True):
        if not (number.is_finite() and 1e-9 <= number <= MOST_MULTIPLES):
            raise ValueError(f"multipleOf must be between 1e-9 and {MOST_MULTIPLES} (at {place})")
    scale = min((_exponent(number) for number in exact), default=0)
    alone = [int(number.scaleb(-_exponent(number))) for number in exact]
    together = lcm(*{int(number.scaleb(-scale)) for number in exact})
    _check("remainders of multipleOf", max(sum(alone), together), MOST_MULTIPLES)


def _exponent(number: Decimal) -> int:
    """Return the exponent of the last decimal digit, or 0 for a whole number."""
    return min(0, int(number.as_tuple().exponent))


def _check_property_count(part: dict[str, Any], place: str) -> None:
    """Check that an object cannot reach its `minProperties` by repeating a key.

    The parser counts repeated keys, but a reader of the object sees them as one property. Required
    keys never repeat, and a single additional key is always different.
    """
    least, required = part.get("minProperties"), part.get("required")
    sure = 1 + (len(required) if isinstance(required, list) else 0)
    if _is_number(least) and least > sure:
        raise ValueError(
            f"minProperties must be at most {sure}, one more than the number of required "
            f"properties, not {least} (at {place})"
        )


def _names(part: dict[str, Any]) -> list[str]:
    named = part.get("patternProperties")
    return list(named) if isinstance(named, dict) else []


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _parts(schema: object, place: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all objects in a schema that may be schemas themselves, with their JSON pointers."""
    if isinstance(schema, dict):
        yield place, schema
        for keyword, value in schema.items():
            if keyword not in _DATA_KEYWORDS:
                yield from _parts(value, f"{place}/{escaped(keyword)}")
    elif isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from _parts(item, f"{place}/{index}")
