"""The weight of a token."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from draftgate.policies.speculation.weights import AMPLE_TOKENS, LATE_WEIGHT, due_in_s, weight
from draftgate.policies.types import ServiceLevel

seconds = st.floats(-100.0, 100.0)


@given(seconds, seconds, st.floats(1e-3, 1.0), st.integers(-9, 9))
def test_later_sequence_never_weighs_less(one_s, other_s, tpot_s, priority) -> None:
    """Weights stay between the weights of ample time and of lateness."""
    service = ServiceLevel(tpot_s=tpot_s, priority=priority)
    early, late = sorted((one_s, other_s), reverse=True)
    usual = weight(None, ServiceLevel(priority=priority))
    assert usual <= weight(early, service) <= weight(late, service) <= LATE_WEIGHT * usual


@given(seconds, st.floats(1e-3, 1.0), st.integers(-9, 8))
def test_better_class_never_weighs_less(laxity_s, tpot_s, priority) -> None:
    """The weights of two classes differ by a factor of four."""
    of = [weight(laxity_s, ServiceLevel(None, tpot_s, p)) for p in (priority, priority + 1)]
    assert of[0] >= of[1] > 0.0
    ends = [weight(None, ServiceLevel(priority=p)) for p in (-1, 1)]
    assert ends[0] == 4 * ends[1]


def test_weight_is_1_without_a_target_or_with_ample_time() -> None:
    """A request far ahead of its target has the weight of a request without a target."""
    service = ServiceLevel(tpot_s=0.05)
    assert weight(None, ServiceLevel()) == 1.0
    assert weight(AMPLE_TOKENS * 0.05, service) == 1.0
    assert weight(0.0, service) == LATE_WEIGHT
    assert 1.0 < weight(AMPLE_TOKENS * 0.025, service) < LATE_WEIGHT


def test_tokens_are_due_at_even_intervals() -> None:
    """The third token is due two intervals after the first."""
    assert due_in_s(0.05, 0.02, 2) == pytest.approx(0.08)
