"""Grammars: their allowed tokens, their rejections, and their limits."""

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
    allowed_prefixes,
    complete,
    next_mask,
    regex_spec,
    satisfies,
    schema_spec,
    tokens_in,
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
    """A mask allows exactly the legal tokens at every place of a text.

    Only the tokenizer's own spelling is allowed where the following text is certain.
    """
    for tokens in list(allowed_prefixes(grammars, spec, EOS, seed=2))[::7]:
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
    """Requests for masks, drafts and forced tokens do not change the state of a grammar."""
    rng = random.Random(3)
    grammar = grammars.start(spec)
    for tokens in allowed_prefixes(grammars, spec, EOS, seed=3):
        if tokens:
            grammar.accept(tokens[-1])
        fresh = grammars.start(spec)
        for token in tokens:
            fresh.accept(token)
        assert next_mask(fresh) == next_mask(grammar)
        assert fresh.forced(8) == grammar.forced(8)
        assert next_mask(fresh) == next_mask(grammar)
        tree = Draft((*rng.sample(range(4, 4096), 3), EOS), (ROOT, ROOT, 1, ROOT))
        assert grammar.legal(tree.token_ids) == fresh.legal(tree.token_ids)
        grammar.masks(tree)
        assert grammar.is_complete == fresh.is_complete


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text[:40])
def test_masks_of_a_tree_equal_those_of_its_paths(grammars: LlGrammars, spec: GrammarSpec) -> None:
    """The mask after a token of a tree equals the mask after the same path in a sequence."""
    rng = random.Random(4)
    for tokens in list(allowed_prefixes(grammars, spec, EOS, seed=4))[::5]:
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
    """Forced tokens are legal and end at the requested number."""
    schema = {"const": {"a long name": "and a long value", "n": 12345}}
    grammar = grammars.start(schema_spec(schema))
    forced = grammar.forced(1000)
    assert tokenizer.decode(forced) == json.dumps(schema["const"])
    assert grammar.forced(5) == forced[:5]
    assert grammar.legal(forced) == len(forced)
    assert grammars.start(regex_spec("[ab]c")).forced(8) == ()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text[:40])
def test_special_tokens_never_match_text(grammars: LlGrammars, spec: GrammarSpec) -> None:
    """A grammar allows no special token except the end-of-sequence token."""
    for tokens in allowed_prefixes(grammars, spec, EOS, seed=5):
        assert not set(SPECIAL) & set(tokens)
        grammar = grammars.start(spec)
        for token in tokens:
            grammar.accept(token)
        assert not any(grammar.legal([token]) for token in SPECIAL if token != EOS)


@pytest.mark.parametrize("text", ["<|user|>", "a<|endoftext|>", "<|end|><|end|>"])
def test_name_of_a_special_token_is_spelled_as_text(
    grammars: LlGrammars, tokenizer: Tokenizer, text: str
) -> None:
    """The grammar spells the name of a special token in ordinary tokens."""
    grammar = grammars.start(schema_spec({"const": text}))
    tokens = grammar.forced(99)
    assert tokenizer.decode(tokens) == json.dumps(text)
    assert not set(SPECIAL) & set(tokens)
    assert tokens_in(next_mask(grammar)) == [tokens[0]]


def test_any_end_of_sequence_token_ends_the_text(tokenizer: Tokenizer) -> None:
    """A grammar accepts several end tokens and ignores ids outside the vocabulary."""
    grammar = LlGrammars(tokenizer, {0, 3, 9999}).start(regex_spec("a"))
    grammar.accept(tokenizer.encode("a", add_special_tokens=False)[0])
    assert tokens_in(next_mask(grammar)) == [0, 3]


def test_nothing_is_legal_after_an_end_token(grammars: LlGrammars, tokenizer: Tokenizer) -> None:
    """After a drafted end token, masks allow only the end token."""
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
    """If a text leaves the grammar, the text must end and is never complete."""
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
        {"type": "array", "contains": NULL},
        {"type": "object", "dependentSchemas": {"a": NULL}},
        {"if": {"type": "string"}, "then": {"minLength": 2}},
        {"not": NULL},
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
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
    """The error names the unsupported, contradictory or too expensive keyword."""
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
    """A malformed, unsupported or oversized expression is rejected with a message."""
    with pytest.raises(RequestRejected, match="regular expression") as refused:
        grammars.start(regex_spec(pattern))
    assert refused.value.param == "response_format"


