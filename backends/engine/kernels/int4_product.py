"""Products of rows with weights of 4 bits in Triton. ``int4_product_ref`` is the definition.

A program has a tile of rows and outputs. A step multiplies the inputs of one group, or a part of
them, with the numbers less their zeros. These are whole numbers up to 15, exact in every dtype.
float32 registers add the sums of the steps, times the scale of the group, so a weight is never
rounded.

Bits of a row. The steps of a program do not depend on the other rows. The tile depends on their
number, and an instruction for another tile may add in another order. With `exact`, every number of
rows has the same tile.

Bytes. A product of few rows reads its weight once: half a byte per weight, and 3 per group and
output. A weight of 28672 x 4096 with groups of 128 takes at least 13 us at 4.8 TB/s.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftgate.backends.engine.kernels.paged_attention_sizes import interpreting
from draftgate.backends.engine.kernels.product_tiles import ProductTiles, tiles_for

_EXACT: Final = (ProductTiles(64, 32, 128, num_warps=4, num_stages=4),)
_VARIANTS: Final = (
    ProductTiles(16, 32, 128, num_warps=4, num_stages=8),
    *_EXACT,
    ProductTiles(128, 128, 128, num_warps=8, num_stages=3),
)
"""Tiles by ascending rows.

Llama-8B has weights of 4096 outputs, which have 128 tiles of 32 outputs, one for nearly each of 132
multiprocessors. For each weight, a thread executes 6 instructions with 16 rows, 8 with 64 and 8
with 128 (sm_90, Triton 3.7, 2026-11-27), so instructions and not bytes limit a product of few rows.
The sizes are not timed on a GPU.
"""

_FLOAT32: Final = (ProductTiles(16, 32, 32, num_warps=4, num_stages=3),)
"""The tile of float32 rows, whose products have no tensor cores."""

_LEAST_DEPTH: Final = 16
"""Inputs of a matrix instruction in 16 bits."""

_WORD: Final = tl.constexpr(8)
"""Numbers of a word of 32 bits."""


@triton.jit
def _less_zeros(
    words, zeros, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, DTYPE: tl.constexpr, OUT: tl.constexpr
):
    """Return the numbers of words less their zeros, ``[COLUMNS, DEPTH]``.

    In 16 bits, two numbers of a word become floats at once: as the lowest bits of 128 (bfloat16) or
    1024 (float16), which the zeros have as well.
    """
    if DTYPE.is_fp32():
        numbers = words[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :] & 15
        floats, zeros = tl.reshape(numbers, (COLUMNS, DEPTH)).to(DTYPE), zeros.to(DTYPE)
    else:
        ONE: tl.constexpr = 0x4300 if DTYPE.is_bf16() else 0x6400
        TWO: tl.constexpr = ONE * 0x10001
        # The lower bits of pair i have number i of a word, and the upper bits number 4 + i.
        first, second = words & 0xF000F | TWO, words >> 4 & 0xF000F | TWO
        third, fourth = words >> 8 & 0xF000F | TWO, words >> 12 & 0xF000F | TWO
        pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
        lower = pairs.to(tl.int16).to(DTYPE, bitcast=True)
        upper = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        floats = tl.reshape(tl.permute(tl.join(lower, upper), (0, 1, 4, 2, 3)), (COLUMNS, DEPTH))
        zeros = (zeros.to(tl.int16) | ONE).to(DTYPE, bitcast=True)
    return floats.to(OUT) - zeros.to(OUT)[:, None]


@triton.jit(do_not_specialize=["rows"])
def _int4_product_kernel(
    out_ptr,
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
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
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, inside = own < rows, outputs < OUTPUTS
    x_rows_ptr = x_ptr + own.to(tl.int64)[:, None] * INPUTS
    words_rows_ptr = words_ptr + outputs.to(tl.int64)[:, None] * (INPUTS // _WORD)
    of_groups = outputs.to(tl.int64) * GROUPS
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(GROUPS * STEPS):
        group = step // STEPS
        within = step % STEPS * DEPTH + tl.arange(0, DEPTH)
        inputs = group * GROUP + within
        read = ((within < GROUP) & (inputs < INPUTS))[None, :]
        x = tl.load(x_rows_ptr + inputs[None, :], mask=live[:, None] & read, other=0.0)
        # The words after a group are those of the next one, whose x is 0 here.
        places = group * (GROUP // _WORD) + step % STEPS * (DEPTH // _WORD)
        places += tl.arange(0, DEPTH // _WORD)
        words = tl.load(
            words_rows_ptr + places[None, :],
            mask=inside[:, None] & (places < INPUTS // _WORD)[None, :],
            other=0,
        )
        scales = tl.load(scales_ptr + of_groups + group, mask=inside, other=0.0).to(tl.float32)
        zeros = tl.load(zeros_ptr + of_groups + group, mask=inside, other=0)
        dtype: tl.constexpr = tl.float32 if UPCAST else x.dtype
        weight = _less_zeros(words, zeros, COLUMNS, DEPTH, x.dtype, dtype)
        product = tl.dot(x.to(dtype), tl.trans(weight), input_precision="ieee")
        sums += product * scales[None, :]
    if BIASED:
        sums += tl.load(bias_ptr + outputs, mask=inside, other=0.0)[None, :]
    cells = own.to(tl.int64)[:, None] * OUTPUTS + outputs[None, :]
    tl.store(out_ptr + cells, sums, mask=live[:, None] & inside[None, :])


def int4_product(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor,
    group: int,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    exact: bool = False,
) -> Tensor:
    """Multiply as ``int4_product_ref.int4_product`` does, without a device synchronisation.

    Args:
      x: float32, float16 or bfloat16 ``[rows, inputs]``, contiguous as all other tensors.
      packed: uint8 ``[outputs, inputs / 2]``, the even inputs in the lower bits.
      scales: ``[outputs, groups]`` of any floating-point dtype.
      zeros: uint8 ``[outputs, groups]``.
      group: inputs of a group, a multiple of 8 as the inputs are.
      bias: float32 ``[outputs]``, or None.
      dtype: dtype of the result.
      exact: whether the bits of a row must not depend on the number of rows.

    Returns:
      ``[rows, outputs]``.

    Raises:
      ValueError: a tensor has another shape or layout.
    """
    (rows, inputs), (outputs, groups) = x.shape, scales.shape
    if packed.shape != (outputs, inputs // 2) or zeros.shape != scales.shape:
        raise ValueError(
            f"a weight of {tuple(packed.shape)}, scales of {tuple(scales.shape)} and zeros of "
            f"{tuple(zeros.shape)} do not fit {inputs} inputs"
        )
    if groups != triton.cdiv(inputs, group):
        raise ValueError(f"{inputs} inputs do not have {groups} groups of {group}")
    if inputs % _WORD.value or group % _WORD.value:
        raise ValueError(f"{inputs} inputs in groups of {group} do not fill words of 8 weights")
    if not all(t.is_contiguous() for t in (x, packed, scales, zeros)):
        raise ValueError("the product with 4 bits needs contiguous tensors")
    out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    variants = _EXACT if exact else _VARIANTS
    if x.dtype == torch.float32:
        variants = _FLOAT32
    tiles = tiles_for(rows, variants, group, _LEAST_DEPTH)
    if rows:
        _int4_product_kernel[(triton.cdiv(rows, tiles.rows), triton.cdiv(outputs, tiles.columns))](
            out,
            x,
            packed.view(torch.int32),
            scales,
            zeros,
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
