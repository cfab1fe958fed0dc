"""Schemas whose keywords contradict each other: the output ends completely, or they are refused."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.errors import RequestRejected
from draftgate.backends.grammar import LlGrammars
from draftgate.backends.tokenizer import Tokenizer
from tests.engine.grammar_runs import sample, schema_spec
from tests.examples import examples

EOS = 0
MOST = 120
TOKENIZER = Tokenizer(SHIPPED_MODEL)
GRAMMARS = LlGrammars(TOKENIZER, {EOS})
INT = {"type": "integer", "minimum": 0, "maximum": 9}


def check_outputs(schema: dict[str, Any], seeds: int) -> int:
    """Check that random outputs are valid or reach the limit, and return how many are valid."""
    validator = jsonschema_rs.validator_for(schema)
    valid = 0
    for seed in range(seeds):
        grammar = GRAMMARS.start(schema_spec(schema))
        tokens, ended = sample(grammar, TOKENIZER, {EOS}, random.Random(seed), MOST)
        text = TOKENIZER.decode(tokens)
        if ended:
            assert grammar.is_complete, f"{text!r} stops early for {schema}"
            assert validator.is_valid(json.loads(text)), f"{text!r} is invalid for {schema}"
            valid += 1
    return valid


SCORE = {
    "type": "object",
    "properties": {"score": INT},
    "additionalProperties": False,
    "patternProperties": {"^score$": INT},
}
NODE = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}


@pytest.mark.parametrize(
    "schema",
    [
        SCORE,
        {**SCORE, "required": ["score"]},
        {**SCORE, "patternProperties": {"^score$": {"maximum": 3}}, "required": ["score"]},
        {**SCORE, "patternProperties": {"^(score|other)$": {"maximum": 3}}},
        {**SCORE, "properties": {}, "required": ["score"]},
        {**SCORE, "patternProperties": {"^score$": False, "^(a|b)$": INT}},
        {"type": "object", "patternProperties": {"": False}},
        {"type": "object", "patternProperties": {"": False}, "properties": {"a": True}},
        {"type": "object", "patternProperties": {".*": INT }, "additionalProperties": {}},
        {"type": "object", "patternProperties": {"[^\\s\\S]": INT}, "additionalProperties": False},
        {"allOf": [SCORE, {"type": "object", "properties": {"score": {"minimum": 5}}}]},
        {"allOf": [{"type": "object", "patternProperties": {"^a$": INT}},
                   {"type": "object", "properties": {"a": INT}, "additionalProperties": False}]},
        {"type": "object", "properties": {"a": {"allOf": [{"type": "string"}, INT]}, "b": INT}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}, "b": INT},
         "additionalProperties": False, "$defs": {"n": NODE}},
        {"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": NODE}},
        {"anyOf": [{"$ref": "#/$defs/n"}, INT], "$defs": {"n": NODE}},
        {"anyOf": [{"$ref": "#/$defs/n"}, INT], "$defs": {"n": {"allOf": [
            {"type": "object", "required": ["n"]}, {"properties": {"n": {"$ref": "#/$defs/n"}}}]}}},
        {"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 4,
                                    "multipleOf": 5}},
        {"type": "array", "prefixItems": [INT, False], "items": INT},
    ],
    ids=lambda schema: json.dumps(schema)[:70],
)  # fmt: skip
def test_output_of_a_contradictory_schema_is_complete(schema: dict[str, Any]) -> None:
    """Every output is valid or reaches its limit, although parts of the schema are impossible."""
    assert check_outputs(schema, seeds=12)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "#/$defs/n", "$defs": {"n": NODE}}, "#/$defs/n"),
        ({"type": "object", "properties": {"a": {"enum": [1], "type": "string"}},
          "required": ["a"]}, "#/properties/a"),
        ({**SCORE, "patternProperties": {"^score$": {"type": "null"}}, "required": ["score"]},
         "#/properties/score"),
        ({"type": "array", "items": {"minimum": 4, "maximum": 3, "type": "integer"},
          "minItems": 1}, "#/items"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "(at #)"),
        ({"not": {}}, "#"),
    ],
    ids=lambda part: json.dumps(part)[:60],
)  # fmt: skip
def test_impossible_schema_is_refused_with_its_place(schema: dict[str, Any], place: str) -> None:
    """A schema without any value is refused, and the error names the part at fault."""
    with pytest.raises(RequestRejected, match=r"no (value|text) satisfies") as refused:
        GRAMMARS.start(schema_spec(schema))
    assert place in str(refused.value)


def test_excluded_key_has_no_second_spelling() -> None:
    """An additional property cannot be a named one that is written with an escape."""
    schema = {"type": "object", "properties": {"a": INT}, "additionalProperties": {"type": "null"}}
    grammar = GRAMMARS.start(schema_spec(schema))
    tokens = TOKENIZER.encode('{"\\u0061": null}', add_special_tokens=False)
    assert grammar.legal(tokens) < len(tokens)


NAMES = st.sampled_from(["a", "b", "ab", "score"])
PATTERNS = st.sampled_from(["^a$", "^b", "^score$", "^(a|b)$", "", "^[ab]{1,2}$", "^x", "^z{2}$"])
SCALARS = st.one_of(
    st.just(INT),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just(True),
    st.just(False),
    st.sampled_from([{"enum": [1, "a", None]}, {"const": 3}, {"const": "a"}, {"enum": []}]),
    st.builds(lambda low, span, step: {"type": "integer", "minimum": low, "maximum": low + span,
                                       "multipleOf": step},
              st.integers(-3, 9), st.integers(-1, 4), st.sampled_from([1, 2, 5, 7])),
    st.builds(lambda value, kind: {"enum": value, "type": kind},
              st.lists(st.sampled_from([1, 2.5, "a", True, None]), max_size=3),
              st.sampled_from(["string", "integer", "number", "boolean", ["null", "string"]])),
    st.builds(lambda low, high: {"type": "string", "pattern": "^[a-c]*$", "minLength": low,
                                 "maxLength": high}, st.integers(0, 3), st.integers(0, 3)),
)  # fmt: skip
REFERENCES = st.sampled_from([{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/m"}])


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with any combination of the keywords for properties."""
    optional = {
        "properties": st.dictionaries(NAMES, values, max_size=3),
        "patternProperties": st.dictionaries(PATTERNS, values, max_size=2),
        "additionalProperties": values,
        "required": st.lists(NAMES, max_size=2, unique=True),
        "minProperties": st.integers(0, 2),
        "maxProperties": st.integers(0, 2),
    }
    return st.fixed_dictionaries({"type": st.just("object")}, optional=optional)


