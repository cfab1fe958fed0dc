"""The types of pydantic and Zod as JSON schemas: all compile, and their outputs are valid.

`zod_schemas.json` has the schemas of Zod's types, with the versions that wrote them.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import openai
import pydantic
import pytest

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.errors import RequestRejected
from draftgate.backends.grammar import LlGrammars
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GrammarKind, GrammarSpec
from tests.engine.grammar_runs import sample, schema_spec
from tests.engine.pydantic_types import Nested, Tree, pydantic_types

EOS = 0
MOST = 150
SEEDS = 3
ZOD = json.loads((Path(__file__).parent / "zod_schemas.json").read_text())
PYDANTIC = pydantic_types()

REFUSED: Final = {
    # Both options allow objects with both properties.
    "xor objects (input, draft-2020-12)": "oneOf",
    # The converter writes an address that is IPv4 and IPv6 at once.
    "cidr (jsonSchema7)": "no text satisfies",
    # The converter excludes a schema of nearly all values.
    "undefined (openAi)": "not is not supported",
}
"""Schemas of Zod that are refused, with a part of the message."""

STRICTER: Final = re.compile(
    r"[sn]et$|timedelta|Decimal|decimal|Fraction|IPv.Network|Interface|IPvAny|Pattern|Json|Path"
    r"|dict.(int|float|bool|pattern)|conbytes|ImportString|PaymentCard|ByteSize|Past|Future|Naive"
    r"|Base64|Http|File|Ftp|Websocket|Dsn|validate_email"
)
"""Types of pydantic that accept fewer values than their schemas describe."""


def schemas() -> dict[str, dict[str, Any]]:
    """Return the schemas of all types by name."""
    found = {}
    for name, adapter in PYDANTIC.items():
        for mode in ("validation", "serialization"):
            try:
                found[f"{name}, {mode}"] = adapter.json_schema(mode=mode)
            except pydantic.PydanticInvalidForJsonSchema:
                continue
    return found


ZOD_SCHEMAS = {
    f"{corpus['generator'].split()[0]}: {name}": (name, schema)
    for corpus in ZOD
    for name, schema in corpus["schemas"].items()
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(SHIPPED_MODEL)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> LlGrammars:
    return LlGrammars(tokenizer, {EOS})


def outputs(grammars: LlGrammars, tokenizer: Tokenizer, schema: Any) -> list[str]:
    """Return the complete ones among random outputs."""
    found = []
    for seed in range(SEEDS):
        grammar = grammars.start(schema_spec(schema))
        tokens, ended = sample(grammar, tokenizer, {EOS}, random.Random(seed), MOST)
        if ended:
            assert grammar.is_complete
            found.append(tokenizer.decode(tokens))
    return found


def check(schema: dict[str, Any], text: str) -> None:
    """Check an output against the assertions of a schema, except `uniqueItems`.

    The validator knows the notation of JavaScript's regular expressions. It takes an infinite
    number for null, so numbers beyond floats are cut. Some converters write invalid schemas.
    """
    value = json.loads(text, parse_float=lambda digits: max(-1e308, min(float(digits), 1e308)))
    try:
        validator = jsonschema_rs.validator_for(schema, validate_formats=False)
    except jsonschema_rs.ValidationError:
        return
    annotations = {"uniqueItems", "contentEncoding"}
    errors = validator.iter_errors(value)
    wrong = [error.message for error in errors if error.schema_path[-1] not in annotations]
    assert not wrong, f"{text!r}: {wrong[0]}"


def test_outputs_of_every_pydantic_type_satisfy_its_schema(
    grammars: LlGrammars, tokenizer: Tokenizer
) -> None:
    """The schema of every type compiles in both modes, and random outputs satisfy the schema."""
    assert len(PYDANTIC) > 180
    for schema in schemas().values():
        for text in outputs(grammars, tokenizer, schema):
            check(schema, text)


def test_pydantic_accepts_the_outputs(grammars: LlGrammars, tokenizer: Tokenizer) -> None:
    """Pydantic reads random outputs of its types, unless a type demands more than its schema."""
    accepted = 0
    for name, adapter in PYDANTIC.items():
        if STRICTER.search(name):
            continue
        for text in outputs(grammars, tokenizer, adapter.json_schema()):
            adapter.validate_json(text)
            accepted += 1
    assert accepted > 150


@pytest.mark.parametrize(("name", "schema"), ZOD_SCHEMAS.values(), ids=ZOD_SCHEMAS)
def test_outputs_of_a_zod_type_satisfy_its_schema(
    grammars: LlGrammars, tokenizer: Tokenizer, name: str, schema: dict[str, Any]
) -> None:
    """The schema of a type compiles, and random outputs satisfy the schema."""
    if name in REFUSED:
        with pytest.raises(RequestRejected, match=REFUSED[name]) as refused:
            grammars.start(schema_spec(schema))
        assert "at #" in str(refused.value)
        return
    for text in outputs(grammars, tokenizer, schema):
        check(schema, text)


@pytest.mark.parametrize("model", [Nested, Tree])
def test_strict_schemas_of_openais_client_compile(
    grammars: LlGrammars, tokenizer: Tokenizer, model: type[pydantic.BaseModel]
) -> None:
    """A model as a strict tool or response format compiles, and the model reads the outputs."""
    tool = openai.pydantic_function_tool(model)["function"]["parameters"]
    form = openai.lib._pydantic.to_strict_json_schema(model)
    for schema in (tool, form):
        spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), strict=True)
        grammars.start(spec)
        for text in outputs(grammars, tokenizer, schema):
            model.model_validate_json(text)


STRICTNESS = [
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems", True),
    ({"type": "string", "not": {"const": "a"}}, "not", False),
    ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if", False),
    ({"type": "array", "contains": {"const": 1}}, "contains", False),
    ({"type": "string", "pattern": "^(?!a)b"}, "look-around", False),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf", False),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, "minProperties",
     False),
    ({"type": "object", "propertyNames": {"not": {"const": "a"}}}, "propertyNames", False),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "keyword", "by_default"), STRICTNESS)
def test_strict_decides_about_keywords_that_cannot_be_enforced(
    grammars: LlGrammars, schema: dict[str, Any], keyword: str, *, by_default: bool
) -> None:
    """`strict: true` refuses them with their place, and `strict: false` ignores them."""
    text = json.dumps({"type": "object", "properties": {"x": schema}})
    with pytest.raises(RequestRejected, match=keyword) as refused:
        grammars.start(GrammarSpec(GrammarKind.JSON_SCHEMA, text, strict=True))
    assert "#/properties/x" in str(refused.value)
    grammars.start(GrammarSpec(GrammarKind.JSON_SCHEMA, text, strict=False))
    if by_default:
        grammars.start(GrammarSpec(GrammarKind.JSON_SCHEMA, text))
    else:
        with pytest.raises(RequestRejected, match=keyword):
            grammars.start(GrammarSpec(GrammarKind.JSON_SCHEMA, text))


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"format": "date"}, ["2024-02-29", "2000-02-29"],
         ["2023-02-29", "1900-02-29", "0000-01-01"]),
        ({"format": "uuid4"}, ["a" * 8 + "-aaaa-4aaa-aaaa-" + "a" * 12], ["a" * 8]),
        ({"format": "base64"}, ["", "YQ==", "YWJj"], ["Y", "YQ="]),
        ({"format": "duration", "pattern": "^P(?!.*W)"}, ["P1D"], ["1D"]),
        ({"format": "time", "pattern": "^[0-9:]+$"}, ["12:30"], ["x"]),
        ({"format": "no-such-format"}, ["anything"], []),
        ({"pattern": "^(?=.*[0-9])[a-z0-9]{3}$"}, ["ab1"], ["abc", "ab-"]),
    ],
)  # fmt: skip
def test_formats_and_patterns_are_enforced_as_far_as_known(
    grammars: LlGrammars,
    tokenizer: Tokenizer,
    schema: dict[str, Any],
    valid: list[str],
    invalid: list[str],
) -> None:
    """A known format is enforced, an unknown one ignored, and an unusable pattern replaced."""
    for text in valid + invalid:
        grammar = grammars.start(schema_spec({"type": "string", **schema}))
        tokens = tokenizer.encode(json.dumps(text), add_special_tokens=False)
        assert (grammar.legal(tokens) == len(tokens)) == (text in valid), text


@pytest.mark.parametrize(
    ("names", "valid", "invalid"),
    [
        ({"enum": ["a", "b"]}, ["a", "b"], ["c", "ab"]),
        ({"const": "a"}, ["a"], ["b"]),
        ({"pattern": "^x"}, ["x", "xy"], ["a"]),
        ({"minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
        ({"format": "date"}, ["2024-02-29"], ["2023-02-29", "a"]),
        ({"type": "string", "description": "any"}, ["", "a"], []),
        (False, [], ["a"]),
    ],
)  # fmt: skip
def test_property_names_are_enforced(
    grammars: LlGrammars, tokenizer: Tokenizer, names: Any, valid: list[str], invalid: list[str]
) -> None:
    """`propertyNames` limits the keys of objects, with or without named properties."""
    integer = {"type": "integer"}
    for properties in ({}, {"properties": {"a": integer, "x": integer}}):
        schema = {
            "type": "object", "propertyNames": names, "additionalProperties": integer, **properties
        }  # fmt: skip
        for name in valid + invalid:
            grammar = grammars.start(schema_spec(schema))
            tokens = tokenizer.encode(json.dumps({name: 1}), add_special_tokens=False)
            assert (grammar.legal(tokens) == len(tokens)) == (name in valid), name
