"""Errors of grammars: one sentence in the client's notation, with the place."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from draftgate.backends.call_form import CallForm, FunctionForm
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.errors import RequestRejected
from draftgate.backends.grammar import LlGrammars
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GrammarKind, GrammarSpec

INTERNAL = re.compile(
    r"NoExtension|non-verbose|SearchRegex|\(And|Some\(|f64|coerce|lenient|Unimplemented|Unsatisfi"
    r"|%json|x-guidance\W+\{|args_|call_\d|start:|llguidance|derivre|\n|\\n|in regex"
    r"|special [0-9a-f]"
)
"""Words of llguidance, of its Rust types and of the grammars that the server writes."""


@pytest.fixture(scope="module")
def grammars() -> LlGrammars:
    return LlGrammars(Tokenizer(SHIPPED_MODEL), {0})


def calls(schema: object) -> str:
    """Return the text of a form whose function `f` has this schema."""
    arguments = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    function = FunctionForm('{"name": "f", "arguments": ', arguments, "}")
    form = CallForm((function,), "<tool_call>", None, "</tool_call>")
    return msgspec.json.encode(form).decode()


def refusal_of(grammars: LlGrammars, spec: GrammarSpec) -> str:
    """Return the error of a grammar, or an empty text if it compiles."""
    try:
        grammars.start(spec)
    except RequestRejected as error:
        return str(error)
    return ""


ERRORS = [
    (GrammarKind.REGEX, "(", "unclosed group (at character 1"),
    (GrammarKind.REGEX, "ab(?=c)", "look-ahead and look-behind, is not supported (at character 3"),
    (GrammarKind.REGEX, r"(a)\1", "backreferences are not supported"),
    (GrammarKind.REGEX, r"\bword", r"word boundaries such as \b are not supported"),
    (GrammarKind.REGEX, "a^b", "^ and $ are supported only at its ends"),
    (GrammarKind.REGEX, r"[^\s\S]", "no text matches it"),
    (GrammarKind.REGEX, r"x/[^\s\S]", "no text matches it"),
    (GrammarKind.REGEX, "\ud800", "half of a surrogate pair"),
    (GrammarKind.CHOICE, '["a", "\\ud800"]', "the text 1 contains half of a surrogate pair"),
    (GrammarKind.CHOICE, "false", "it must be a list of texts"),
    (GrammarKind.CHOICE, '{"a": "b"}', "it must be a list of texts"),
    (GrammarKind.CHOICE, '["a", 1]', "the entry 1 is not a text"),
    (GrammarKind.CHOICE, '["a"', "it is not valid JSON"),
    (GrammarKind.GRAMMAR, "start: nothing", "the rule 'nothing' is not defined (line 1, column 8)"),
    (GrammarKind.GRAMMAR, 'start: "a"\nstart: "b"', "'start' is defined twice (line 2"),
    (GrammarKind.GRAMMAR, "start: a\na: /(/", "of the regular expression) (line 2"),
    (GrammarKind.GRAMMAR, 'start: "a', "is not closed"),
    (GrammarKind.GRAMMAR, 'start: ("a"', "')' is missing (line 1"),
    (GrammarKind.GRAMMAR, "start: start", "no text matches it"),
    (GrammarKind.GRAMMAR, "start: A\nA: /a/ & /b/", "no text matches it"),
    (GrammarKind.GRAMMAR, "start: A\nA: A", "the token 'A' refers to itself"),
    (GrammarKind.GRAMMAR, "start: <foo>", "the vocabulary has no special token '<foo>'"),
    (GrammarKind.GRAMMAR, "start: <[99999]>", "the vocabulary has no token 99999"),
    (GrammarKind.GRAMMAR, "root ::= nothing", "the rule 'nothing' is not defined"),
    (GrammarKind.GRAMMAR, "root ::= root", "no text matches it"),
    (GrammarKind.GRAMMAR, "root ::= [z-a]", "invalid character class range"),
    (GrammarKind.GRAMMAR, 'root ::= "a"\nroot', "::= is missing (line 2)"),
    (GrammarKind.GRAMMAR, "root ::= (", "')' is missing (line 1)"),
    (GrammarKind.GRAMMAR, "", "the rule 'root' is not defined"),
    (GrammarKind.JSON_SCHEMA, {"type": "frog"}, "'frog' is not a type (at #)"),
    (GrammarKind.JSON_SCHEMA, {"items": {"properties": {"a/b": {"contains": {}}}}},
     "contains is not supported (at #/items/properties/a~1b)"),
    (GrammarKind.JSON_SCHEMA, {"$defs": {"n": {"pattern": "("}}, "properties":
     {"a": {"$ref": "#/$defs/n"}}}, "of the regular expression) (at #/$defs/n)"),
    (GrammarKind.JSON_SCHEMA, {"anyOf": [{}, {"minimum": "x"}]}, 'not "x" (at #/anyOf/1)'),
    (GrammarKind.JSON_SCHEMA, {"properties": {"a/b": {"type": "number", "multipleOf": 0}}},
     "multipleOf must be between 1e-9 and 10000 (at #/properties/a~1b)"),
    (GrammarKind.JSON_SCHEMA, {"items": {"type": "object", "minProperties": 3}},
     "number of required properties, not 3 (at #/items)"),
    (GrammarKind.JSON_SCHEMA, {"$ref": "#/$defs/x"}, "the reference '#/$defs/x' does not exist"),
    (GrammarKind.JSON_SCHEMA, {"$ref": "https://example.com/s"}, "is elsewhere, and"),
    (GrammarKind.JSON_SCHEMA, {"type": "string", "pattern": "^a$", "minLength": 2},
     "no text satisfies its pattern, format and length together"),
    (GrammarKind.JSON_SCHEMA, {"minLength": -1}, "must be a whole number of at least 0, not -1"),
    (GrammarKind.JSON_SCHEMA, {"required": "a"}, "required must be of the type array"),
    (GrammarKind.JSON_SCHEMA, {"x-guidance": {"foo": 1}}, "x-guidance has no option 'foo'"),
    (GrammarKind.JSON_SCHEMA, {"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf is"),
    (GrammarKind.CALLS, {"contains": {}}, "contains is not supported (at #/properties/a)"),
    (GrammarKind.CALLS, {"type": "string", "pattern": "("}, "unclosed group"),
    (GrammarKind.CALLS, {"type": "integer", "minimum": 2, "maximum": 1}, "#/properties/a"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "reason"), ERRORS, ids=lambda part: str(part)[:40])
def test_error_is_one_plain_sentence_with_the_place(
    grammars: LlGrammars, kind: GrammarKind, text: object, reason: str
) -> None:
    """The error says what is wrong and where, and shows nothing of the grammar engine."""
    written = text if isinstance(text, str) else json.dumps(text)
    if kind is GrammarKind.CALLS:
        written = calls(text)
    with pytest.raises(RequestRejected, match="cannot be used: ") as refused:
        grammars.start(GrammarSpec(kind, written, "p"))
    message = str(refused.value)
    assert reason in message
    assert not INTERNAL.search(message), message


@pytest.mark.parametrize("kind", [GrammarKind.REGEX, GrammarKind.GRAMMAR, GrammarKind.JSON_SCHEMA])
def test_error_of_any_text_shows_no_internals(grammars: LlGrammars, kind: GrammarKind) -> None:
    """Damaged texts of every notation are refused without words of the grammar engine."""
    whole = {
        GrammarKind.REGEX: r"(a|[b-d]{2,3})\d+(?P<x>y)$",
        GrammarKind.GRAMMAR: 'start: a | B\na: "x" (B){1,2} /[0-9]+/\nB: /b/ | "c"\n',
        GrammarKind.JSON_SCHEMA: '{"type": "object", "properties": {"a": {"type": "string", '
        '"pattern": "^(a|b)$"}}, "required": ["a"], "minProperties": 1}',
    }[kind]
    for i in range(len(whole)):
        for damaged in (whole[:i] + whole[i + 1 :], whole[:i], whole[:i] + "(?=" + whole[i:]):
            message = refusal_of(grammars, GrammarSpec(kind, damaged, "p"))
            assert not INTERNAL.search(message), (damaged, message)
