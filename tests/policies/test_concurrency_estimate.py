"""How many sequences an engine is taken to run at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.concurrency_estimate import GROWTH, next_estimate


@given(st.lists(st.tuples(st.integers(0, 500), st.just(0)), max_size=30))
def test_nothing_is_bounded_before_somebody_waits(readings: list[tuple[int, int]]) -> None:
    """An engine where nobody ever waited has no known end."""
    seats = 0
    for running, waiting in readings:
        seats = next_estimate(seats, running, waiting)
    assert seats == 0


@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 900))
def test_the_engines_limit_is_found_from_wherever_it_was(
    before: int, limit: int, asked: int
) -> None:
    """Under more than it can run, what is sent settles at the limit, and few wait at the engine."""
    seats, demand = before, limit + 1 + asked
    sent = []
    for _ in range(60):
        sent.append(min(seats or demand, demand))
        running = min(sent[-1], limit)
        seats = next_estimate(seats, running, sent[-1] - running)
    assert min(sent[-10:]) >= limit, "seats stand empty while somebody waits here"
    assert max(sent[-10:]) <= limit + max(1, round(GROWTH * limit)), "too many wait there"


@given(st.integers(1, 400), st.integers(0, 400), st.integers(0, 50))
def test_a_reading_never_takes_what_is_in_use(seats: int, running: int, waiting: int) -> None:
    """There are as many seats as run while some wait, and no fewer than before while none does."""
    assert next_estimate(seats, running, waiting) >= (max(1, running) if waiting else seats)
