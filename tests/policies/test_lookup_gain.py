"""What look-ups are expected to bring."""

from __future__ import annotations

import pytest

from draftgate.policies.speculation.lookup_gain import FIRST_GAIN, LookupGains


def test_much_is_expected_at_first() -> None:
    """Where nobody has looked yet looking is worth it, whatever the last draft did."""
    gains = LookupGains()
    assert [gains.expected(row) for row in range(3)] == [FIRST_GAIN] * 3


def test_what_came_of_look_ups_is_expected_of_the_next() -> None:
    """The mean of a row is approached, and rows are told apart."""
    gains = LookupGains()
    for turn in range(400):
        gains.add_lookup(1, 0.4 if turn % 4 == 0 else 0.0)
        gains.add_lookup(5, 3.0)
    assert gains.expected(1) == pytest.approx(0.1, abs=0.08)
    assert gains.expected(5) == pytest.approx(3.0, abs=0.1)


def test_a_row_that_was_not_met_is_taken_for_the_mean_of_all() -> None:
    """A first draft is expected to bring what others did."""
    gains = LookupGains()
    for _ in range(400):
        gains.add_lookup(1, 0.2)
    assert gains.expected(0) == pytest.approx(0.2, abs=0.05)


def test_what_look_ups_brought_long_ago_is_forgotten() -> None:
    """A text that begins to repeat itself is worth a look again within a few finds."""
    gains = LookupGains()
    for _ in range(1000):
        gains.add_lookup(1, 0.0)
    assert gains.expected(1) < 2e-3
    for _ in range(5):
        gains.add_lookup(1, 2.0)
    assert gains.expected(1) > 0.05
