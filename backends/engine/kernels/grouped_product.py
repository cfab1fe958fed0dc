"""The products of rows with the matrices of their experts in Triton, without a synchronisation.

``grouped_product_ref`` is the definition.

A program multiplies a tile of up to 64 rows of one expert with 64 outputs of its matrix. It finds
its expert by bisection in ``Groups.tiles``, and its rows in ``Groups.sources``. The grid is an
upper bound on the tiles that needs no counts on the host, so a graph can capture it. Programs
beyond the last tile return after one load.

Bits of a row. The sum of an output runs over the inputs in blocks of a fixed size, with the same
matrix instruction for any number of rows: a tile always has 64 rows, of which some may be masked.
``combine`` adds the results of a row in the order of its experts' probabilities. The bits of a row
therefore do not depend on the other rows, with or without `--exact`.

Order. Neighbouring programs have neighbouring tiles and the same outputs. Tiles of one expert
therefore share the read of its matrix, as a prompt has several tiles for each expert.

Bytes. A decode reads the matrices of its experts once. A row of Qwen3-30B-A3B in bfloat16 reads 8
experts of 9.4 MB in a layer, which take at least 16 us at 4.8 TB/s. A program computes 64 rows for
its one row, which take 6 us at 790 TFLOP/s.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftgate.backends.engine.kernels.expert_routes_ref import Groups, Routes
from draftgate.backends.engine.kernels.paged_attention_sizes import interpreting

TILE_ROWS: Final = 64
"""Rows of a tile, a part of the numerics class: the rows of a Hopper matrix instruction."""

_OUTPUTS: Final = 64
_INPUTS: Final = 64
_COMBINED: Final = 1024


def _launch_options(dtype: torch.dtype) -> dict[str, Any]:
    # A float32 product has no tensor cores, and its operands take many registers. With the default
    # limit, ptxas spills two of them for sm_100 (Triton 3.7, 2026-11-27).
    if dtype == torch.float32:
        return {"num_warps": 8, "num_stages": 2, "maxnreg": 128}
    return {"num_warps": 4, "num_stages": 4}


@triton.jit
def _grouped_product_kernel(
    out_ptr,
    x_ptr,
    weights_ptr,
    sources_ptr,
    starts_ptr,
    tiles_ptr,
    NUM_EXPERTS: tl.constexpr,
    STEPS: tl.constexpr,
    PER_ROW: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Write COLUMNS outputs of a tile. The grid is (tiles, blocks of outputs)."""
    tile = tl.program_id(0)
    if tile >= tl.load(tiles_ptr + NUM_EXPERTS):
        return
    # tiles[expert] <= tile < tiles[beyond]
    expert, beyond = tl.zeros((), tl.int32), tl.full((), NUM_EXPERTS, tl.int32)
    for _ in tl.static_range(STEPS):
        middle = (expert + beyond) // 2
        earlier = tl.load(tiles_ptr + middle) <= tile
        expert = tl.where(earlier, middle, expert)
        beyond = tl.where(earlier, beyond, middle)
    first = tl.load(starts_ptr + expert) + (tile - tl.load(tiles_ptr + expert)) * ROWS
    places = first + tl.arange(0, ROWS)
    live = places < tl.load(starts_ptr + expert + 1)
    rows = places
    if PER_ROW > 0:
        rows = tl.load(sources_ptr + places, mask=live, other=0) // PER_ROW
    outputs = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x_rows_ptr = x_ptr + rows.to(tl.int64)[:, None] * INPUTS
    matrix_ptr = weights_ptr + expert.to(tl.int64) * OUTPUTS * INPUTS
    matrix_rows_ptr = matrix_ptr + outputs.to(tl.int64)[:, None] * INPUTS
    inside = outputs < OUTPUTS
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for depth in range(0, INPUTS, DEPTH):
        inputs = depth + tl.arange(0, DEPTH)
        read = (inputs < INPUTS)[None, :]
        x = tl.load(x_rows_ptr + inputs[None, :], mask=live[:, None] & read, other=0.0)
        weight = tl.load(matrix_rows_ptr + inputs[None, :], mask=inside[:, None] & read, other=0.0)
        if UPCAST:
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        sums = tl.dot(x, tl.trans(weight), sums, input_precision="ieee")
    cells = places.to(tl.int64)[:, None] * OUTPUTS + outputs[None, :]
    tl.store(out_ptr + cells, sums, mask=live[:, None] & inside[None, :])


