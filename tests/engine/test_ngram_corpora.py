"""Drafts from earlier outputs: their owners, their memory, and what they prefer."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.operators import compiler
from draftgate.backends.engine.proposers.ngram import CONTEXT_TOKENS, NgramProposer
from draftgate.backends.engine.proposers.ngram_corpus import IDLE_S, Corpora, Corpus
from draftgate.backends.engine.proposers.ngram_lookup import MAX_CATCH_UP, MAX_MATCHES
from draftgate.backends.engine.proposers.ngram_native import NativeText, native_lookup
from draftgate.backends.engine.proposers.ngram_python import PythonLookup
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, ResumedChoice, SamplingParams
from draftgate.policies.types import SpeculationMode, SpeculationPlan

PLAN = SpeculationPlan("test", SpeculationMode.NGRAM, "ngram", 16, "a test")
LARGE_BYTES = 64 << 20

needs_gcc = pytest.mark.skipif(compiler.compiler_version() is None, reason="needs gcc")
in_c_and_python = pytest.mark.parametrize(
    "native", [pytest.param(True, marks=needs_gcc, id="c"), pytest.param(False, id="python")]
)


@dataclass
class Driver:
    """Runs requests through a proposer."""

    native: bool = False
    corpus_bytes: int = LARGE_BYTES
    now_s: float = 0.0
    proposer: NgramProposer = field(init=False)
    requests: int = 0

    def __post_init__(self) -> None:
        self.proposer = NgramProposer(
            corpus_bytes=self.corpus_bytes, native=self.native, clock=lambda: self.now_s
        )

    def begin(self, prompt: list[int], tenant: str = "", salt: str = "", **more: Any) -> Sequence:
        """Return a new sequence with a prompt."""
        self.requests += 1
        request = GenerationRequest(
            str(self.requests), compact(prompt), SamplingParams(999, 0), PLAN, tenant=tenant
        )
        request = replace(request, cache_salt=salt, **more)
        return Sequence.for_choice(self.requests, request, ResumedChoice(0, ()))

    def draft(self, sequence: Sequence, most: int = 4) -> Draft:
        """Return the draft of a sequence."""
        (draft,) = self.proposer.propose([DraftRequest(sequence, most)])
        return draft

    def finish(self, output: list[int], tenant: str = "", salt: str = "", **more: Any) -> None:
        """Run a request with an output to its end."""
        sequence = self.begin([], tenant, salt, **more)
        self.draft(sequence)
        sequence.token_ids.extend(output)
        self.proposer.forget(sequence)
        self.proposer.forget(sequence)  # a second call must have no effect

    @property
    def corpora(self) -> Corpora[Any]:
        """The corpora of the proposer."""
        assert self.proposer._corpora is not None
        return self.proposer._corpora


# --- owners ---------------------------------------------------------------------------------------


@in_c_and_python
def test_earlier_output_serves_only_its_owner(native: bool) -> None:
    """An output appears in drafts of its tenant with the same salt and adapter, and in no other."""
    driver = Driver(native)
    driver.finish([1, 2, 3, 4, 5, 6], "a", "s")
    for tenant, salt, adapter in (("a", "s", ""), ("a", "", ""), ("b", "s", ""), ("a", "s", "x")):
        expected = (4, 5, 6) if (tenant, salt, adapter) == ("a", "s", "") else ()
        sequence = driver.begin([9, 2, 3], tenant, salt, adapter=adapter)
        assert driver.draft(sequence, 3).token_ids == expected


@in_c_and_python
def test_request_without_corpus_neither_reads_nor_feeds_it(native: bool) -> None:
    """A request with `corpus` false drafts only from itself, and leaves no output."""
    driver = Driver(native)
    driver.finish([1, 2, 3, 4], corpus=False)
    assert not driver.draft(driver.begin([9, 2, 3]))
    driver.finish([1, 2, 3, 4])
    assert driver.draft(driver.begin([9, 2, 3]))
    assert not driver.draft(driver.begin([9, 2, 3], corpus=False))


@dataclass
class Event:
    """A request of an owner, which either finishes with the tokens or only gets a draft."""

    owner: tuple[str, str]
    tokens: list[int]
    finishes: bool


def events(*owners: tuple[str, str]) -> st.SearchStrategy[list[Event]]:
    """Return lists of requests of these owners."""
    texts = st.lists(st.integers(0, 4), min_size=1, max_size=30)
    return st.lists(st.builds(Event, st.sampled_from(owners), texts, st.booleans()), max_size=20)


def drafts_of(driver: Driver, requests: list[Event], owner: tuple[str, str]) -> list[Draft]:
    """Run requests, and return the drafts of one owner with their evidence."""
    drafts = []
    for request in requests:
        if request.finishes:
            driver.finish(request.tokens, *request.owner)
            continue
        draft = driver.draft(driver.begin(request.tokens, *request.owner), 8)
        if request.owner == owner:
            drafts.append(draft)
    return drafts


OURS = ("a", "s")


@in_c_and_python
@given(requests=events(OURS, ("a", ""), ("b", "s"), ("a", "t")))
def test_drafts_and_evidence_do_not_depend_on_other_owners(native, requests) -> None:
    """While the memory is not full, other owners change neither drafts nor their evidence."""
    alone = [request for request in requests if request.owner == OURS]
    assert drafts_of(Driver(native), requests, OURS) == drafts_of(Driver(native), alone, OURS)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400)), max_size=40))
def test_tenant_within_its_fair_share_loses_no_text(others: list[tuple[int, int]]) -> None:
    """While the memory is full, a tenant with less than its share keeps its drafts."""
    lookup = PythonLookup(trees=True)
    driver = Driver(corpus_bytes=2 * lookup.text_bytes(400))
    ours = [*range(100, 160)]
    driver.finish(ours, "ours")
    for salt, length in others:
        driver.finish([7] * length, "theirs", str(salt))
        driver.now_s += 1.0
    assert driver.draft(driver.begin([120, 121], "ours"), 4).token_ids == (122, 123, 124, 125)
    assert driver.corpora.size_bytes <= driver.corpus_bytes


def test_largest_tenant_loses_its_oldest_texts_first() -> None:
    """A tenant above its share loses the texts of its least recently used salt, not the latest."""
    lookup = PythonLookup(trees=True)
    driver = Driver(corpus_bytes=2 * lookup.text_bytes(512))
    driver.finish([*range(500)], "large", "old")
    driver.finish([*range(500)], "large", "new")
    driver.finish([*range(250)], "small")
    found = {
        (tenant, salt): bool(driver.draft(driver.begin([120, 121], tenant, salt)))
        for tenant, salt in (("large", "old"), ("large", "new"), ("small", ""))
    }
    assert found == {("large", "old"): False, ("large", "new"): True, ("small", ""): True}


def test_idle_corpus_is_dropped_whatever_others_do() -> None:
    """A corpus lives for `IDLE_S` after its last use, with or without requests of others."""
    for others in (False, True):
        driver = Driver()
        driver.finish([1, 2, 3, 4], "a")
        driver.now_s += IDLE_S - 1.0
        if others:
            driver.finish([5] * 500, "b")
        assert driver.draft(driver.begin([9, 2, 3], "a"))
        driver.now_s += IDLE_S
        assert not driver.draft(driver.begin([9, 2, 3], "a"))


@in_c_and_python
def test_running_sequence_survives_the_loss_of_its_corpus(native: bool) -> None:
    """A sequence whose corpus is dropped meanwhile gets drafts from itself, and feeds a new one."""
    driver = Driver(native)
    driver.finish([1, 2, 3, 4])
    sequence = driver.begin([9, 2, 3])
    assert driver.draft(sequence)
    driver.now_s += IDLE_S
    driver.finish([5], "b")
    assert not driver.draft(sequence)
    driver.proposer.forget(sequence)
    assert driver.draft(driver.begin([9, 2])).token_ids[:1] == (3,)


# --- memory ---------------------------------------------------------------------------------------


def real_bytes(corpus: Corpus[Any], owner: str) -> int:
    """Return the memory of a corpus and its indexes."""
    texts = corpus.generations
    sizes = [sys.getsizeof(text.tokens) + sys.getsizeof(text) for text in texts]
    sizes += [sys.getsizeof(text.memory) for text in texts if isinstance(text, NativeText)]
    return sum(sizes) + sys.getsizeof(owner) + sys.getsizeof(corpus)


@in_c_and_python
@given(
    corpus_bytes=st.integers(1, 1 << 18),
    requests=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 900), st.integers(0, 2000)),
        max_size=30,
    ),
)
def test_corpora_never_exceed_their_bytes(native, corpus_bytes, requests) -> None:
    """After any requests, all corpora with their indexes are within the bound."""
    driver = Driver(native, corpus_bytes)
    for tenant, salt, length, idle_s in requests:
        driver.finish([*range(length)], str(tenant), str(salt))
        driver.now_s += idle_s
        corpora = driver.corpora
        found = corpora._by_owner.items()
        assert corpora.size_bytes <= corpus_bytes
        assert corpora.size_bytes == sum(corpus.size_bytes for _, corpus in found)
        assert corpora.size_bytes == sum(corpora._tenant_bytes.values())
        assert sum(real_bytes(corpus, owner) for owner, corpus in found) <= corpora.size_bytes


@in_c_and_python
@pytest.mark.parametrize("corpus_bytes", [1 << 16, 1 << 20])
def test_one_owner_may_use_most_of_the_memory(native: bool, corpus_bytes: int) -> None:
    """A single owner fills at least a quarter of the memory with its latest outputs."""
    driver = Driver(native, corpus_bytes)
    for start in range(0, 40_000, 100):
        driver.finish([*range(start, start + 100)])
    assert driver.corpora.size_bytes >= corpus_bytes // 4
    sequence = driver.begin([39_990, 39_991])
    for _ in range(40_000 // MAX_CATCH_UP):  # each lookup indexes a part
        driver.draft(sequence)
    assert driver.draft(sequence).token_ids[0] == 39_992
    assert not driver.draft(driver.begin([10, 11]))


def test_no_bytes_keep_no_outputs() -> None:
    """With 0 bytes, the proposer drafts from the sequence alone."""
    driver = Driver(corpus_bytes=0)
    driver.finish([1, 2, 3, 4])
    assert not driver.draft(driver.begin([9, 2, 3]))


def index_steps(native: bool, length: int) -> int:
    """Return the number of lookups until one finds the end of a new text of another request."""
    lookup: Any = native_lookup(trees=True) if native else PythonLookup(trees=True)
    own = lookup.index(compact([length - 3, length - 2]))
    other = lookup.index(compact(range(length)))
    lookups = 1
    while not lookup.drafts([(own, other)], [1])[0]:
        lookups += 1
    return lookups


@in_c_and_python
def test_lookup_indexes_a_bounded_part_of_a_corpus(native: bool) -> None:
    """A lookup adds at most `MAX_CATCH_UP` tokens of another text to its index."""
    assert index_steps(native, MAX_CATCH_UP) == 1
    assert index_steps(native, 3 * MAX_CATCH_UP) == 3


# --- preferences ----------------------------------------------------------------------------------


@in_c_and_python
def test_output_is_kept_with_the_end_of_its_prompt(native: bool) -> None:
    """The first tokens of an output match by the end of the prompt, but no earlier prompt does."""
    driver = Driver(native)
    prompt = [*range(100, 100 + 2 * CONTEXT_TOKENS)]
    sequence = driver.begin(prompt)
    driver.draft(sequence)
    sequence.token_ids.extend([1, 2, 3])
    driver.proposer.forget(sequence)
    assert driver.draft(driver.begin([7, *prompt[-2:]]), 3).token_ids == (1, 2, 3)
    assert not driver.draft(driver.begin([7, *prompt[:2]]))


@in_c_and_python
def test_long_old_match_precedes_later_pairs(native: bool) -> None:
    """A match of four tokens is found behind more later matches of the pair than are compared."""
    driver = Driver(native)
    driver.finish([1, 2, 3, 4, 5])
    for number in range(2 * MAX_MATCHES):
        driver.finish([100 + number, 3, 4, 6])
    draft = driver.draft(driver.begin([1, 2, 3, 4]))
    assert 5 in draft.token_ids
    assert draft.evidence == 4


@in_c_and_python
def test_latest_output_precedes_earlier_ones(native: bool) -> None:
    """Of equally long matches, the draft continues the latest first."""
    driver = Driver(native)
    driver.finish([1, 2, 3, 4])
    driver.finish([1, 2, 3, 5])
    assert driver.draft(driver.begin([9, 2, 3])).token_ids[0] == 5


@in_c_and_python
def test_counts_of_continuations_are_evidence(native: bool) -> None:
    """Outputs that continue alike raise the agreement of a draft, and others lower it."""
    driver = Driver(native)
    driver.finish([1, 2, 3])
    agreements = []
    for token in (3, 3, 4):
        driver.finish([7, 1, 2, token])
        agreements.append(driver.draft(driver.begin([8, 1, 2])).agreement)
    assert agreements == [1000, 1000, 250]


@in_c_and_python
def test_long_match_in_the_sequence_precedes_the_corpus(native: bool) -> None:
    """The proposer does not search the corpus after a long match in the sequence."""
    driver = Driver(native)
    driver.finish([1, 2, 3, 4, 7, 7, 7])
    sequence = driver.begin([1, 2, 3, 4, 5, 6, 1, 2, 3, 4])
    assert driver.draft(sequence, 2).token_ids == (5, 6)