def arrays(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Arrays with any combination of the keywords for items."""
    optional = {
        "items": values,
        "prefixItems": st.lists(values, min_size=1, max_size=2),
        "minItems": st.integers(0, 2),
        "maxItems": st.integers(0, 3),
    }
    return st.fixed_dictionaries({"type": st.just("array")}, optional=optional)


def combined(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return schemas with parts of a strategy."""
    some = st.lists(values, min_size=1, max_size=3)
    return st.one_of(
        objects(values),
        arrays(values),
        some.map(lambda parts: {"anyOf": parts}),
        some.map(lambda parts: {"allOf": parts}),
        st.builds(lambda one, parts: {**one, "allOf": parts}, objects(values), some),
    )


VALUES = st.recursive(st.one_of(SCALARS, REFERENCES), combined, max_leaves=6)
SCHEMAS = st.builds(
    lambda one, n, m: {**one, "$defs": {"n": n, "m": m}},
    st.one_of(objects(VALUES), arrays(VALUES)), VALUES, VALUES,
)  # fmt: skip


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(SCHEMAS)
def test_output_of_a_random_schema_never_stops_early(schema: dict[str, Any]) -> None:
    """A random schema is refused with a reason, or every output is valid or reaches its limit."""
    try:
        GRAMMARS.start(schema_spec(schema))
    except RequestRejected:
        return
    check_outputs(schema, seeds=4)
