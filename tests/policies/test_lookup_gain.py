"""The expected gain of n-gram lookups."""

from __future__ import annotations

import pytest

from draftgate.policies.speculation.lookup_gain import FIRST_GAIN, LookupGains

PRICE = 0.3


def test_first_lookups_are_expected_to_gain() -> None:
    """Before any lookup, the expected gain is positive after any outcome of the last draft."""
    gains = LookupGains()
    assert [gains.expected(row, PRICE) for row in range(3)] == [FIRST_GAIN] * 3


def test_expected_gain_approaches_the_mean_of_its_row() -> None:
    """The expected gain of each row approaches the mean gain of that row."""
    gains = LookupGains()
    for turn in range(400):
        gains.add_lookup(1, PRICE, 0.4 if turn % 4 == 0 else 0.0)
        gains.add_lookup(5, PRICE, 3.0)
    assert gains.expected(1, PRICE) == pytest.approx(0.1, abs=0.08)
    assert gains.expected(5, PRICE) == pytest.approx(3.0, abs=0.1)


def test_unseen_row_has_the_mean_of_all_rows() -> None:
    """The first draft of a row is expected to gain as much as drafts of other rows."""
    gains = LookupGains()
    for _ in range(400):
        gains.add_lookup(1, PRICE, 0.2)
    assert gains.expected(0, PRICE) == pytest.approx(0.2, abs=0.05)


def test_old_gains_are_forgotten() -> None:
    """A text that begins to repeat regains a positive expected gain after a few matches."""
    gains = LookupGains()
    for _ in range(1000):
        gains.add_lookup(1, PRICE, 0.0)
    assert gains.expected(1, PRICE) < 2e-3
    for _ in range(5):
        gains.add_lookup(1, PRICE, 2.0)
    assert gains.expected(1, PRICE) > 0.05


def test_gains_of_a_high_price_do_not_count_at_a_low_price() -> None:
    """A worker whose load falls expects the gains that it learned at the low price."""
    gains = LookupGains()
    for _ in range(100):
        gains.add_lookup(1, 0.0, 1.5)
    for _ in range(1000):
        gains.add_lookup(1, 0.6, 0.0)
    assert gains.expected(1, 0.6) < 0.01
    assert gains.expected(1, 0.0) == pytest.approx(1.5, abs=0.1)
