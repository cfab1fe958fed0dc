"""Positions and slots on the paths of draft trees in the interpreter."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl

from draftgate.backends.engine.kernels import tree_paths_ref
from draftgate.backends.engine.kernels.tree_paths import leaves_of_rows, path_slots
from tests.kernels.attention_cases import ancestors_of, bushy, chain, comb, star


@triton.jit
def _path_slots_kernel(out_ptr, positions_ptr, path_ptr, draft_start, COUNT: tl.constexpr):  # noqa: N803
    places = tl.arange(0, COUNT)
    positions = tl.load(positions_ptr + places)
    tl.store(out_ptr + places, path_slots(positions, draft_start, tl.load(path_ptr)))


@triton.jit
def _leaves_kernel(out_ptr, ancestors_ptr, real_ptr, ROWS: tl.constexpr):  # noqa: N803
    rows = tl.arange(0, ROWS)
    ancestors, real = tl.load(ancestors_ptr + rows), tl.load(real_ptr + rows) != 0
    tl.store(out_ptr + rows, leaves_of_rows(ancestors, real, ROWS))


def _paths() -> list[int]:
    draws = random.Random(1)
    sparse = [draws.getrandbits(64) & draws.getrandbits(64) for _ in range(20)]
    return [0, 1, 1 << 63, (1 << 64) - 1, 1 << 31, 3 << 31, *sparse]


@pytest.mark.parametrize("path", _paths())
def test_slots_equal_the_reference(path: int) -> None:
    """The kernel finds the slot of every position for any of the 64 bits."""
    draft_start = 21
    end = draft_start + path.bit_count()
    positions = torch.arange(128, dtype=torch.int32).clamp(max=end - 1)
    masks = torch.tensor([path - (1 << 64) if path >> 63 else path])
    out = torch.empty_like(positions)
    _path_slots_kernel[(1,)](out, positions, masks, draft_start, COUNT=128)
    assert torch.equal(out, tree_paths_ref.path_slots(positions, draft_start, path))


@pytest.mark.parametrize("parents", [[], chain(64), star(9), comb(30), bushy(60, 1), bushy(33, 2)])
@pytest.mark.parametrize("confirmed", [0, 3])
def test_leaves_equal_the_reference(parents: list[int], confirmed: int) -> None:
    """The kernel finds the leaf of every row, also among confirmed tokens and padding."""
    masks = ([0] * confirmed + ancestors_of(parents))[:64]
    ancestors = torch.tensor(masks + [0] * (64 - len(masks)))
    real = torch.arange(64) < len(masks)
    out = torch.empty(64, dtype=torch.int64)
    _leaves_kernel[(1,)](out, ancestors, real.to(torch.int8), ROWS=64)
    assert torch.equal(out, tree_paths_ref.leaves_of_rows(ancestors, real))
