"""The kernels of a mixture of experts on a GPU: references, bits of a row, and capture."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from draftgate.backends.engine.kernels import (
    expert_routes,
    expert_routes_ref,
    grouped_product,
    grouped_product_ref,
)
from draftgate.backends.engine.kernels.grouped_product import TILE_ROWS
from tests.kernels.expert_cases import ExpertCase, expert_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET", "0") == "1",
        reason="needs a CUDA device and compiled kernels",
    ),
]

_MODELS = {"qwen": (128, 8, (1536, 2048)), "mixtral": (8, 2, (4096, 1024)), "odd": (5, 3, (67, 35))}


def _case(model: str, rows: int, dtype: torch.dtype, padding: int = 3) -> ExpertCase:
    experts, per_row, shape = _MODELS[model]
    case = expert_case(rows, experts, per_row, shape=shape, padding=padding, dtype=dtype)
    return case.on("cuda")


def _mixed(case: ExpertCase) -> torch.Tensor:
    routes = expert_routes.route(case.logits, case.per_row, case.live_rows, normalised=True)
    groups = expert_routes.group(routes.experts, case.num_experts, TILE_ROWS)
    results = grouped_product.grouped_product(case.x, case.weights, groups, case.per_row)
    return grouped_product.combine(results, groups.places, routes, case.num_experts)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows", [4, 200, 1500])
@pytest.mark.parametrize("model", _MODELS)
def test_mixture_equals_the_reference(
    model: str, rows: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Routes, groups and products equal those of torch, and padding is zero."""
    case = _case(model, rows, dtype)
    routes = expert_routes.route(case.logits, case.per_row, case.live_rows, normalised=True)
    expected = expert_routes_ref.route(case.logits, case.per_row, case.live_rows, normalised=True)
    torch.testing.assert_close(routes.shares, expected.shares, rtol=1e-5, atol=1e-7)
    assert torch.equal(routes.experts, expected.experts)
    groups = expert_routes_ref.group(expected.experts, case.num_experts, TILE_ROWS)
    found = expert_routes.group(routes.experts, case.num_experts, TILE_ROWS)
    assert all(map(torch.equal, found, groups))
    results = grouped_product_ref.grouped_product(case.x, case.weights, groups, case.per_row)
    wanted = grouped_product_ref.combine(results, groups.places, expected, case.num_experts)
    mixed = _mixed(case)
    torch.testing.assert_close(mixed, wanted, rtol=tolerance, atol=tolerance)
    assert not mixed[int(case.live_rows) :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", _MODELS)
def test_rows_of_a_mixture_do_not_depend_on_the_batch(model: str, dtype: torch.dtype) -> None:
    """A row has the same bits alone, in a decode and in a prompt."""
    case = _case(model, 700, dtype, padding=0)
    together = _mixed(case)
    for start, end in ((0, 1), (3, 4), (100, 164), (30, 577)):
        assert torch.equal(_mixed(case.rows(slice(start, end))), together[start:end])


def test_a_mixture_can_be_captured() -> None:
    """A graph gives the results of direct calls for other rows that choose other experts."""
    case = _case("qwen", 16, torch.bfloat16)
    _mixed(case)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _mixed(case)
    for logits in (case.logits.flip(0).clone(), torch.zeros_like(case.logits)):
        case.logits.copy_(logits)
        case.x.neg_()
        graph.replay()
        assert torch.equal(captured, _mixed(case))
