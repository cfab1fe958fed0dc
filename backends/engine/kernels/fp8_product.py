"""Rows rounded to FP8 (E4M3), and their products with weights in FP8, in Triton.

``quantisation.e4m3.fp8_rows`` and ``fp8_product_ref.fp8_product`` are the definitions.

``fp8_rows`` has a program for a few groups of a row. It rounds with integers, to the nearest number
and from the middle to the even one, so that the interpreter has the bits of a GPU.

``fp8_product`` has a program for a tile of rows and outputs. A step multiplies the inputs of one
group, or a part of them. Tensor cores add the products of a step. Their sums lose bits after some
hundred products (DeepSeek-V3, arXiv 2412.19437, section 3.3.2), so float32 registers add the sums
of the steps, times the scales. A scale per row and output is a group of all inputs, whose scales
multiply the sum once.

Bits of a row. The steps of a program do not depend on the other rows. The tile depends on their
number, and an instruction for another tile may add in another order. With `exact`, every number of
rows has the same tile.

Bytes. A product of few rows reads its weight once: 1 byte per weight, and 4 per group and output. A
weight of 28672 x 4096 with groups of 128 takes at least 25 us at 4.8 TB/s.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftgate.backends.engine.kernels.paged_attention_sizes import interpreting
from draftgate.backends.engine.kernels.product_tiles import ProductTiles, tiles_for
from draftgate.backends.engine.quantisation.e4m3 import E4M3_MAX, SMALLEST

_EXACT: Final = (ProductTiles(64, 32, 128, num_warps=4, num_stages=5),)
_VARIANTS: Final = (*_EXACT, ProductTiles(128, 128, 128, num_warps=8, num_stages=3))
"""Tiles by ascending rows.

