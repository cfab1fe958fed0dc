"""Tests of the earliest possible start of each request, with all arrivals known."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulation.hindsight import Stay, starts_s

TIMES = st.floats(0, 9)


@given(st.lists(st.tuples(TIMES, TIMES), max_size=30), st.integers(1, 4))
def test_one_class_is_first_come_first_served(visits, seats) -> None:
    """Each request of a single class starts when the first sequence becomes free."""
    stays = [Stay(at_s, 0, service_s) for at_s, service_s in sorted(visits)]
    free, expected = [0.0] * seats, []
    for stay in stays:
        expected.append(max(stay.at_s, free[0]))
        heapq.heapreplace(free, expected[-1] + stay.service_s)
    assert starts_s(stays, seats) == pytest.approx(expected)


def test_higher_classes_overtake_lower_ones() -> None:
    """The second class receives one start in four below a busy class, and the third one in 16."""
    stays = [Stay(0.0, 2, 1.0)] * 10 + [Stay(0.0, 1, 1.0)] * 40
    stays += [Stay(at_s, 0, 1.0) for at_s in range(64)]
    starts = starts_s(stays, 1)
    assert sum(start_s < 64 for start_s in starts[:10]) == 4
    assert sum(start_s < 64 for start_s in starts[10:50]) == 12
    assert sorted(starts) == list(range(114))


def test_a_missed_retry_delays_no_others() -> None:
    """A client that missed its retry keeps a place in the queue but delays no other request."""
    assert starts_s([Stay(0.0, 0, 5.0), Stay(1.0, 0, 0.0), Stay(2.0, 0, 1.0)], 1) == [0.0, 5.0, 5.0]
