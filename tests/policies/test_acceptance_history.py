"""The history of drafts by tenant: what is counted, what is forgotten, what it costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.speculation.acceptance_history import AcceptanceHistory, draft_counts
from draftgate.policies.types import UNTESTED, DraftCounts


def learn(
    history: AcceptanceHistory, tenant: str, *, model: str = "m", greedy: bool = True
) -> None:
    """A choice with ten drafts of four tokens: five whole, five rejected behind two."""
    histogram = (0, 0, 5, 0, 5)
    history.add_choice(tenant, model, greedy=greedy, drafted=40, histogram=histogram)


def test_a_choice_is_counted_up_to_each_first_wrong_token() -> None:
    """Drafts that were accepted whole reject nothing, the others one token each."""
    assert draft_counts(40, (0, 0, 5, 0, 5)) == DraftCounts(30, 5)
    assert draft_counts(8, (8,)) == DraftCounts(0, 8)
    assert draft_counts(8, (0, 8)) == DraftCounts(8, 0)
    assert draft_counts(0, ()) == UNTESTED


@given(st.lists(st.tuples(st.integers(1, 16), st.floats(0, 1)), min_size=1, max_size=40))
def test_what_was_tested_was_drafted(drafts) -> None:
    """Never more tokens are counted as tested than were drafted, and all accepted ones agreed."""
    histogram, accepted = [0] * 17, 0
    for length, share in drafts:
        agreed = int(length * share)
        histogram[agreed] += 1
        accepted += agreed
    drafted = sum(length for length, _ in drafts)
    counts = draft_counts(drafted, histogram)
    assert counts.accepted == accepted
    assert 0 <= counts.rejected <= min(len(drafts), drafted - accepted)


def test_tenants_models_and_classes_are_told_apart() -> None:
    """A tenant's own counts are its own, those of a model everybody's; greedy is not drawn."""
    history = AcceptanceHistory()
    learn(history, "a")
    learn(history, "b")
    own, everybody = history.counts("a", "m", greedy=True)
    assert own == DraftCounts(30, 5)
    assert everybody.accepted == pytest.approx(60, rel=0.01)
    assert history.counts("c", "m", greedy=True) == (UNTESTED, everybody)
    assert history.counts("a", "m", greedy=False) == (UNTESTED, UNTESTED)
    assert history.counts("a", "other", greedy=True) == (UNTESTED, UNTESTED)


def test_a_tenant_that_changes_is_followed() -> None:
    """After some hundred requests what was before hardly counts, and counts stay bounded."""
    history = AcceptanceHistory()
    for _ in range(2000):
        learn(history, "a")
    before, _ = history.counts("a", "m", greedy=True)
    assert before.accepted == pytest.approx(3000, rel=0.01)
    for _ in range(500):
        history.add_choice("a", "m", greedy=True, drafted=40, histogram=(10,))
    after, _ = history.counts("a", "m", greedy=True)
    assert after.accepted < 0.02 * (after.accepted + after.rejected)


def test_no_more_tenants_are_remembered_than_agreed() -> None:
    """Whoever was not heard of for longest is forgotten, and counts among all nevertheless."""
    history = AcceptanceHistory(most_tenants=2)
    for tenant in ("a", "b", "a", "c"):
        learn(history, tenant)
    assert history.counts("b", "m", greedy=True)[0] == UNTESTED
    assert history.counts("a", "m", greedy=True)[0] != UNTESTED
    assert history.counts("c", "m", greedy=True)[1].accepted > 110


def test_a_choice_without_drafts_teaches_nothing() -> None:
    """Requests with speculation off leave no trace."""
    history = AcceptanceHistory()
    history.add_choice("a", "m", greedy=True, drafted=0, histogram=())
    assert history.counts("a", "m", greedy=True) == (UNTESTED, UNTESTED)