@pytest.mark.parametrize("text", ["", "{", "5", '"text"', '{"a": "\\ud800"}', '{"a":' * 500])
def test_schema_that_is_not_an_object_is_rejected(grammars: LlGrammars, text: str) -> None:
    """Invalid JSON, JSON without a schema and deeply nested JSON are rejected."""
    spec = schema_spec({})
    with pytest.raises(RequestRejected, match="JSON schema"):
        grammars.start(GrammarSpec(spec.kind, text))


def test_min_properties_is_supported_up_to_one_optional_property(grammars: LlGrammars) -> None:
    """A property named `minProperties` has no effect."""
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
    text = complete(grammar, {EOS}, random.Random(1))
    assert satisfies(schema, Tokenizer(SHIPPED_MODEL).decode(text))


def test_json_has_one_layout_unless_the_schema_allows_others(
    grammars: LlGrammars, tokenizer: Tokenizer
) -> None:
    """The grammar forces the layout of `json.dumps`, unless `x-guidance` allows any white space."""
    schema = {"const": {"a": [1, 2]}}
    pretty = tokenizer.encode('{\n  "a": [1, 2]\n}', add_special_tokens=False)
    assert grammars.start(schema_spec(schema)).legal(pretty) == 1  # only the bracket is legal
    free = schema_spec(schema | {"x-guidance": {"whitespace_flexible": True}})
    assert grammars.start(free).legal(pretty) == len(pretty)


def test_added_tokens_are_known(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """End tokens, markers and texts that were added to the vocabulary keep their ids."""
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
    """A tokenizer normalises prompts, but the grammar forces texts without normalisation."""
    composing = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    composing.normalizer = tokenizers.normalizers.NFKC()
    composing.save(str(tmp_path / "tokenizer.json"))
    for text in ("xe\u0301y e\u0301", "\ufb01t"):
        grammar = LlGrammars(Tokenizer(tmp_path), {EOS}).start(regex_spec(text))
        tokens = grammar.forced(99)
        assert tokenizer.decode(tokens) == text
        assert grammar.legal(tokens) == len(tokens)


def test_grammar_needs_an_end_of_sequence_token(tokenizer: Tokenizer) -> None:
    """A model without an end-of-sequence token rejects a grammar."""
    for eos_ids in (set(), {9999}):
        with pytest.raises(RequestRejected, match="no end-of-sequence token"):
            LlGrammars(tokenizer, eos_ids).start(regex_spec("a"))


def test_engine_runs_without_llguidance() -> None:
    """The engine imports llguidance for the first grammar and rejects that grammar without it."""
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
    """The engine rejects a grammar with a message if the tokenizer has no byte tokens."""
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(RequestRejected, match="tokenizer does not support"):
        LlGrammars(Tokenizer(tmp_path), {0}).start(regex_spec("a"))


def test_padding_and_truncation_of_a_tokenizer_are_ignored(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """A tokenizer with saved padding and truncation spells forced text unchanged."""
    padded = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    padded.enable_truncation(2)
    padded.enable_padding(length=40)
    padded.save(str(tmp_path / "tokenizer.json"))
    spec = schema_spec({"const": "a long text that is certain"})
    forced = LlGrammars(Tokenizer(tmp_path), {EOS}).start(spec).forced(99)
    assert forced == LlGrammars(tokenizer, {EOS}).start(spec).forced(99)
    assert len(forced) > 4


def test_compiled_grammars_are_cached_up_to_a_bound(tokenizer: Tokenizer) -> None:
    """The cache drops the least recently used grammar and compiles it again on demand."""
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
    """If a text exceeds the parser limits, the text must end and is never complete."""
    spec = schema_spec({"type": "array", "items": NULL, "minItems": 100_000})
    for _ in range(2):  # the limits of one text do not affect the next text
        grammar = grammars.start(spec)
        (bracket,) = tokenizer.encode("[", add_special_tokens=False)
        assert tokens_in(next_mask(grammar)) == [bracket]
        grammar.accept(bracket)
        masks = grammar.masks(Draft((bracket, bracket)))
        assert [tokens_in(mask) for mask in masks] == [[EOS]] * 3
        assert not grammar.is_complete
        assert grammar.forced(8) == ()
        assert grammar.legal([bracket]) == 0
