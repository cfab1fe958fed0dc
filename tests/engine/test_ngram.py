"""The n-gram proposer: its matches, trees, updates and memory, in C and in Python."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.operators import compiler
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.engine.proposers.ngram_lookup import MAX_EVIDENCE, MAX_MATCHES, MAX_WALK
from draftgate.backends.engine.proposers.ngram_native import (
    UNLOCKED_TEXTS,
    UNLOCKED_TOKENS,
    NativeText,
    native_lookup,
)
from draftgate.backends.engine.proposers.ngram_python import PythonLookup, PythonText
from draftgate.backends.engine.testing import check_draft
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, ResumedChoice, SamplingParams
from draftgate.policies.types import SpeculationMode, SpeculationPlan

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=60)
PLAN = SpeculationPlan("test", SpeculationMode.NGRAM, "ngram", 16, "a test")

needs_gcc = pytest.mark.skipif(compiler.compiler_version() is None, reason="needs gcc")

in_c_and_python = pytest.mark.parametrize(
    "native", [pytest.param(True, marks=needs_gcc, id="c"), pytest.param(False, id="python")]
)


def sequence_of(token_ids: list[int], key: int = 0, tenant: str = "") -> Sequence:
    request = GenerationRequest(
        str(key), compact(token_ids), SamplingParams(9, 0), PLAN, tenant=tenant
    )
    return Sequence.for_choice(key, request, ResumedChoice(0, ()))


def proposed(proposer: NgramProposer, sequence: Sequence, most: int) -> Draft:
    (draft,) = proposer.propose([DraftRequest(sequence, most)])
    return draft


def longest_matches(text: list[int]) -> list[tuple[int, int]]:
    """Return (length, end) of the matches of a text by brute force.

    These are the latest matches of four tokens, then the latest shorter ones of a pair, or those of
    the last token without a pair.
    """
    ends = [end for end in range(len(text) - 1, 0, -1) if text[end - 1] == text[-1]]
    matches = []
    for end in ends:
        length = 0
        while length < min(end, MAX_EVIDENCE) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        matches.append((length, end))
    pairs = [match for match in matches if match[0] >= 2]
    found = [match for match in pairs if match[0] >= 4][:MAX_MATCHES]
    walked = [match for match in pairs[:MAX_WALK] if match[0] < 4] if pairs else matches
    found += walked[: MAX_MATCHES - len(found)]
    return sorted(found, key=lambda place: -place[0])


def continuation(text: list[int], end: int, length: int) -> tuple[int, ...]:
    repeated = text[end:]
    while len(repeated) < length:
        repeated = repeated + text[end:]
    return tuple(repeated[:length])


@given(tokens)
def test_index_finds_every_match(text: list[int]) -> None:
    """The index lists matches by length, then by position, up to the bound."""
    indexed = PythonText(compact(text))
    matches = indexed.matches(indexed.tokens)
    assert [(match.length, match.end) for match in matches] == longest_matches(text)


@in_c_and_python
@given(text=tokens, most=st.integers(1, 12))
def test_chain_continues_the_longest_match(native: bool, text: list[int], most: int) -> None:
    """A chain continues the latest longest match and repeats that match beyond the end."""
    draft = proposed(NgramProposer(trees=False, native=native), sequence_of(text), most)
    found = longest_matches(text)
    assert draft.is_chain
    if found:
        assert draft.token_ids == continuation(text, found[0][1], most)
        assert draft.evidence == found[0][0]
    else:
        assert not draft


@in_c_and_python
@given(text=tokens, trees=st.booleans())
def test_agreement_is_the_weighted_share_of_equal_continuations(native, text, trees) -> None:
    """A match has twice the weight for each further token, and a single match has no agreement."""
    draft = proposed(NgramProposer(trees=trees, native=native), sequence_of(text), 1)
    found = longest_matches(text)
    if len(found) < 2:
        assert draft.agreement == 0
        return
    longest, first = found[0][0], text[found[0][1]]
    weights = [(2.0 ** (length - longest), text[end] == first) for length, end in found]
    share = sum(weight for weight, equal in weights if equal) / sum(w for w, _ in weights)
    assert draft.agreement == round(1000 * share)


@in_c_and_python
@given(text=tokens, most=st.integers(1, 12))
def test_tree_consists_of_continuations(native: bool, text: list[int], most: int) -> None:
    """Each path of a tree is a prefix of a continuation, and its weight follows the lengths of the
    matches."""
    draft = proposed(NgramProposer(native=native), sequence_of(text), most)
    check_draft(draft, most, 4)
    found = longest_matches(text)
    ways = [(continuation(text, end, most), 2.0 ** (length - found[0][0])) for length, end in found]
    assert len(draft) == (most if found else 0)
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for place, token in enumerate(draft.token_ids):
        before = paths[draft.parent(place)]
        paths[place] = (*before, token)
        through = [w for way, w in ways if way[: len(before)] == before]
        onward = [w for way, w in ways if way[: len(before) + 1] == paths[place]]
        assert onward
        share = draft.shares[place] if draft.shares else 1.0
        assert share == pytest.approx(sum(onward) / sum(through))


@in_c_and_python
def test_different_continuations_become_branches_best_first(native: bool) -> None:
    """If two continuations differ, the more frequent continuation becomes the first branch."""
    text = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2]
    draft = proposed(NgramProposer(native=native), sequence_of(text), 4)
    assert draft.token_ids[:2] == (3, 4)
    assert draft.parents[:2] == (-1, -1)
    assert draft.shares[:2] == pytest.approx((2 / 3, 1 / 3))


@in_c_and_python
@given(first=tokens, more=st.lists(tokens, max_size=5))
def test_index_follows_tokens_added_between_calls(native: bool, first, more) -> None:
    """Drafts after added tokens equal the drafts of a new proposer."""
    proposer, sequence = NgramProposer(native=native), sequence_of(first)
    proposed(proposer, sequence, 4)
    for some in more:
        sequence.token_ids.extend(some)
        fresh = proposed(NgramProposer(native=native), sequence_of(sequence.token_ids), 4)
        assert proposed(proposer, sequence, 4) == fresh


@in_c_and_python
@given(text=tokens, removed=st.integers(0, 60))
def test_index_of_a_shortened_text_starts_again(native: bool, text, removed) -> None:
    """If a text becomes shorter, its draft equals the draft of a new text."""
    proposer, sequence = NgramProposer(native=native), sequence_of(text)
    proposed(proposer, sequence, 4)
    del sequence.token_ids[max(0, len(text) - removed) :]
    fresh = proposed(NgramProposer(native=native), sequence_of(sequence.token_ids), 4)
    assert proposed(proposer, sequence, 4) == fresh


@given(st.integers(0, 2000))
def test_python_text_takes_at_most_the_stated_memory(length: int) -> None:
    """A text of different tokens and its index in Python take at most `text_bytes`."""
    lookup, index = PythonLookup(trees=True), PythonText(compact(range(length)))
    index.matches(index.tokens)
    parts = (*index._latest, *index._earlier, index.tokens, index)
    size_bytes = sum(sys.getsizeof(part) for part in parts)
    size_bytes += sum(
        sys.getsizeof(part) for each in index._latest for pair in each.items() for part in pair
    )
    assert size_bytes <= lookup.text_bytes(length)


@needs_gcc
@given(st.lists(st.integers(0, 2000), max_size=20))
def test_native_text_takes_at_most_the_stated_memory(growth: list[int]) -> None:
    """A text and its index in C take at most `text_bytes` after any growth."""
    lookup, index = native_lookup(trees=True), NativeText(compact(()))
    assert lookup is not None
    for some in growth:
        index.tokens.extend(range(some))
        lookup.drafts([(index,)], [4])
        size_bytes = sys.getsizeof(index.memory) + sys.getsizeof(index.tokens)
        assert size_bytes + sys.getsizeof(index) <= lookup.text_bytes(len(index.tokens))


@in_c_and_python
def test_forgetting_drops_the_index(native: bool) -> None:
    """A proposer without a corpus drops the index and the text of a finished sequence."""
    proposer, sequence = NgramProposer(native=native), sequence_of([1, 2, 1, 2, 1])
    proposed(proposer, sequence, 2)
    proposer.forget(sequence)
    proposer.forget(sequence)
    assert not proposer._live
    assert not proposed(proposer, sequence_of([7, 1, 2], key=1), 2)


@in_c_and_python
def test_nothing_is_proposed_for_empty_texts_and_drafts(native: bool) -> None:
    """The proposer accepts empty batches, empty texts, and drafts of length 0."""
    proposer = NgramProposer(native=native)
    assert proposer.propose([]) == []
    assert not proposed(proposer, sequence_of([]), 4)
    for most in (0, -1, -(1 << 63)):
        assert not proposed(proposer, sequence_of([1, 1, 1], key=1), most)


@in_c_and_python
def test_huge_draft_limit_takes_no_memory_without_a_match(native: bool) -> None:
    """The limit of a draft reserves no memory before a match exists."""
    assert not proposed(NgramProposer(native=native), sequence_of([1, 2, 3]), (1 << 63) - 1)


# --- C and Python ---------------------------------------------------------------------------------


@dataclass
class Step:
    """A step of a batch: `key` gets `added` tokens, then some sequences get drafts."""

    key: int
    added: list[int]
    max_tokens: dict[int, int]
    forgotten: int | None


any_token = st.one_of(st.integers(0, 2), st.integers(-(1 << 63), (1 << 63) - 1))
any_step = st.builds(
    Step,
    st.integers(0, 3),
    st.lists(any_token, max_size=80),
    st.dictionaries(st.integers(0, 3), st.integers(-1, 40)),
    st.one_of(st.none(), st.integers(0, 3)),
)


@needs_gcc
@given(st.lists(any_step, max_size=20), st.booleans(), st.booleans())
def test_drafts_in_c_equal_the_drafts_in_python(steps, trees, has_corpora) -> None:
    """Both lookups return equal drafts for any texts, growth, batches and finished requests."""
    proposers = [
        NgramProposer(corpus_bytes=has_corpora << 26, trees=trees, native=native)
        for native in (True, False)
    ]
    sequences = {key: sequence_of([], key, tenant=str(key // 3)) for key in range(4)}
    for step in steps:
        sequences[step.key].token_ids.extend(step.added)
        requests = [DraftRequest(sequences[key], most) for key, most in step.max_tokens.items()]
        in_c, in_python = (proposer.propose(requests) for proposer in proposers)
        assert in_c == in_python
        if step.forgotten is not None:
            for proposer in proposers:
                proposer.forget(sequences[step.forgotten])
            tenant = str(step.forgotten // 3)
            sequences[step.forgotten] = sequence_of([], step.forgotten, tenant)


@needs_gcc
def test_long_texts_get_equal_drafts_in_c_and_python() -> None:
    """Drafts stay equal while a text of 20,000 tokens and its index grow."""
    proposers = [NgramProposer(native=native) for native in (True, False)]
    sequence = sequence_of([(i * i) % 251 for i in range(20_000)])
    for count in range(200):
        sequence.token_ids.extend((count * count % 7, count * count % 251))
        in_c, in_python = (proposed(proposer, sequence, 8) for proposer in proposers)
        assert in_c == in_python
        assert in_c


@needs_gcc
def test_python_drafts_if_compilation_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The proposer drafts in Python if compilation fails, and the log has the reason."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-no-such-flag"))
    compiler.compiled.cache_clear()
    proposer = NgramProposer()
    compiler.compiled.cache_clear()
    assert isinstance(proposer._lookup, PythonLookup)
    assert proposed(proposer, sequence_of([1, 2, 3, 1, 2]), 2).token_ids == (3, 1)
    assert "ngram.c do not compile" in caplog.text


@needs_gcc
def test_drafts_are_in_c_where_c_compiles() -> None:
    """A machine with a compiler uses the lookup in C."""
    lookup = native_lookup(trees=True)
    assert lookup is not None
    assert isinstance(NgramProposer()._lookup, type(lookup))


@needs_gcc
@pytest.mark.parametrize(
    ("tokens", "texts", "keeps_lock"),
    [(100, 1, True), (100, UNLOCKED_TEXTS, False), (UNLOCKED_TOKENS, 1, False)],
)
def test_short_calls_keep_the_interpreter_lock(tokens: int, texts: int, keeps_lock: bool) -> None:
    """A call for few sequences keeps the lock unless one of them is long and new."""
    lookup = native_lookup(trees=False)
    calls = []
    for name in ("_drafts", "_short_drafts"):
        function = getattr(lookup, name)
        setattr(lookup, name, lambda *args, f=function, n=name: calls.append(n) or f(*args))
    group = [(lookup.index(compact([1, 2] * (tokens // 2))),) for _ in range(texts)]
    lookup.drafts(group, [4] * texts)
    lookup.drafts(group[:1], [4])  # the texts are known now
    assert set(calls[:-1]) == {"_short_drafts" if keeps_lock else "_drafts"}
    assert calls[-1] == "_short_drafts"
