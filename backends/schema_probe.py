"""Questions about small JSON schemas, which llguidance answers by compiling them."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

LAYOUT: Final[JsonCompileOptions] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    # Without \u, because "\u0061" would be another spelling of a key that is excluded as "a".
    "json_allowed_escapes": 'nrbtf\\"',
}

STRICT: Final[JsonCompileOptions] = {"lenient": False, "coerce_one_of": False}
"""Options that reject a schema without exact enforcement, even if its `x-guidance` permits it."""


def schema_refusal(schema: Any) -> str:
    """Return llguidance's reason against a schema, or an empty text if it supports the schema."""
    return _refusal(json.dumps(schema))


@lru_cache(maxsize=512)
def _refusal(text: str) -> str:
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(text, LAYOUT, STRICT)
    except ValueError as error:
        return str(error)
    return LLMatcher.validate_grammar(grammar)


def has_key(schema: dict[str, Any]) -> bool:
    """Return whether objects of a schema with `minProperties` 1 can have a key.

    llguidance compiles an object without any possible key, and its parser then finds no token.
    """
    from llguidance import LLMatcher, LLTokenizer

    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), LAYOUT, STRICT)
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    if matcher.is_error():
        return False
    matcher.consume_token(ord("{"))
    matcher.compute_bitmask()
    return not matcher.is_error() and not matcher.is_stopped()
