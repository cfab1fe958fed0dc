"""Grammars of tool calls: masks allow only calls whose arguments satisfy their schemas."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

import jsonschema
import msgspec
import pytest

from draftgate.backends.call_form import CallForm, ContentForm, FunctionForm
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.errors import RequestRejected
from draftgate.backends.grammar import LlGrammars
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GrammarKind, GrammarSpec
from tests.engine.grammar_runs import complete, next_mask, tokens_in

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "y": {"enum": ["a"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
MARKER = "<|user|>"  # a special token of the shipped tokenizer that no text contains


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(SHIPPED_MODEL)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> LlGrammars:
    return LlGrammars(tokenizer, {tokenizer.special_id("eos_token")})


def spec(schema: dict[str, object] = POINT, **form: object) -> GrammarSpec:
    functions = (
        FunctionForm('{"name": "point", "arguments": ', schema, "}"),
        FunctionForm('{"name": "stop", "arguments": ', {"type": "object", "maxProperties": 0}, "}"),
    )
    text = msgspec.json.encode(CallForm(functions, **form)).decode()
    return GrammarSpec(GrammarKind.CALLS, text, "tools")


def test_random_allowed_text_is_a_valid_call(grammars: LlGrammars, tokenizer: Tokenizer) -> None:
    """A random walk through the masks gives calls whose arguments satisfy their schemas."""
    rng = random.Random(5)
    held = spec(opened="[", between=", ", closed="]")
    names = set()
    for _ in range(20):
        grammar = grammars.start(held)
        calls = json.loads(tokenizer.decode(complete(grammar, grammars._eos_ids, rng)))
        for call in calls:
            names.add(call["name"])
            if call["name"] == "point":
                jsonschema.validate(call["arguments"], POINT)
            else:
                assert call["arguments"] == {}
    assert names == {"point", "stop"}


def has_x(text: str) -> bool:
    return "x" in json.loads(text)


@pytest.mark.parametrize(
    ("content", "matches"),
    [
        (ContentForm(GrammarKind.JSON_SCHEMA, json.dumps(POINT)), has_x),
        (ContentForm(GrammarKind.REGEX, r"a/b\/c|[xy]"), re.compile("a/b/c|[xy]").fullmatch),
        (ContentForm(GrammarKind.CHOICE, '["yes", "n/o"]'), ["yes", "n/o"].__contains__),
    ],
    ids=["schema", "regex", "choice"],
)
def test_form_with_content_allows_a_call_or_the_content(
    grammars: LlGrammars, tokenizer: Tokenizer, content: ContentForm, matches: Callable
) -> None:
    """A random walk through the masks gives either a call or content of its form."""
    rng = random.Random(3)
    held = spec(opened="<call>", closed="</call>", content=content)
    kinds = set()
    for _ in range(40):
        grammar = grammars.start(held)
        text = tokenizer.decode(complete(grammar, grammars._eos_ids, rng))
        is_call = text.startswith("<call>")
        kinds.add(is_call)
        if is_call:
            assert json.loads(text.removeprefix("<call>").removesuffix("</call>"))["name"]
        else:
            assert matches(text)
    assert kinds == {True, False}


def test_form_without_a_separator_allows_one_call(
    grammars: LlGrammars, tokenizer: Tokenizer
) -> None:
    """The grammar allows only the end after the first call."""
    grammar = grammars.start(spec())
    for token in tokenizer.encode('{"name": "point", "arguments": {"x": 7, "y": "a"}}'):
        assert grammar.legal([token]) == 1
        grammar.accept(token)
    assert grammar.is_complete
    assert tokens_in(next_mask(grammar)) == grammars._eos_ids


def test_marker_is_a_token_if_the_vocabulary_has_it(
    grammars: LlGrammars, tokenizer: Tokenizer
) -> None:
    """The grammar spells the characters of a marker that is not in the vocabulary."""
    form = {"opened": f"{MARKER}\n", "closed": MARKER, "markers": (MARKER, "<none>")}
    grammar = grammars.start(spec(**form))
    assert tokens_in(next_mask(grammar)) == [tokenizer.vocabulary[MARKER]]
    grammar.accept(tokenizer.vocabulary[MARKER])
    for token in tokenizer.encode('\n{"name": "stop", "arguments": {}}', add_special_tokens=False):
        assert grammar.legal([token]) == 1
        grammar.accept(token)
    assert grammar.forced(9) == (tokenizer.vocabulary[MARKER],)
    spelled = grammars.start(spec(opened="<none>", markers=("<none>",)))
    assert tokenizer.decode(spelled.forced(99)).startswith("<none")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "array", "contains": True}}},
        {"type": "object", "minProperties": 7},
        {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
        {"type": "object", "x-guidance": {"lenient": True}, "uniqueItems": True, "not": {}},
    ],
)
def test_unsupported_tool_schema_is_rejected(
    grammars: LlGrammars, schema: dict[str, object]
) -> None:
    """The error names the tools."""
    with pytest.raises(RequestRejected) as refused:
        grammars.start(spec(schema))
    assert refused.value.param == "tools"
