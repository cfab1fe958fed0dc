"""The long-run speedup by drafts."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from draftgate.policies.speculation.price import LongRunSpeedup

STEPS = st.lists(st.tuples(st.floats(0.1, 100.0), st.floats(0.1, 100.0)), max_size=30)


@given(STEPS)
def test_speedup_is_between_one_and_the_best_step(steps) -> None:
    """The speedup is at least 1, and at most the speedup of the best step."""
    speedup = LongRunSpeedup()
    assert speedup.ratio == 1.0
    for tokens, plain_tokens in steps:
        speedup.add_step(tokens, plain_tokens)
    ratios = [tokens / plain_tokens for tokens, plain_tokens in steps]
    assert 1.0 <= speedup.ratio <= max([1.0, *ratios]) * (1 + 1e-9)


def test_speedup_follows_the_last_steps() -> None:
    """After a change, the speedup approaches the new value within 200 steps."""
    speedup = LongRunSpeedup()
    for tokens in [3.0] * 500 + [1.5] * 200:
        speedup.add_step(tokens, 1.0)
    assert speedup.ratio == pytest.approx(1.5, rel=0.02)


def test_equal_steps_with_and_without_drafts_count_by_their_time() -> None:
    """The speedup of two alternating steps is that of their sums, not the mean of their ratios."""
    speedup = LongRunSpeedup()
    for _ in range(500):
        speedup.add_step(4.0, 2.0)
        speedup.add_step(1.0, 1.0)
    assert speedup.ratio == pytest.approx(5.0 / 3.0, rel=0.01)
