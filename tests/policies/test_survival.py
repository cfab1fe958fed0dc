"""Estimates of acceptance."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from policies.survival import Acceptance

drafts = st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=200)


@given(drafts, st.floats(0.01, 0.99))
def test_a_rate_is_a_chance(observed, prior) -> None:
    """Whatever was seen, the estimate stays strictly between 0 and 1."""
    acceptance = Acceptance(forgetting=0.998)
    for agreed, refuted in observed:
        acceptance.observe(agreed, refuted=refuted)
    assert 0.0 < acceptance.rate(prior) < 1.0


def test_nothing_seen_is_the_prior_and_much_seen_is_the_frequency() -> None:
    """The estimate starts at the prior and ends at what was counted."""
    acceptance = Acceptance()
    assert acceptance.rate(prior=0.3) == pytest.approx(0.3)
    for _ in range(1000):
        acceptance.observe(3, refuted=True)
    assert acceptance.rate(prior=0.3) == pytest.approx(0.75, abs=0.01)


def test_old_evidence_is_forgotten() -> None:
    """After a change, the worker's estimate follows the new drafts within some 500 of them."""
    acceptance = Acceptance(forgetting=0.998)
    for _ in range(5000):
        acceptance.observe(4, refuted=False)
    for _ in range(1500):
        acceptance.observe(0, refuted=True)
    assert acceptance.rate() < 0.25
