"""Conversion of times between the clocks of two machines."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.peer.link import DRIFT, RemoteClock
from draftgate.backends.types import Phases

OFFSETS = st.floats(-1e6, 1e6)
DELAYS = st.lists(st.floats(1e-5, 0.5), min_size=1, max_size=30)


@given(OFFSETS, DELAYS)
def test_converted_times_keep_causal_order(offset_s: float, delays_s: list[float]) -> None:
    """Converted times are between sending and arrival, and late by the fastest transfer."""
    clock, arrived_s, quickest_s = RemoteClock(), 0.0, math.inf
    for number, delay_s in enumerate(delays_s):
        sent_s = 100.0 + 0.1 * number  # by the local clock
        arrived_s = max(arrived_s, sent_s + delay_s)  # A connection preserves order.
        clock.add_report(sent_s + offset_s, arrived_s)
        quickest_s = min(quickest_s, arrived_s - sent_s)
        found_s = clock.to_local_s(sent_s + offset_s)
        assert sent_s - 1e-6 <= found_s <= arrived_s + 1e-6
        assert found_s <= sent_s + quickest_s + DRIFT * (arrived_s - 100.0) + 1e-6


@pytest.mark.parametrize("rate", [1 - 1e-4, 1 + 1e-4])
def test_conversion_follows_clock_drift(rate: float) -> None:
    """The error is still one transfer after a day of clock drift by seconds."""
    clock = RemoteClock()
    for minute in range(24 * 60):
        ours_s = 60.0 * minute
        clock.add_report(ours_s * rate, ours_s + 1e-3)
        assert abs(clock.to_local_s(ours_s * rate) - ours_s) < 1.1e-3


def test_phases_are_converted_together() -> None:
    """The conversion keeps the intervals between phases and the recorded flag."""
    clock = RemoteClock()
    clock.add_report(1000.0, 7.5)
    theirs = Phases(999.0, 999.25, ((999.5, 16), (999.75, 8)), 999.75, recorded=True)
    assert clock.to_local_phases(theirs) == Phases(
        6.5, 6.75, ((7.0, 16), (7.25, 8)), 7.25, recorded=True
    )
