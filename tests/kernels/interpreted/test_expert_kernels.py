"""The kernels of a mixture of experts in the interpreter, compared with their references."""

from __future__ import annotations

import pytest
import torch

from draftgate.backends.engine.kernels import (
    expert_routes,
    expert_routes_ref,
    grouped_product,
    grouped_product_ref,
)
from draftgate.backends.engine.kernels.grouped_product import TILE_ROWS
from tests.kernels.expert_cases import ExpertCase, expert_case

CASES = {
    "few rows": expert_case(4, 8, 2),
    "one row": expert_case(1, 5, 3, padding=0),
    "one expert": expert_case(3, 1, 1),
    "more experts than pairs": expert_case(6, 70, 4),
    "several tiles of an expert": expert_case(150, 6, 2, skew=9.0),
    "only padding": expert_case(4, 8, 2, padding=4),
    "unusual widths": expert_case(20, 4, 2, shape=(67, 35)),
}


def mixed(case: ExpertCase, *, normalised: bool = True) -> torch.Tensor:
    """Return the results of a mixture of single products."""
    routes = expert_routes.route(case.logits, case.per_row, case.live_rows, normalised=normalised)
    groups = expert_routes.group(routes.experts, case.num_experts, TILE_ROWS)
    results = grouped_product.grouped_product(case.x, case.weights, groups, case.per_row)
    return grouped_product.combine(results, groups.places, routes, case.num_experts)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_routes_and_groups_equal_the_reference(case: ExpertCase, normalised: bool) -> None:
    """Rows choose the experts of the reference, also among equal ones, and have its groups."""
    arguments = (case.logits, case.per_row, case.live_rows)
    routes = expert_routes.route(*arguments, normalised=normalised)
    expected = expert_routes_ref.route(*arguments, normalised=normalised)
    assert torch.equal(routes.experts, expected.experts)
    torch.testing.assert_close(routes.shares, expected.shares, rtol=1e-5, atol=0)
    found = expert_routes.group(routes.experts, case.num_experts, 4)
    wanted = expert_routes_ref.group(routes.experts, case.num_experts, 4)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("rows", "experts"), [(0, 3), (1, 8), (1024, 1), (1025, 3), (2500, 130)])
def test_pairs_of_a_prompt_are_grouped(rows: int, experts: int) -> None:
    """Any number of pairs has the groups of the reference, also beyond the pairs that a program
    counts at once."""
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.randint(experts + 1, (rows, 1), dtype=torch.int32, generator=generator)
    found = expert_routes.group(chosen, experts, 64)
    for one, other in zip(found, expert_routes_ref.group(chosen, experts, 64), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_products_equal_the_reference(case: ExpertCase, dtype: torch.dtype) -> None:
    """Rows have the products with their experts, before and after a second product, and padding is
    zero."""
    case = case._replace(x=case.x.to(dtype), weights=case.weights.to(dtype))
    routes = expert_routes_ref.route(case.logits, case.per_row, case.live_rows, normalised=True)
    groups = expert_routes_ref.group(routes.experts, case.num_experts, TILE_ROWS)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    live = int(groups.starts[-1])
    x, per_row = case.x, case.per_row
    for weights in (case.weights, case.weights.transpose(1, 2).contiguous()):
        found = grouped_product.grouped_product(x, weights, groups, per_row)
        wanted = grouped_product_ref.grouped_product(x, weights, groups, per_row)
        torch.testing.assert_close(found[:live], wanted[:live], **close)
        x, per_row = wanted, None
    arguments = (x, groups.places, routes, case.num_experts)
    found = grouped_product.combine(*arguments)
    torch.testing.assert_close(found, grouped_product_ref.combine(*arguments), **close)
    assert not found[int(case.live_rows) :].any()


def test_rows_of_a_mixture_do_not_depend_on_each_other() -> None:
    """A row has the same bits alone, in a batch, and among rows that choose other experts."""
    case = expert_case(90, 5, 2, padding=0, skew=1.0)
    together = mixed(case)
    for row in (0, 1, 50, 89):
        assert torch.equal(mixed(case.rows(slice(row, row + 1)))[0], together[row])
    assert torch.equal(mixed(case.rows(slice(30, 77))), together[30:77])


def test_unsupported_arguments_are_rejected() -> None:
    """The kernels raise ValueError for a layout that they cannot read."""
    case = CASES["few rows"]
    with pytest.raises(ValueError, match="float32"):
        expert_routes.route(case.logits.double(), 2, case.live_rows, normalised=True)
    with pytest.raises(ValueError, match="9 of 8 experts"):
        expert_routes.route(case.logits, 9, case.live_rows, normalised=True)
    routes = expert_routes_ref.route(case.logits, 2, case.live_rows, normalised=True)
    with pytest.raises(ValueError, match="int32"):
        expert_routes.group(routes.experts.long(), 8, TILE_ROWS)
    groups = expert_routes_ref.group(routes.experts, 8, TILE_ROWS)
    with pytest.raises(ValueError, match="do not fit"):
        grouped_product.grouped_product(case.x[:, :9], case.weights, groups, 2)
    with pytest.raises(ValueError, match="do not have"):
        grouped_product.grouped_product(case.x, case.weights, groups, None)
    with pytest.raises(ValueError, match="contiguous rows"):
        grouped_product.grouped_product(
            case.x, case.weights.transpose(1, 2).contiguous().transpose(1, 2), groups, 2
        )
    with pytest.raises(ValueError, match="contiguous tensors"):
        grouped_product.combine(case.x.T, groups.places, routes, 8)
