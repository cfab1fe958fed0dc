"""Step costs for tests."""

from __future__ import annotations

from typing import Final

import hypothesis.strategies as st

from draftgate.policies.costs.step_cost import StepCost

_BUCKETS = (1, 2, 4, *range(8, 1025, 8))

H100_8B: Final = StepCost(
    _BUCKETS, tuple(5.886e-3 + 21.0e-6 * n for n in _BUCKETS), kv_token_s=39.3e-9
)
"""The reference scale of the design, section 5."""


@st.composite
def costs(draw, most_bucket: int = 600) -> StepCost:
    """Draw step costs of all shapes, including flat ones."""
    buckets = sorted(draw(st.sets(st.integers(1, most_bucket), min_size=1, max_size=8)))
    steps, seconds = [], 0.0
    for _ in buckets:
        seconds += draw(st.sampled_from([0.0, 1e-4, 3e-3]))
        steps.append(seconds)
    return StepCost(
        tuple(buckets),
        tuple(steps),
        draw(st.floats(0, 1e-6)),
        draw(st.floats(0, 1e-4)),
        draw(st.floats(0, 1e-6)),
        draw(st.sampled_from([0.0, 1e-4])),
    )