Llama-8B has weights of 4096 outputs, which have 128 tiles of 32 outputs, one for nearly each of 132
multiprocessors. The stages of a program keep 16 KiB of a weight in flight, and three programs share
a multiprocessor. 4.8 TB/s take 22 KiB with a latency of 0.6 us. Fewer rows than 64 would not save
time, because Triton multiplies them in float16 and converts every weight. The sizes are not timed
on a GPU (Triton 3.7, 2026-11-27).
"""

_LEAST_DEPTH: Final = 32
"""Inputs of a matrix instruction in FP8."""

_ROUNDED: Final = 1024
"""Minimum number of values that a program of ``fp8_rows`` rounds."""

_MAX: Final = tl.constexpr(E4M3_MAX)
_SMALLEST: Final = tl.constexpr(SMALLEST)


@triton.jit
def e4m3(x):
    """Return the E4M3 codes of float32 numbers as uint8, as ``quantisation.e4m3.fp8`` does.

    Triton's conversion does the same on a GPU, but rounds otherwise in the interpreter. The integer
    arithmetic has the same bits in both.
    """
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    # 20 of 23 bits of the mantissa are rounded away, and the bias of the exponent is lower by 120.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # The unit in the last place of 2^14 is 2^-9, that of the subnormal numbers.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return (tl.where(bits < 121 << 23, subnormal, normal) | sign).to(tl.uint8)


@triton.jit
def _fp8_rows_kernel(
    codes_ptr,
    scales_ptr,
    x_ptr,
    fixed_scale,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    FIXED: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP_PAD: tl.constexpr,
):
    """Write BLOCK groups of a row. The grid is (rows, blocks of groups)."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = tl.arange(0, GROUP_PAD)[None, :]
    columns = groups[:, None] * GROUP + within
    inside = (within < GROUP) & (columns < WIDTH)
    x = tl.load(x_ptr + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    if FIXED:
        scales = tl.zeros((BLOCK,), tl.float32) + fixed_scale
    else:
        largest = tl.max(tl.abs(x), axis=1)
        scales = tl.div_rn(tl.maximum(largest, _SMALLEST), tl.zeros_like(largest) + _MAX)
    scaled = tl.div_rn(x, tl.zeros_like(x) + scales[:, None])
    tl.store(codes_ptr + row * WIDTH + columns, e4m3(scaled), mask=inside)
    tl.store(scales_ptr + row * GROUPS + groups, scales, mask=groups < GROUPS)


@triton.jit(do_not_specialize=["rows"])
def _fp8_product_kernel(
    out_ptr,
    codes_ptr,
    row_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    STEPS: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Write COLUMNS outputs of ROWS rows. The grid is (tiles of rows, tiles of outputs)."""
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, inside = places < rows, outputs < OUTPUTS
    codes_rows_ptr = codes_ptr + places.to(tl.int64)[:, None] * INPUTS
    weight_rows_ptr = weight_ptr + outputs.to(tl.int64)[:, None] * INPUTS
    row_scales_ptr += places.to(tl.int64) * GROUPS
    scales_ptr += outputs.to(tl.int64) * GROUPS
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(GROUPS * STEPS):
        group = step // STEPS
        within = step % STEPS * DEPTH + tl.arange(0, DEPTH)
        inputs = group * GROUP + within
        read = ((within < GROUP) & (inputs < INPUTS))[None, :]
        codes = tl.load(codes_rows_ptr + inputs[None, :], mask=live[:, None] & read, other=0.0)
        weight = tl.load(weight_rows_ptr + inputs[None, :], mask=inside[:, None] & read, other=0.0)
        if UPCAST:
            codes, weight = codes.to(tl.float32), weight.to(tl.float32)
        if GROUPS > 1:
            row_scales = tl.load(row_scales_ptr + group, mask=live, other=0.0)
            scales = tl.load(scales_ptr + group, mask=inside, other=0.0)
            product = tl.dot(codes, tl.trans(weight), input_precision="ieee")
            sums += product * (row_scales[:, None] * scales[None, :])
        else:
            sums = tl.dot(
                codes,
                tl.trans(weight),
                sums,
                input_precision="ieee",
                max_num_imprecise_acc=DEPTH,
            )
    if GROUPS == 1:
        row_scales = tl.load(row_scales_ptr, mask=live, other=0.0)
        sums *= row_scales[:, None] * tl.load(scales_ptr, mask=inside, other=0.0)[None, :]
    if BIASED:
        sums += tl.load(bias_ptr + outputs, mask=inside, other=0.0)[None, :]
    cells = places.to(tl.int64)[:, None] * OUTPUTS + outputs[None, :]
    tl.store(out_ptr + cells, sums, mask=live[:, None] & inside[None, :])


def fp8_rows(x: Tensor, group: int, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Round rows as ``e4m3.fp8_rows`` does, without a device synchronisation.

    Args:
      x: ``[rows, width]`` of any floating-point dtype, contiguous.
      group: columns that share a scale.
      scale: the scale of all numbers, or None for a scale per row and group.

    Returns:
      E4M3 ``[rows, width]`` and float32 scales ``[rows, groups]``.

    Raises:
      ValueError: the rows are not contiguous.
    """
    if not x.is_contiguous():
        raise ValueError("the rounding to FP8 needs contiguous rows")
    rows, width = x.shape
    groups = triton.cdiv(width, group)
    codes = torch.empty((rows, width), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(group)
    block = min(triton.next_power_of_2(groups), max(1, _ROUNDED // padded))
    if rows:
        _fp8_rows_kernel[(rows, triton.cdiv(groups, block))](
            codes,
            scales,
            x,
            scale or 0.0,
            WIDTH=width,
            GROUP=group,
            GROUPS=groups,
            FIXED=scale is not None,
            BLOCK=block,
            GROUP_PAD=padded,
            num_warps=4 if block * padded <= 4096 else 16,
        )
    return codes.view(torch.float8_e4m3fn), scales


def fp8_product(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    group: int,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    exact: bool = False,
) -> Tensor:
    """Multiply as ``fp8_product_ref.fp8_product`` does, without a device synchronisation.

    Args:
      codes: E4M3 ``[rows, inputs]``, contiguous as all other tensors.
      row_scales: float32 ``[rows, groups]``.
      weight: E4M3 ``[outputs, inputs]``.
      scales: float32 ``[outputs, groups]``.
      group: inputs of a group.
      bias: float32 ``[outputs]``, or None.
      dtype: dtype of the result.
      exact: whether the bits of a row must not depend on the number of rows.

    Returns:
      ``[rows, outputs]``.

    Raises:
      ValueError: a tensor has another shape or layout.
    """
    (rows, inputs), (outputs, groups) = codes.shape, scales.shape
    if weight.shape != (outputs, inputs) or row_scales.shape != (rows, groups):
        raise ValueError(
            f"a weight of {tuple(weight.shape)} and scales of {tuple(scales.shape)} and "
            f"{tuple(row_scales.shape)} do not fit {rows} rows of {inputs} inputs"
        )
    if groups != triton.cdiv(inputs, group):
        raise ValueError(f"{inputs} inputs do not have {groups} groups of {group}")
    if not all(t.is_contiguous() for t in (codes, row_scales, weight, scales)):
        raise ValueError("the FP8 product needs contiguous tensors")
    out = torch.empty((rows, outputs), dtype=dtype, device=codes.device)
    tiles = tiles_for(rows, _EXACT if exact else _VARIANTS, group, _LEAST_DEPTH)
    if rows:
        _fp8_product_kernel[(triton.cdiv(rows, tiles.rows), triton.cdiv(outputs, tiles.columns))](
            out,
            codes,
            row_scales,
            weight,
            scales,
            scales if bias is None else bias,
            rows,
            OUTPUTS=outputs,
            INPUTS=inputs,
            GROUP=group,
            GROUPS=groups,
            STEPS=triton.cdiv(group, tiles.depth),
            BIASED=bias is not None,
            ROWS=tiles.rows,
            COLUMNS=tiles.columns,
            DEPTH=tiles.depth,
            UPCAST=interpreting(),
            **tiles.options(),
        )
    return out
