"""The n-gram proposer: its matches, trees, updates and memory."""

from __future__ import annotations

import sys
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.engine.proposers.ngram_index import (
    MAX_EVIDENCE,
    MAX_MATCHES,
    MAX_TENANTS,
    NgramIndex,
    TenantCorpora,
)
from draftgate.backends.engine.testing import check_draft
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, ResumedChoice, SamplingParams
from draftgate.policies.types import SpeculationMode, SpeculationPlan

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=60)
PLAN = SpeculationPlan("test", SpeculationMode.NGRAM, "ngram", 16, "a test")


def sequence_of(token_ids: list[int], key: int = 0, tenant: str = "") -> Sequence:
    request = GenerationRequest(
        str(key), compact(token_ids), SamplingParams(9, 0), PLAN, tenant=tenant
    )
    return Sequence.for_choice(key, request, ResumedChoice(0, ()))


def proposed(proposer: NgramProposer, sequence: Sequence, most: int) -> Draft:
    (draft,) = proposer.propose([DraftRequest(sequence, most)])
    return draft


def longest_matches(text: list[int]) -> list[tuple[int, int]]:
    """Return (length, end) of the latest matches of the last pair or token by brute force."""
    for size in (2, 1):
        ends = [
            end
            for end in range(len(text) - 1, size - 1, -1)
            if len(text) > size and text[end - size : end] == text[-size:]
        ]
        if ends:
            break
    found = []
    for end in ends[:MAX_MATCHES]:
        length = 0
        while length < min(end, MAX_EVIDENCE) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        found.append((length, end))
    return sorted(found, key=lambda place: -place[0])


def continuation(text: list[int], end: int, length: int) -> tuple[int, ...]:
    repeated = text[end:]
    while len(repeated) < length:
        repeated = repeated + text[end:]
    return tuple(repeated[:length])


@given(tokens)
def test_index_finds_every_match(text: list[int]) -> None:
    """The index lists matches by length, then by position, up to the bound."""
    index = NgramIndex()
    index.catch_up(text)
    assert [(m.length, m.end) for m in index.matches(text, text)] == longest_matches(text)


@given(tokens, st.integers(1, 12))
def test_chain_continues_the_longest_match(text: list[int], most: int) -> None:
    """A chain continues the latest longest match and repeats that match beyond the end."""
    draft = proposed(NgramProposer(trees=False), sequence_of(text), most)
    found = longest_matches(text)
    assert draft.is_chain
    if found:
        assert draft.token_ids == continuation(text, found[0][1], most)
        assert draft.evidence == found[0][0]
    else:
        assert not draft


@given(tokens, st.booleans())
def test_agreement_is_the_weighted_share_of_equal_continuations(text: list[int], trees) -> None:
    """A longer match has twice the weight per token, and a single match has no agreement."""
    draft = proposed(NgramProposer(trees=trees), sequence_of(text), 1)
    found = longest_matches(text)
    if len(found) < 2:
        assert draft.agreement == 0
        return
    longest, first = found[0][0], text[found[0][1]]
    weights = [(2.0 ** (length - longest), text[end] == first) for length, end in found]
    share = sum(weight for weight, equal in weights if equal) / sum(w for w, _ in weights)
    assert draft.agreement == round(1000 * share)


@given(tokens, st.integers(1, 12))
def test_tree_consists_of_continuations(text: list[int], most: int) -> None:
    """Each path is a prefix of a continuation, and shares follow the match lengths."""
    draft = proposed(NgramProposer(), sequence_of(text), most)
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


def test_different_continuations_become_branches_best_first() -> None:
    """The more frequent continuation is the first of two branches."""
    text = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2]
    draft = proposed(NgramProposer(), sequence_of(text), 4)
    assert draft.token_ids[:2] == (3, 4)
    assert draft.parents[:2] == (-1, -1)
    assert draft.shares[:2] == pytest.approx((2 / 3, 1 / 3))


