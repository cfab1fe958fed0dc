"""The budget of retries."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.resilience.retry_budget import SLOTS, RetryBudget

EVENTS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.01, 0.3, 0.9, 2.5, 11.0]), st.booleans()), max_size=200
)
"""Pairs of a pause in seconds and whether a retry follows instead of a new request."""


@given(EVENTS, st.sampled_from([0.0, 0.2, 1.0]), st.sampled_from([0.0, 0.5, 3.0]))
def test_retries_never_exceed_their_share(
    events: list[tuple[float, bool]], share: float, least_per_s: float
) -> None:
    """Any window has at most the share of its requests plus the free retries."""
    window_s = 10.0
    budget = RetryBudget(share, least_per_s, window_s)
    requests: list[float] = []
    allowed: list[float] = []
    times = accumulate(pause_s for pause_s, _ in events)
    for now_s, (_, retries) in zip(times, events, strict=True):
        if not retries:
            budget.count_request(now_s)
            requests.append(now_s)
        elif budget.take_retry(now_s):
            allowed.append(now_s)
            whole = sum(1 for at_s in requests if at_s > now_s - window_s)
            kept_s = window_s * (1 - 1 / SLOTS)  # The oldest part may have expired.
            lately = sum(1 for at_s in allowed if at_s > now_s - kept_s)
            assert lately <= least_per_s * window_s + share * whole


@given(st.integers(0, 200), st.sampled_from([0.1, 0.2, 0.5]))
def test_outage_adds_exactly_the_share(count: int, share: float) -> None:
    """Exactly the configured share of requests is retried when every request needs a retry."""
    budget = RetryBudget(share, least_per_s=0.0)
    allowed = 0
    for _ in range(count):
        budget.count_request(0.0)
        allowed += budget.take_retry(0.0)
    # The budget allows a retry as soon as the share adds up to 1.
    assert allowed == int(count * share + 1e-9)


def test_quiet_gateway_has_the_free_retries() -> None:
    """Free retries become available again with time."""
    budget = RetryBudget(share=0.2, least_per_s=0.5, window_s=10.0)
    assert [budget.take_retry(100.0) for _ in range(6)] == [True] * 5 + [False]
    assert not budget.take_retry(108.9)
    assert budget.take_retry(110.1)


def test_empty_budget_allows_no_retries() -> None:
    """A budget with both values set to 0 allows no retries."""
    budget = RetryBudget(0.0, 0.0)
    for _ in range(100):
        budget.count_request(1.0)
    assert not budget.take_retry(1.0)
