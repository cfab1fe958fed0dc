"""The accept walk on a GPU, compared with its reference."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from draftgate.backends.engine.kernels import accept_walk, accept_walk_ref
from tests.kernels.synchronisation import forbid_synchronisation
from tests.kernels.walk_cases import WALK_ROWS, walk_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET", "0") == "1",
        reason="needs a CUDA device and compiled kernels",
    ),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("branching", "eos", "budget"),
    [(0.0, (), 1000), (0.3, (3, 12, 23, 30, 40), 1000), (0.8, (), 6)],
)
def test_accept_walk_equals_the_reference(
    branching: float, eos: tuple[int, ...], budget: int, seed: int
) -> None:
    """The GPU emits the same tokens as the reference for chains and trees of any size."""
    case = walk_case(seed, branching=branching, eos=eos, budget=budget, rows=WALK_ROWS * 20)
    expected = accept_walk_ref.accept_walk(*case.arguments(), max_rows=case.max_rows)
    walked = accept_walk.accept_walk(*case.to("cuda").arguments(), max_rows=case.max_rows)
    assert case.defined(walked) == case.defined(expected)


def test_accept_walk_does_not_synchronise() -> None:
    """The host does not wait for the GPU."""
    case = walk_case(2, branching=0.3, eos=(3,), rows=(9, 1, 65, 5, 12, 3)).to("cuda")
    # The first call compiles the kernel.
    accept_walk.accept_walk(*case.arguments(), max_rows=case.max_rows)
    with forbid_synchronisation():
        accept_walk.accept_walk(*case.arguments(), max_rows=case.max_rows)


def test_accept_walk_can_be_captured() -> None:
    """A replayed graph has the same results as a direct call for new inputs."""
    case = walk_case(2, branching=0.3, eos=(3,), rows=(9, 1, 65, 5, 12, 3)).to("cuda")
    # The first call compiles the kernel.
    accept_walk.accept_walk(*case.arguments(), max_rows=case.max_rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = accept_walk.accept_walk(*case.arguments(), max_rows=case.max_rows)
    other = walk_case(3, branching=0.8, eos=(3,), rows=(5, 9, 1, 12, 65, 3)).to("cuda")
    for tensor, changed in zip(case.arguments()[:4], other.arguments()[:4], strict=True):
        tensor.copy_(changed)
    graph.replay()
    direct = accept_walk.accept_walk(*case.arguments(), max_rows=case.max_rows)
    assert case.defined(captured) == case.defined(direct)
    assert int(direct.num_emitted.sum()) > 6
