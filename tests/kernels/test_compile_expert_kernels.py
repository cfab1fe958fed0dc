"""The kernels of a mixture of experts, compiled for GPUs without a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from draftgate.backends.engine.kernels.expert_routes import group, route
from draftgate.backends.engine.kernels.expert_routes_ref import Groups, Routes
from draftgate.backends.engine.kernels.grouped_product import TILE_ROWS, combine, grouped_product
from tests.kernels.compiling import BLACKWELL, HOPPER, assert_lean, launches_of, meta_tensor

_ROWS = 320
# Experts, experts of a row, hidden size and inner width of Qwen3-30B-A3B and Mixtral-8x7B.
_MODELS = [(128, 8, 2048, 768), (8, 2, 4096, 14336)]


@pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=["sm_90", "sm_100"])
@pytest.mark.parametrize(("experts", "per_row"), [model[:2] for model in _MODELS])
def test_routes_and_groups_do_not_spill(experts: int, per_row: int, target: GPUTarget) -> None:
    """The choice of experts and the grouping of their rows fit the registers."""
    index = torch.int32
    logits, live_rows = meta_tensor(_ROWS, experts), meta_tensor(1, dtype=index)
    routed = partial(route, logits, per_row, live_rows, normalised=True)
    assert_lean(launches_of(routed, target), 8)
    chosen = meta_tensor(_ROWS, per_row, dtype=index)
    assert_lean(launches_of(partial(group, chosen, experts, TILE_ROWS), target), 2)


@pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=["sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("experts", "per_row", "hidden", "width"), _MODELS)
def test_products_of_experts_do_not_spill(
    experts: int, per_row: int, hidden: int, width: int, dtype: torch.dtype, target: GPUTarget
) -> None:
    """Both products and the sum of a row's experts fit the registers.

    Two programs of a product in 16 bits share a multiprocessor.
    """
    pairs, index = _ROWS * per_row, torch.int32
    ends = meta_tensor(experts + 1, dtype=index)
    groups = Groups(meta_tensor(pairs, dtype=index), meta_tensor(pairs, dtype=index), ends, ends)
    programs = 2 if dtype is torch.bfloat16 else 1
    x, gate_up = meta_tensor(_ROWS, hidden, dtype=dtype), (experts, 2 * width, hidden)
    inner, down = meta_tensor(pairs, width, dtype=dtype), (experts, hidden, width)
    for rows, shape, of_row in ((x, gate_up, per_row), (inner, down, None)):
        weights = meta_tensor(*shape, dtype=dtype)
        product = partial(grouped_product, rows, weights, groups, of_row)
        (launch,) = launches_of(product, target)
        assert_lean([launch], programs)
        if dtype is torch.bfloat16:  # the tensor cores of each GPU
            assert ("wgmma" if target is HOPPER else "tcgen05") in launch.ptx
    routes = Routes(meta_tensor(_ROWS, per_row, dtype=index), meta_tensor(_ROWS, per_row))
    results = meta_tensor(pairs, hidden, dtype=dtype)
    combined = partial(combine, results, groups.places, routes, experts)
    assert_lean(launches_of(combined, target), 4)
