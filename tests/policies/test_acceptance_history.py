"""Draft counts by tenant: the counting rule, the decay of old counts, and their bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.speculation.acceptance_history import AcceptanceHistory, draft_counts
from draftgate.policies.types import UNTESTED, DraftCounts


def learn(
    history: AcceptanceHistory, tenant: str, *, model: str = "m", greedy: bool = True
) -> None:
    """Record a choice with ten drafts of four tokens, five accepted and five rejected after two."""
    histogram = (0, 0, 5, 0, 5)
    history.add_choice(tenant, model, greedy=greedy, drafted=40, histogram=histogram)


def test_choice_is_counted_up_to_the_first_wrong_token_of_each_draft() -> None:
    """A fully accepted draft counts no rejection, and any other draft counts one rejected token."""
    assert draft_counts(40, (0, 0, 5, 0, 5)) == DraftCounts(30, 5)
    assert draft_counts(8, (8,)) == DraftCounts(0, 8)
    assert draft_counts(8, (0, 8)) == DraftCounts(8, 0)
    assert draft_counts(0, ()) == UNTESTED


@given(st.lists(st.tuples(st.integers(1, 16), st.floats(0, 1)), min_size=1, max_size=40))
def test_no_more_tokens_are_tested_than_were_drafted(drafts) -> None:
    """The history counts all accepted tokens and never tests more tokens than were drafted."""
    histogram, accepted = [0] * 17, 0
    for length, share in drafts:
        agreed = int(length * share)
        histogram[agreed] += 1
        accepted += agreed
    drafted = sum(length for length, _ in drafts)
    counts = draft_counts(drafted, histogram)
    assert counts.accepted == accepted
    assert 0 <= counts.rejected <= min(len(drafts), drafted - accepted)


def test_counts_are_kept_by_tenant_model_and_greedy_decoding() -> None:
    """The history keeps separate counts for tenants, for models, and for greedy decoding."""
    history = AcceptanceHistory()
    learn(history, "a")
    learn(history, "b")
    own, everybody = history.counts("a", "m", greedy=True)
    assert own == DraftCounts(30, 5)
    assert everybody.accepted == pytest.approx(60, rel=0.01)
    assert history.counts("c", "m", greedy=True) == (UNTESTED, everybody)
    assert history.counts("a", "m", greedy=False) == (UNTESTED, UNTESTED)
    assert history.counts("a", "other", greedy=True) == (UNTESTED, UNTESTED)


def test_counts_follow_a_tenant_whose_texts_change() -> None:
    """Old requests have little weight after a few hundred new requests, and counts stay bounded."""
    history = AcceptanceHistory()
    for _ in range(2000):
        learn(history, "a")
    before, _ = history.counts("a", "m", greedy=True)
    assert before.accepted == pytest.approx(3000, rel=0.01)
    for _ in range(500):
        history.add_choice("a", "m", greedy=True, drafted=40, histogram=(10,))
    after, _ = history.counts("a", "m", greedy=True)
    assert after.accepted < 0.02 * (after.accepted + after.rejected)


def test_least_recently_used_tenant_is_forgotten() -> None:
    """The history forgets the least recently used tenant but keeps its drafts in the totals."""
    history = AcceptanceHistory(most_keys=3)
    for tenant in ("a", "b", "a", "c"):
        learn(history, tenant)
    assert history.counts("b", "m", greedy=True)[0] == UNTESTED
    assert history.counts("a", "m", greedy=True)[0] != UNTESTED
    assert history.counts("c", "m", greedy=True)[1].accepted > 110


def test_choice_without_drafts_changes_nothing() -> None:
    """A request without speculation does not change the history."""
    history = AcceptanceHistory()
    history.add_choice("a", "m", greedy=True, drafted=0, histogram=())
    assert history.counts("a", "m", greedy=True) == (UNTESTED, UNTESTED)