@given(tokens, st.lists(tokens, max_size=5))
def test_index_follows_tokens_added_between_calls(first, more) -> None:
    """Drafts after added tokens equal the drafts of a new proposer."""
    proposer, sequence = NgramProposer(), sequence_of(first)
    proposed(proposer, sequence, 4)
    for some in more:
        sequence.token_ids.extend(some)
        fresh = proposed(NgramProposer(), sequence_of(sequence.token_ids), 4)
        assert proposed(proposer, sequence, 4) == fresh


def test_index_memory_is_proportional_to_the_text() -> None:
    """The index of 100,000 varied tokens takes at most 150 bytes per token."""
    text = [(i * i) % 4093 for i in range(100_000)]
    index = NgramIndex()
    index.catch_up(text)
    parts = (index._pairs, index._singles, index._earlier_pairs, index._earlier_singles)
    size_bytes = sum(sys.getsizeof(part) for part in parts)
    size_bytes += sum(sys.getsizeof(n) for d in parts[:2] for pair in d.items() for n in pair)
    assert size_bytes < 150 * len(text)


def test_forgetting_drops_the_index() -> None:
    """A proposer without a corpus also drops the text of a finished sequence."""
    proposer, sequence = NgramProposer(), sequence_of([1, 2, 1, 2, 1])
    proposed(proposer, sequence, 2)
    proposer.forget(sequence)
    proposer.forget(sequence)
    assert not proposer._indexes
    assert not proposed(proposer, sequence_of([7, 1, 2], key=1), 2)


# --- corpus ---------------------------------------------------------------------------------------


def test_corpus_serves_only_its_tenant() -> None:
    """The text of a finished request appears only in drafts of the same tenant."""
    proposer = NgramProposer(corpus_tokens=100)
    finished = sequence_of([1, 2, 3, 4, 5, 6], tenant="a")
    proposed(proposer, finished, 3)
    proposer.forget(finished)
    proposer.forget(finished)
    for tenant, draft in (("a", (4, 5, 6)), ("b", ()), ("", ())):
        sequence = sequence_of([9, 2, 3], key=1, tenant=tenant)
        assert proposed(proposer, sequence, 3).token_ids == draft
        assert proposed(NgramProposer(), sequence, 3).token_ids == ()
    assert len(proposer._corpora._by_tenant["a"]) == 6


def test_long_match_in_the_sequence_precedes_the_corpus() -> None:
    """The proposer does not search the corpus after a long match in the sequence."""
    proposer = NgramProposer(corpus_tokens=100)
    finished = sequence_of([1, 2, 3, 4, 7, 7, 7], tenant="a")
    proposed(proposer, finished, 3)
    proposer.forget(finished)
    sequence = sequence_of([1, 2, 3, 4, 5, 6, 1, 2, 3, 4], key=1, tenant="a")
    assert proposed(proposer, sequence, 2).token_ids == (5, 6)


@given(st.lists(st.lists(st.integers(0, 9), max_size=30), max_size=30), st.integers(2, 60))
def test_corpus_keeps_the_latest_tokens(texts, most) -> None:
    """The corpus never exceeds its limit and always has the end of the last text."""
    corpora = TenantCorpora(most)
    for text in texts:
        corpora.add_text("a", text)
    corpus = corpora._by_tenant.get("a")
    if corpus is None:
        assert not texts
        return
    assert len(corpus) <= most
    kept = texts[-1][-(most // 2) :]
    latest = corpus._generations[0][0]
    assert latest[len(latest) - len(kept) :] == kept


def test_least_recently_used_tenant_is_dropped() -> None:
    """The proposer keeps the corpus of a bounded number of tenants."""
    corpora = TenantCorpora(10)
    for number in range(MAX_TENANTS):
        corpora.add_text(str(number), [1, 2, 3])
    assert list(corpora.matches("0", [1, 2]))
    corpora.add_text("new", [1, 2, 3])
    assert list(corpora.matches("0", [1, 2]))
    assert not list(corpora.matches("1", [1, 2]))
    assert Counter(len(c) for c in corpora._by_tenant.values()) == {3: MAX_TENANTS}
