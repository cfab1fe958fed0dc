"""Merge of the softmaxes of key splits in Triton. ``merge_splits_ref`` is the definition.

``add_split`` merges the splits of a pair that one program attends, and ``merge_splits`` those of
several programs. Both use ``merge`` and ``normalise`` and add splits in order, so both give the
same bits. A split of which a row sees no key changes no bit of its sums.

A row (token x query head) reads 4 * (head_dim + 2) bytes per split of its block, and writes
head_dim * element size bytes. For 32 heads of 128 and 8 splits, a token reads 133 kB. Attention has
just written these bytes, so most of them are in the second-level cache. The program of a row
without partial results reads its number of splits and returns.

Source: T. Dao et al., "Flash-Decoding for long-context inference" (2023).
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from draftgate.backends.engine.kernels import paged_attention_sizes as sizes

_UNROLLED: Final = tl.constexpr(8)
"""Splits whose loads are in flight together. At 32k tokens, a row has 64 splits."""


@triton.jit
def no_keys(ROWS: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Return the softmax over no keys: (largest score, sum of weights, weighted values)."""
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    return largest, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, HEAD_PAD], tl.float32)


@triton.jit
def merge(sum_largest, sum_total, sum_weighted, largest, total, weighted):
    """Merge a split into the sums of the splits before it, which start as ``no_keys``.

    The shapes are [rows], [rows], [rows, HEAD_PAD], twice. The fused multiply-adds are explicit,
    because the compiler could otherwise round different products in the two callers.
    """
    higher = tl.maximum(sum_largest, largest)
    # A row that has seen no key yet has no largest score to subtract.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    keep = tl.exp2(sum_largest - base)
    add = tl.exp2(largest - base)
    sum_total = tl.fma(total, add, sum_total * keep)
    spread = tl.broadcast_to(add[:, None], weighted.shape)
    return higher, sum_total, tl.fma(weighted, spread, sum_weighted * keep[:, None])


@triton.jit
def normalise(weighted, total):
    """Divide weighted values [rows, HEAD_PAD] by the sums of their weights [rows]."""
    # The kernel never stores rows that see no key. The divisor 1 keeps them finite.
    total = tl.where(total > 0, total, 1.0)
    return tl.div_rn(weighted, tl.broadcast_to(total[:, None], weighted.shape))


@triton.jit
def store_rows(ptr, rows, values, stored, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Write [ROWS, HEAD_PAD] values to rows (int64) of HEAD_DIM."""
    dims = tl.arange(0, HEAD_PAD)
    mask = stored[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(ptr + rows[:, None] * HEAD_DIM + dims[None, :], values, mask=mask)


@triton.jit
def add_split(
    out_ptr,
    out_row,
    stored,
    scratch_ptr,
    stats_ptr,
    rows,
    first_row,
    is_first,
    is_last,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add a split to the sums of rows, and write rows ``out_row`` of the output after the last one.

    The split is in rows ``first_row .. first_row + ROWS - 1`` of the scratch, and the sums are in
    the ROWS rows after them. ``rows`` are the numbers 0 .. ROWS - 1.
    """
    COLUMNS: tl.constexpr = min(HEAD_PAD, 64)
    added = stored & (is_first == 0)
    scratch_ptr += first_row * HEAD_DIM
    stats_ptr += (first_row + rows) * 2
    # Threads load what other threads of the program have stored.
    tl.debug_barrier()
    largest = tl.load(stats_ptr, mask=stored, other=float("-inf"))
    total = tl.load(stats_ptr + 1, mask=stored, other=0.0)
    sum_largest = tl.load(stats_ptr + 2 * ROWS, mask=added, other=float("-inf"))
    sum_total = tl.load(stats_ptr + 2 * ROWS + 1, mask=added, other=0.0)
    tl.debug_barrier()
    # All columns of the sums and of the split do not fit into the registers.
    for first in tl.range(0, HEAD_PAD, COLUMNS, disable_licm=True):
        dims = first + tl.arange(0, COLUMNS)
        inside = (dims < HEAD_DIM)[None, :]
        cells = scratch_ptr + (rows[:, None] * HEAD_DIM + dims[None, :])
        sum_cells = cells + ROWS * HEAD_DIM
        sums = tl.load(sum_cells, mask=added[:, None] & inside, other=0.0)
        weighted = tl.load(cells, mask=stored[:, None] & inside, other=0.0)
        new_largest, new_total, merged = merge(
            sum_largest, sum_total, sums, largest, total, weighted
        )
        if is_last:
            result_ptr = out_ptr + out_row[:, None] * HEAD_DIM + dims[None, :]
            tl.store(result_ptr, normalise(merged, new_total), mask=stored[:, None] & inside)
        else:
            tl.store(sum_cells, merged, mask=stored[:, None] & inside)
            if first == 0:
                tl.store(stats_ptr + 2 * ROWS, new_largest, mask=stored)
                tl.store(stats_ptr + 2 * ROWS + 1, new_total, mask=stored)
    # The next split replaces this one.
    tl.debug_barrier()


@triton.jit
def _merge_kernel(
    out_ptr,
    weighted_ptr,
    stats_ptr,
    partials_ptr,
    num_query_heads,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    """Merge the splits of a row in order, if it has any. The grid is (tokens, query heads)."""
    token = tl.program_id(0)
    splits = tl.load(partials_ptr + token * 2 + 1)
    if splits == 0:
        return
    first_slot = tl.load(partials_ptr + token * 2)
    head = tl.program_id(1)
    dims = tl.arange(0, HEAD_PAD)
    mask = (dims < HEAD_DIM)[None, :]
    sum_largest, sum_total, sum_weighted = no_keys(1, HEAD_PAD)
    # The sums form one chain, but the loads of several splits need not wait for it.
    for split in tl.range(0, splits, loop_unroll_factor=_UNROLLED):
        slot = (first_slot + split).to(tl.int64) * num_query_heads + head + tl.arange(0, 1)
        largest = tl.load(stats_ptr + slot * 2)
        total = tl.load(stats_ptr + slot * 2 + 1)
        values = weighted_ptr + slot[:, None] * HEAD_DIM + dims[None, :]
        weighted = tl.load(values, mask=mask, other=0.0)
        sum_largest, sum_total, sum_weighted = merge(
            sum_largest, sum_total, sum_weighted, largest, total, weighted
        )
    rows = token.to(tl.int64) * num_query_heads + head + tl.arange(0, 1)
    result = normalise(sum_weighted, sum_total)
    store_rows(out_ptr, rows, result, rows >= 0, HEAD_DIM, HEAD_PAD)


def merge_splits(out: Tensor, weighted: Tensor, stats: Tensor, partials: Tensor) -> Tensor:
    """Merge as ``merge_splits_ref.merge_splits`` does, without a device synchronisation.

    Args:
      out: ``[tokens, query_heads, head_dim]``, contiguous.
      weighted: float32 ``[slots, query_heads, head_dim]``, contiguous.
      stats: float32 ``[slots, query_heads, 2]``, contiguous.
      partials: int32 ``[tokens, 2]``, contiguous, the first slot of a token and its splits.

    Returns:
      ``out``.
    """
    tokens, query_heads, head_dim = out.shape
    _merge_kernel[(tokens, query_heads)](
        out, weighted, stats, partials, query_heads,
        HEAD_DIM=head_dim, HEAD_PAD=sizes.padded_head(head_dim), num_warps=1,
    )  # fmt: skip
    return out
