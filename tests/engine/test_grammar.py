"""Grammars: the tokens they allow, what they reject, and their limits."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.core.drafts import ROOT, Draft
from draftgate.backends.errors import RequestRejected
from draftgate.backends.grammar import MOST_COMPILED, LlGrammars
from draftgate.backends.schema_bounds import MOST_PATTERN_CHARACTERS
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GrammarSpec
from tests.engine.grammar_runs import (
    completed,
    next_mask,
    regex_spec,
    satisfies,
    schema_spec,
    tokens_in,
    walks,
)
from tests.engine.published_schemas import random_schemas

EOS = 0
SPECIAL = (0, 1, 2, 3)
NULL = {"type": "null"}

SPECS = [
    *map(schema_spec, random_schemas(12, seed=1)),
    schema_spec({"type": "object"}),
    regex_spec(r"[a-z]+( [a-z]+)*"),
    regex_spec(r"(yes|no), because (?s:.)*"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(SHIPPED_MODEL)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> LlGrammars:
    return LlGrammars(tokenizer, {EOS})


@pytest.mark.parametrize("spec", SPECS[::4], ids=lambda spec: spec.text[:40])
def test_mask_allows_exactly_the_legal_tokens(
    grammars: LlGrammars, tokenizer: Tokenizer, spec: GrammarSpec
) -> None:
    """At every place of a text, a mask allows the tokens that are legal one by one.

    If the following text is certain, only the tokenizer's own spelling is allowed.
    """
    for tokens in list(walks(grammars, spec, EOS, seed=2))[::7]:
        grammar = grammars.start(spec)
        for token in tokens:
            grammar.accept(token)
        legal = [token for token in range(tokenizer.vocab_size) if grammar.legal([token])]
        forced = grammar.forced(1)
        assert tokens_in(next_mask(grammar)) == list(forced or legal)
        assert set(forced) <= set(legal)
        assert (EOS in legal) == grammar.is_complete


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text[:40])
def test_grammar_state_depends_only_on_its_tokens(grammars: LlGrammars, spec: GrammarSpec) -> None:
    """Earlier requests for masks, drafts and forced tokens change no later answer."""
    rng = random.Random(3)
    asked = grammars.start(spec)
    for tokens in walks(grammars, spec, EOS, seed=3):
        if tokens:
            asked.accept(tokens[-1])
        fresh = grammars.start(spec)
        for token in tokens:
            fresh.accept(token)
        assert next_mask(fresh) == next_mask(asked)
        assert fresh.forced(8) == asked.forced(8)
        assert next_mask(fresh) == next_mask(asked)
        tree = Draft((*rng.sample(range(4, 4096), 3), EOS), (ROOT, ROOT, 1, ROOT))
        assert asked.legal(tree.token_ids) == fresh.legal(tree.token_ids)
        asked.masks(tree)
        assert asked.is_complete == fresh.is_complete


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text[:40])
def test_masks_of_a_tree_equal_those_of_its_paths(grammars: LlGrammars, spec: GrammarSpec) -> None:
    """The mask after a token of a tree is that of a sequence with the tokens of its path."""
    rng = random.Random(4)
    for tokens in list(walks(grammars, spec, EOS, seed=4))[::5]:
        paths: list[list[int]] = [[]]
        drafts, parents = [], []
        for _ in range(7):
            parent = rng.randrange(len(paths))
            before = grammars.start(spec)
            for token in tokens + paths[parent]:
                before.accept(token)
            new = set(tokens_in(next_mask(before))) - {EOS}
            new -= {path[-1] for path in paths if path and path[:-1] == paths[parent]}
            if new:
                drafts.append(rng.choice(sorted(new)))
                parents.append(parent - 1)
                paths.append([*paths[parent], drafts[-1]])
        grammar = grammars.start(spec)
        for token in tokens:
            grammar.accept(token)
        masks = grammar.masks(Draft(tuple(drafts), tuple(parents)))
        for path, mask in zip(paths, masks, strict=True):
            alone = grammars.start(spec)
            for token in tokens + path:
                alone.accept(token)
            assert next_mask(alone) == mask


def test_forced_tokens_spell_the_only_possible_text(
    grammars: LlGrammars, tokenizer: Tokenizer
) -> None:
    """They are legal, and cut at the requested number."""
    schema = {"const": {"a long name": "and a long value", "n": 12345}}
    grammar = grammars.start(schema_spec(schema))
    whole = grammar.forced(1000)
    assert tokenizer.decode(whole) == json.dumps(schema["const"])
    assert grammar.forced(5) == whole[:5]
    assert grammar.legal(whole) == len(whole)
    assert grammars.start(regex_spec("[ab]c")).forced(8) == ()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text[:40])
def test_special_tokens_never_match_text(grammars: LlGrammars, spec: GrammarSpec) -> None:
    """Only the end-of-sequence token is ever allowed, whatever text would match."""
    for tokens in walks(grammars, spec, EOS, seed=5):
        assert not set(SPECIAL) & set(tokens)
        grammar = grammars.start(spec)
        for token in tokens:
            grammar.accept(token)
        assert not any(grammar.legal([token]) for token in SPECIAL if token != EOS)


@pytest.mark.parametrize("text", ["<|user|>", "a<|endoftext|>", "<|end|><|end|>"])
def test_name_of_a_special_token_is_spelled_as_text(
    grammars: LlGrammars, tokenizer: Tokenizer, text: str
) -> None:
    """A forced text that reads like a special token is spelled in ordinary tokens."""
    grammar = grammars.start(schema_spec({"const": text}))
    tokens = grammar.forced(99)
    assert tokenizer.decode(tokens) == json.dumps(text)
    assert not set(SPECIAL) & set(tokens)
    assert tokens_in(next_mask(grammar)) == [tokens[0]]


def test_any_end_of_sequence_token_ends_the_text(tokenizer: Tokenizer) -> None:
    """A model may have several; ids outside the vocabulary are ignored."""
    grammar = LlGrammars(tokenizer, {0, 3, 9999}).start(regex_spec("a"))
    grammar.accept(tokenizer.encode("a", add_special_tokens=False)[0])
    assert tokens_in(next_mask(grammar)) == [0, 3]


def test_nothing_is_legal_after_an_end_token(grammars: LlGrammars, tokenizer: Tokenizer) -> None:
    """After a drafted end no token is legal, and masks allow only the end."""
    grammar = grammars.start(regex_spec("a+"))
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    assert grammar.legal([EOS]) == 0
    assert grammar.legal([a, EOS, a]) == 2
    assert grammar.legal([a, EOS, EOS]) == 2
    masks = grammar.masks(Draft((a, EOS, EOS, a)))
    assert EOS not in tokens_in(masks[0])
    assert all(EOS in tokens_in(mask) for mask in masks[1:])
    assert grammar.legal([a]) == 1


def test_text_outside_the_grammar_ends(grammars: LlGrammars, tokenizer: Tokenizer) -> None:
    """A text that has left the grammar ends, and is never complete."""
    grammar = grammars.start(regex_spec("[0-9]*"))
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    (digit,) = tokenizer.encode("1", add_special_tokens=False)
    assert grammar.is_complete
    for token in (letter, digit):
        grammar.accept(token)
        assert not grammar.is_complete
        assert tokens_in(next_mask(grammar)) == [EOS]
        assert grammar.legal([digit]) == grammar.legal([EOS]) == 0
        assert grammar.forced(8) == ()
    assert grammars.start(regex_spec("[0-9]*")).is_complete


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": NULL},
        {"type": "object", "propertyNames": {"maxLength": 3}},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"type": "object", "unevaluatedProperties": False},
        {"if": {"type": "string"}, "then": {"minLength": 2}},
        {"not": NULL},
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        {"type": "string", "format": "no-such-format"},
        {"type": "string", "pattern": "a(?=b)"},
        {"type": "string", "pattern": "("},
        {"type": "frog"},
        {"properties": 5},
        {"$ref": "#/$defs/missing"},
        {"$ref": "https://example.com/schema"},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "object", "minProperties": 2},
        {"anyOf": [NULL, {"type": "object", "required": ["a"], "minProperties": 3}]},
        {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}},
        {"oneOf": [{"type": "number"}, {}], "x-guidance": {"coerce_one_of": True}},
        {"type": "integer", "multipleOf": 10**9 + 7},
        {"type": "integer", "multipleOf": 0},
        {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]},
        {"properties": {f"p{i}": {"multipleOf": 99 + i, "type": "integer"} for i in range(200)}},
        {"type": "object", "patternProperties": {f"^k{i}_": NULL for i in range(4000)}},
        {"type": "string", "pattern": "a?" * 30_000},
        {"anyOf": [{"type": "string", "pattern": f"^{i}.*{i}$"} for i in range(2000)]},
        {"enum": [f"v{i}" for i in range(100_000)]},
        {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": NULL}} for j in range(3)]}
                   for i in range(16)]},
        {"allOf": [{"pattern": f".*{i}.*"} for i in range(12)], "type": "string"},
    ],
    ids=lambda schema: str(schema)[:60],
)  # fmt: skip
def test_unsupported_schema_is_rejected(grammars: LlGrammars, schema: object) -> None:
    """Unsupported, contradictory and too expensive keywords are named, and never ignored."""
    with pytest.raises(RequestRejected, match=r"JSON schema.*\S") as refused:
        grammars.start(schema_spec(schema))
    assert refused.value.param == "response_format"
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    "pattern",
    ["(", "a(?=b)", r"(a)\1", r"\bword\b", "a" * (MOST_PATTERN_CHARACTERS + 1)],
    ids=["open", "look-around", "backreference", "border", "long"],
)
def test_unusable_regular_expression_is_rejected(grammars: LlGrammars, pattern: str) -> None:
    """Malformed, unsupported and oversized expressions are rejected with a message."""
    with pytest.raises(RequestRejected, match="regular expression") as refused:
        grammars.start(regex_spec(pattern))
    assert refused.value.param == "response_format"


@pytest.mark.parametrize("text", ["", "{", "5", '"text"', '{"a": "\\ud800"}', '{"a":' * 500])
def test_schema_that_is_not_an_object_is_rejected(grammars: LlGrammars, text: str) -> None:
    """Broken JSON, JSON that is no schema, and deeply nested JSON are rejected."""
    spec = schema_spec({})
    with pytest.raises(RequestRejected, match="JSON schema"):
        grammars.start(GrammarSpec(spec.kind, text))


def test_min_properties_is_supported_up_to_one_optional_property(grammars: LlGrammars) -> None:
    """A property that is named `minProperties` has no effect."""
    schema = {
        "type": "object",
        "properties": {"minProperties": {"type": "boolean"}},
        "required": ["minProperties"],
        "additionalProperties": NULL,
        "minProperties": 2,
        "maxProperties": 2,
        "default": {"minProperties": 7},
    }
    grammar = grammars.start(schema_spec(schema))
    text = completed(grammar, {EOS}, random.Random(1))
    assert satisfies(schema, Tokenizer(SHIPPED_MODEL).decode(text))


def test_json_has_one_layout_unless_the_schema_allows_others(
    grammars: LlGrammars, tokenizer: Tokenizer
) -> None:
    """The layout of `json.dumps` is forced; `x-guidance` in the schema allows any white space."""
    schema = {"const": {"a": [1, 2]}}
    pretty = tokenizer.encode('{\n  "a": [1, 2]\n}', add_special_tokens=False)
    assert grammars.start(schema_spec(schema)).legal(pretty) == 1  # the bracket
    free = schema_spec(schema | {"x-guidance": {"whitespace_flexible": True}})
    assert grammars.start(free).legal(pretty) == len(pretty)


def test_added_tokens_are_known(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Tokens added after the learned ones keep their ids: an end, a marker and a text."""
    more = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    more.add_special_tokens(["<|new|>", "<|eot|>"])
    more.add_tokens(["<tool_call>", "  "])
    more.save(str(tmp_path / "tokenizer.json"))
    grammars = LlGrammars(Tokenizer(tmp_path), {4097})
    grammar = grammars.start(regex_spec(r"  <tool_call>(<\|new\|>){2}"))
    tokens = grammar.forced(99)
    assert tokens[0] == 4099
    assert grammar.legal(tokens) == len(tokens)
    assert Tokenizer(tmp_path).decode(tokens) == "  <tool_call><|new|><|new|>"
    for token in tokens:
        grammar.accept(token)
    assert grammar.is_complete
    assert tokens_in(next_mask(grammar)) == [4097]


