"""Keywords that llguidance does not know: they work if others express them, or are named."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.errors import RequestRejected
from draftgate.backends.grammar import LlGrammars
from draftgate.backends.schema_rewriting import prepare_schema
from draftgate.backends.tokenizer import Tokenizer
from tests.engine.grammar_runs import schema_spec

THREE = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 9} for name in "abc"},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(SHIPPED_MODEL)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> LlGrammars:
    return LlGrammars(tokenizer, {tokenizer.special_id("eos_token")})


def allows(grammars: LlGrammars, tokenizer: Tokenizer, schema: object, value: object) -> bool:
    """Return whether the grammar of a schema allows a value as the whole output."""
    grammar = grammars.start(schema_spec(schema))
    tokens = tokenizer.encode(json.dumps(value), add_special_tokens=False)
    if grammar.legal(tokens) < len(tokens):
        return False
    for token in tokens:
        grammar.accept(token)
    return grammar.is_complete


@pytest.mark.parametrize(
    "schema",
    [
        {**THREE, "dependentRequired": {"a": ["b"]}},
        {**THREE, "dependentRequired": {"a": ["b"], "b": ["c"]}},
        {**THREE, "dependentRequired": {"a": ["b", "c"], "c": ["a"]},
         "additionalProperties": False},
        {**THREE, "dependentRequired": {"a": ["b"]}, "required": ["a"]},
        {**THREE, "anyOf": [{"required": ["a"]}, {"required": ["c"]}],
         "dependentRequired": {"a": ["b"]}},
        {**THREE, "allOf": [{"required": ["c"]}], "dependentRequired": {"a": ["b"]}},
        {**THREE, "dependentRequired": {"a": ["z"]}, "additionalProperties": False},
        {**THREE, "dependentRequired": {"a": []}},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
    ],
    ids=lambda schema: str(schema.get("dependentRequired")),
)  # fmt: skip
def test_dependent_properties_are_enforced(
    grammars: LlGrammars, tokenizer: Tokenizer, schema: dict[str, Any]
) -> None:
    """The grammar allows exactly the objects that satisfy `dependentRequired`."""
    check = jsonschema.Draft202012Validator(schema)
    for size in range(4):
        for names in itertools.combinations("abc", size):
            value = dict.fromkeys(names, 1)
            assert allows(grammars, tokenizer, schema, value) == check.is_valid(value), value


def test_nested_schemas_are_rewritten(grammars: LlGrammars, tokenizer: Tokenizer) -> None:
    """Schemas in lists, definitions and properties are rewritten, and data is not."""
    inner = {**THREE, "dependentRequired": {"a": ["b"]}}
    schema = {
        "type": "object",
        "properties": {
            "dependentRequired": {"type": "array", "items": {"$ref": "#/$defs/inner"}},
            "uniqueItems": {"const": {"uniqueItems": False}},
        },
        "$defs": {"inner": inner},
    }
    for items, allowed in (([{"a": 1, "b": 2}, {}], True), ([{"a": 1}], False)):
        value = {"dependentRequired": items}
        assert allows(grammars, tokenizer, schema, value) == allowed
    assert allows(grammars, tokenizer, schema, {"uniqueItems": {"uniqueItems": False}})


def test_unique_items_without_effect_are_accepted(
    grammars: LlGrammars, tokenizer: Tokenizer
) -> None:
    """`uniqueItems` is accepted if it is false or the array has at most one item."""
    numbers = {"type": "array", "items": {"type": "integer"}}
    assert allows(grammars, tokenizer, {**numbers, "uniqueItems": False}, [1, 1])
    assert allows(grammars, tokenizer, {**numbers, "uniqueItems": True, "maxItems": 1}, [1])


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("not", {"type": "string", "not": {"const": "a"}}),
        ("if", {**THREE, "if": {"required": ["a"]}, "then": {"required": ["b"]}}),
        ("dependentSchemas", {**THREE, "dependentSchemas": {"a": {}}}),
        ("dependentRequired", {**THREE, "dependentRequired": ["a"]}),
    ],
)
def test_refusal_names_the_keyword(
    grammars: LlGrammars, keyword: str, schema: dict[str, Any]
) -> None:
    """The error names a keyword that cannot be enforced, also in a nested schema."""
    for whole in (schema, {"type": "object", "properties": {"x": {"anyOf": [schema]}}}):
        with pytest.raises(RequestRejected, match=keyword):
            grammars.start(schema_spec(whole))


def test_schema_without_these_keywords_is_unchanged() -> None:
    """The rewriting leaves the text of other schemas as it is."""
    text = '{"type":  "object", "minProperties": 1e0}'
    assert prepare_schema(text) is text
