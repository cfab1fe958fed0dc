"""The n-gram proposer: what it finds, and that it keeps up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backends.core.sequence import Sequence
from backends.engine.proposers.ngram import LENGTHS, NgramProposer
from backends.types import ResumedChoice
from policies.speculation import Off
from tests.engine.harness import request

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def sequence_of(token_ids: list[int]) -> Sequence:
    return Sequence.of(0, request("r", token_ids, Off()), ResumedChoice(0, ()))


def latest_match(token_ids: list[int]) -> int | None:
    """Where the longest indexed suffix ended last before the end, by looking at everything."""
    for length in LENGTHS:
        suffix = token_ids[-length:]
        for end in range(len(token_ids) - 1, length - 1, -1):
            if len(suffix) == length and token_ids[end - length : end] == suffix:
                return end
    return None


@given(tokens, st.integers(1, 12))
def test_it_proposes_what_followed_the_latest_longest_match(
    token_ids: list[int], length: int
) -> None:
    """The draft continues the last place where the longest indexed suffix stood before."""
    draft = NgramProposer().propose(sequence_of(token_ids), length)
    match = latest_match(token_ids)
    if match is None:
        assert not draft.token_ids
        return
    repeated = token_ids[match:]
    while len(repeated) < length:
        repeated = repeated + token_ids[match:]
    assert list(draft.token_ids) == repeated[:length]


@given(tokens, tokens)
def test_it_keeps_up_with_tokens_added_between_calls(first: list[int], more: list[int]) -> None:
    """Proposing as tokens arrive gives what proposing at the end gives."""
    proposer, sequence = NgramProposer(), sequence_of(first)
    proposer.propose(sequence, 4)
    for token in more:
        sequence.token_ids.append(token)
        drafted = proposer.propose(sequence, 4)
        assert drafted == NgramProposer().propose(sequence_of(sequence.token_ids), 4)


def test_evidence_is_the_length_of_the_match() -> None:
    """A longer match before the draft is reported as stronger evidence."""
    short = NgramProposer().propose(sequence_of([9, 1, 2, 3, 8, 1, 2]), 1)
    long = NgramProposer().propose(sequence_of([5, 6, 7, 1, 2, 3, 5, 6, 7, 1, 2]), 1)
    assert (short.token_ids, short.evidence) == ((3,), 2)
    assert (long.token_ids, long.evidence) == ((3,), 5)


def test_a_finished_sequence_leaves_nothing_behind() -> None:
    """Forgetting a sequence drops its index."""
    proposer, sequence = NgramProposer(), sequence_of([1, 2, 1, 2, 1])
    proposer.propose(sequence, 2)
    proposer.forget(sequence)
    proposer.forget(sequence)
    assert not proposer._indexes