@triton.jit
def _combine_kernel(
    out_ptr,
    results_ptr,
    places_ptr,
    experts_ptr,
    shares_ptr,
    NUM_EXPERTS: tl.constexpr,
    PER_ROW: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write COLUMNS outputs of a row. The grid is (rows, blocks of outputs)."""
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = outputs < OUTPUTS
    total = tl.zeros((COLUMNS,), tl.float32)
    for rank in tl.static_range(PER_ROW):
        pair = row * PER_ROW + rank
        live = tl.load(experts_ptr + pair) < NUM_EXPERTS
        place = tl.load(places_ptr + pair).to(tl.int64)
        result = tl.load(results_ptr + place * OUTPUTS + outputs, mask=inside & live, other=0.0)
        total += result.to(tl.float32) * tl.load(shares_ptr + pair)
    tl.store(out_ptr + row * OUTPUTS + outputs, total, mask=inside)


def grouped_product(x: Tensor, weights: Tensor, groups: Groups, per_row: int | None) -> Tensor:
    """Multiply as ``grouped_product_ref.grouped_product`` does, without a device synchronisation.

    Args:
      x: float32, float16 or bfloat16 ``[rows, inputs]``, or ``[pairs, inputs]`` in the order of
        experts, contiguous.
      weights: ``[num_experts, outputs, inputs]`` in the dtype of x, contiguous.
      groups: the pairs by expert, in tiles of ``TILE_ROWS``.
      per_row: pairs of a row of x, or None if x is in the order of experts.

    Returns:
      ``[pairs, outputs]`` in the order of experts, in the dtype of x. Places of padding are
      undefined.

    Raises:
      ValueError: a tensor has another shape, dtype or layout.
    """
    num_experts, outputs, inputs = weights.shape
    pairs = len(groups.sources)
    if x.shape[1] != inputs or x.dtype != weights.dtype:
        raise ValueError(f"rows of {x.shape[1]} {x.dtype} do not fit matrices of {inputs} inputs")
    if x.shape[0] * (per_row or 1) != pairs:
        raise ValueError(f"{x.shape[0]} rows do not have {pairs} pairs")
    if not (x.is_contiguous() and weights.is_contiguous()):
        raise ValueError("the grouped product needs contiguous rows and matrices")
    out = torch.empty((pairs, outputs), dtype=x.dtype, device=x.device)
    # Each expert with pairs has at most one tile that is not full.
    tiles = min(num_experts, pairs) + pairs // TILE_ROWS
    if pairs:
        _grouped_product_kernel[(tiles, triton.cdiv(outputs, _OUTPUTS))](
            out,
            x,
            weights,
            groups.sources,
            groups.starts,
            groups.tiles,
            NUM_EXPERTS=num_experts,
            STEPS=num_experts.bit_length(),
            PER_ROW=per_row or 0,
            OUTPUTS=outputs,
            INPUTS=inputs,
            ROWS=TILE_ROWS,
            COLUMNS=_OUTPUTS,
            DEPTH=_INPUTS if x.dtype != torch.float32 else _INPUTS // 2,
            UPCAST=interpreting(),
            **_launch_options(x.dtype),
        )
    return out


def combine(results: Tensor, places: Tensor, routes: Routes, num_experts: int) -> Tensor:
    """Combine as ``grouped_product_ref.combine`` does, without a device synchronisation.

    Args:
      results: ``[pairs, outputs]`` in the order of experts, contiguous.
      places: int32 ``[pairs]``, contiguous.
      routes: the experts of each row, and their shares, contiguous.
      num_experts: number of experts, which marks rows of padding.

    Returns:
      ``[rows, outputs]`` in the dtype of the results.

    Raises:
      ValueError: a tensor is not contiguous.
    """
    if not all(tensor.is_contiguous() for tensor in (results, places, *routes)):
        raise ValueError("combine needs contiguous tensors")
    (rows, per_row), outputs = routes.experts.shape, results.shape[1]
    out = torch.empty((rows, outputs), dtype=results.dtype, device=results.device)
    if rows:
        _combine_kernel[(rows, triton.cdiv(outputs, _COMBINED))](
            out,
            results,
            places,
            *routes,
            NUM_EXPERTS=num_experts,
            PER_ROW=per_row,
            OUTPUTS=outputs,
            COLUMNS=_COMBINED,
            num_warps=4,
        )
    return out
