"""The estimated maximum number of concurrent sequences of an engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.concurrency_estimate import GROWTH, next_estimate


@given(st.lists(st.tuples(st.integers(0, 500), st.just(0)), max_size=30))
def test_capacity_is_unknown_until_a_request_waits(readings: list[tuple[int, int]]) -> None:
    """The estimate is unknown until a request waits at the engine."""
    estimate = 0
    for running, waiting in readings:
        estimate = next_estimate(estimate, running, waiting)
    assert estimate == 0


@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 900))
def test_estimate_settles_at_the_engines_limit(before: int, limit: int, excess: int) -> None:
    """Under excess load, the estimate settles at the engine's limit, and few requests wait at the
    engine."""
    estimate, demand = before, limit + 1 + excess
    sent = []
    for _ in range(60):
        sent.append(min(estimate or demand, demand))
        running = min(sent[-1], limit)
        estimate = next_estimate(estimate, running, sent[-1] - running)
    assert min(sent[-10:]) >= limit, "capacity is idle while requests wait"
    assert max(sent[-10:]) <= limit + max(1, round(GROWTH * limit)), (
        "too many requests wait at the engine"
    )


@given(st.integers(1, 400), st.integers(0, 400), st.integers(0, 50))
def test_estimate_is_never_below_the_running_sequences_of_a_queue(
    estimate: int, running: int, waiting: int
) -> None:
    """The estimate is at least the running sequences with a queue and never falls without
    a queue."""
    assert next_estimate(estimate, running, waiting) >= (max(1, running) if waiting else estimate)