def test_normalising_tokenizer_spells_forced_text_unchanged(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Normalisation applies to prompts; forced text keeps every character."""
    composing = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    composing.normalizer = tokenizers.normalizers.NFKC()
    composing.save(str(tmp_path / "tokenizer.json"))
    for text in ("xe\u0301y e\u0301", "\ufb01t"):
        grammar = LlGrammars(Tokenizer(tmp_path), {EOS}).start(regex_spec(text))
        tokens = grammar.forced(99)
        assert tokenizer.decode(tokens) == text
        assert grammar.legal(tokens) == len(tokens)


def test_grammar_needs_an_end_of_sequence_token(tokenizer: Tokenizer) -> None:
    """A grammar has to end, so a model without such a token rejects it."""
    for eos_ids in (set(), {9999}):
        with pytest.raises(RequestRejected, match="no end-of-sequence token"):
            LlGrammars(tokenizer, eos_ids).start(regex_spec("a"))


def test_engine_runs_without_llguidance() -> None:
    """It is imported for the first grammar, which is rejected with a message without it."""
    code = (
        "import sys; sys.modules['llguidance'] = None\n"
        "import backends.engine.load\n"
        "from draftgate.backends.grammar import LlGrammars\n"
        "from draftgate.backends.errors import RequestRejected\n"
        "from draftgate.backends.checkpoints import SHIPPED_MODEL\n"
        "from draftgate.backends.tokenizer import Tokenizer\n"
        "from draftgate.backends.types import GrammarKind, GrammarSpec\n"
        "try:\n"
        "    LlGrammars(Tokenizer(SHIPPED_MODEL), {0}).start(GrammarSpec(GrammarKind.REGEX, 'a'))\n"
        "except RequestRejected as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "llguidance" in done.stdout


def test_tokenizer_without_bytes_is_rejected(tmp_path: Path) -> None:
    """The request is rejected with a message, without a crash."""
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(RequestRejected, match="tokenizer does not support"):
        LlGrammars(Tokenizer(tmp_path), {0}).start(regex_spec("a"))


def test_padding_and_truncation_of_a_tokenizer_are_ignored(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """A tokenizer.json saved with them spells forced text as any other."""
    padded = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    padded.enable_truncation(2)
    padded.enable_padding(length=40)
    padded.save(str(tmp_path / "tokenizer.json"))
    spec = schema_spec({"const": "a long text that is certain"})
    forced = LlGrammars(Tokenizer(tmp_path), {EOS}).start(spec).forced(99)
    assert forced == LlGrammars(tokenizer, {EOS}).start(spec).forced(99)
    assert len(forced) > 4


def test_compiled_grammars_are_cached_up_to_a_bound(tokenizer: Tokenizer) -> None:
    """The least recently used one is dropped, and compiled again on demand."""
    grammars = LlGrammars(tokenizer, {EOS})
    first, second = regex_spec("first"), regex_spec("second")
    grammars.start(first)
    grammars.start(second)
    for i in range(MOST_COMPILED - 1):
        grammars.start(regex_spec(f"number {i}"))
        grammars.start(first)
    assert len(grammars._compiled) == MOST_COMPILED
    assert first in grammars._compiled
    assert second not in grammars._compiled
    assert grammars.start(second).forced(99) == tuple(tokenizer.encode("second"))
    assert len(grammars._compiled) == MOST_COMPILED


def test_text_beyond_the_parser_limits_ends(grammars: LlGrammars, tokenizer: Tokenizer) -> None:
    """Only the end is allowed then, and the text is not complete."""
    spec = schema_spec({"type": "array", "items": NULL, "minItems": 100_000})
    for _ in range(2):  # what one text ran into does not harm the next
        grammar = grammars.start(spec)
        (bracket,) = tokenizer.encode("[", add_special_tokens=False)
        assert tokens_in(next_mask(grammar)) == [bracket]
        grammar.accept(bracket)
        masks = grammar.masks(Draft((bracket, bracket)))
        assert [tokens_in(mask) for mask in masks] == [[EOS]] * 3
        assert not grammar.is_complete
        assert grammar.forced(8) == ()
        assert grammar.legal([bracket]) == 0
