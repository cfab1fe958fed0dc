"""Tests of the earliest possible start of each request, with all arrivals known."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.hindsight import QueuedRequest, earliest_starts_s

TIMES = st.floats(0, 9)


@given(st.lists(st.tuples(TIMES, TIMES), max_size=30), st.integers(1, 4))
def test_one_class_is_first_come_first_served(visits, capacity) -> None:
    """Each request of a single class starts when the first sequence becomes free."""
    requests = [QueuedRequest(at_s, 0, service_s) for at_s, service_s in sorted(visits)]
    free, expected = [0.0] * capacity, []
    for request in requests:
        expected.append(max(request.at_s, free[0]))
        heapq.heapreplace(free, expected[-1] + request.service_s)
    assert earliest_starts_s(requests, capacity) == pytest.approx(expected)


def test_higher_classes_overtake_lower_ones() -> None:
    """The second class receives one start in four below a busy class, and the third one in 16."""
    requests = [QueuedRequest(0.0, 2, 1.0)] * 10 + [QueuedRequest(0.0, 1, 1.0)] * 40
    requests += [QueuedRequest(at_s, 0, 1.0) for at_s in range(64)]
    starts = earliest_starts_s(requests, 1)
    assert sum(start_s < 64 for start_s in starts[:10]) == 4
    assert sum(start_s < 64 for start_s in starts[10:50]) == 12
    assert sorted(starts) == list(range(114))


def test_a_missed_retry_delays_no_others() -> None:
    """A client that missed its retry keeps a place in the queue but delays no other request."""
    assert earliest_starts_s(
        [QueuedRequest(0.0, 0, 5.0), QueuedRequest(1.0, 0, 0.0), QueuedRequest(2.0, 0, 1.0)], 1
    ) == [0.0, 5.0, 5.0]
