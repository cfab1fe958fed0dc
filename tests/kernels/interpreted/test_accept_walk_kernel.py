"""The accept walk in Triton's interpreter."""

from __future__ import annotations

import pytest

from draftgate.backends.engine.kernels import accept_walk, accept_walk_ref
from tests.kernels.walk_cases import walk_case


@pytest.mark.parametrize(
    ("branching", "eos", "budget"),
    [(0.0, (), 1000), (0.3, (3, 12, 23, 30, 40), 1000), (0.8, (), 6), (0.3, (3,), 1000)],
)
def test_accept_walk_equals_the_reference(
    branching: float, eos: tuple[int, ...], budget: int
) -> None:
    """The kernel emits the tokens of the reference for chains and trees of any size."""
    case = walk_case(11, branching=branching, eos=eos, budget=budget)
    expected = accept_walk_ref.accept_walk(*case.arguments(), max_rows=case.max_rows)
    walked = accept_walk.accept_walk(*case.arguments(), max_rows=case.max_rows)
    assert case.defined(walked) == case.defined(expected)
