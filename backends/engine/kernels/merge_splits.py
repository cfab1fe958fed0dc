"""Merge of the softmaxes of key splits in Triton. ``merge_splits_ref`` is the definition.

Attention that loops over its splits also uses ``merge`` and ``normalise``, so both ways give the
same bits. Both add splits in order, from the first split that the row sees, so the bits do not
depend on the other splits.

A row (token x query head) reads 4 * (head_dim + 2) bytes per visible split, and writes head_dim *
element size bytes. For 32 heads of 128 and 8 splits, a token reads 133 kB. Attention has just
written these bytes, so most of them are in the second-level cache.

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
def find_sequence(cu_ptr, target, num_sequences, BLOCK_Q: tl.constexpr):
    """Return the last sequence s whose first query block (``cu[s] // BLOCK_Q + s``) <= target.

    With BLOCK_Q = 0, the target is a query token, and the function compares it with ``cu[s]``.
    """
    low = num_sequences * 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        begin = tl.load(cu_ptr + middle)
        if BLOCK_Q > 0:
            begin = begin // BLOCK_Q + middle
        low = tl.where(begin <= target, middle, low)
        high = tl.where(begin <= target, high, middle)
    return low


@triton.jit
def block_rows(cu_query_lens_ptr, sequence, BLOCK_Q: tl.constexpr):
    """Return the sequence's first token, its number of tokens, and the program's first token.

    Blocks after the last block of a sequence begin beyond its tokens.
    """
    # The load is volatile to load the values again in each call. Both the start and the end of the
    # kernel need the values, which would hold registers in between.
    begin = tl.load(cu_query_lens_ptr + sequence, volatile=True)
    query_len = tl.load(cu_query_lens_ptr + sequence + 1, volatile=True) - begin
    first_query = (tl.program_id(0) - begin // BLOCK_Q - sequence) * BLOCK_Q
    return begin, query_len, first_query


@triton.jit
def first_visible(position, KEY_TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Return the start of the tile that holds the first key visible from a position."""
    return tl.maximum(position - WINDOW + 1, 0) // KEY_TILE * KEY_TILE if WINDOW > 0 else 0


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


@triton.jit(do_not_specialize=["num_sequences", "num_splits"])
def _merge_kernel(
    out_ptr,
    weighted_ptr,
    stats_ptr,
    cu_query_lens_ptr,
    context_lens_ptr,
    positions_ptr,
    num_sequences,
    num_splits,
    num_query_heads,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    TREES: tl.constexpr,
):
    """Merge the splits that the row sees, in order. The grid is (tokens, query heads)."""
    token = tl.program_id(0)
    sequence = find_sequence(cu_query_lens_ptr, token, num_sequences, 0)
    end = tl.load(cu_query_lens_ptr + sequence + 1)
    if token >= end:
        return
    position = tl.load(context_lens_ptr + sequence) - end + token
    if TREES:
        position = tl.load(positions_ptr + token).to(tl.int32)
    first_split = 0
    if WINDOW > 0:
        first_split = tl.maximum(position - WINDOW + 1, 0) // SPLIT
    dims = tl.arange(0, HEAD_PAD)
    row = token.to(tl.int64) * num_query_heads + tl.program_id(1)
    mask = (dims < HEAD_DIM)[None, :]
    sum_largest, sum_total, sum_weighted = no_keys(1, HEAD_PAD)
    # The sums form one chain, but the loads of several splits need not wait for it.
    for split in tl.range(first_split, position // SPLIT + 1, loop_unroll_factor=_UNROLLED):
        slot = row * num_splits + split + tl.arange(0, 1)
        largest = tl.load(stats_ptr + slot * 2)
        total = tl.load(stats_ptr + slot * 2 + 1)
        values = weighted_ptr + slot[:, None] * HEAD_DIM + dims[None, :]
        weighted = tl.load(values, mask=mask, other=0.0)
        sum_largest, sum_total, sum_weighted = merge(
            sum_largest, sum_total, sum_weighted, largest, total, weighted
        )
    rows = row + tl.arange(0, 1)
    result = normalise(sum_weighted, sum_total)
    store_rows(out_ptr, rows, result, rows >= 0, HEAD_DIM, HEAD_PAD)


def merge_splits(
    out: Tensor,
    weighted: Tensor,
    stats: Tensor,
    cu_query_lens: Tensor,
    context_lens: Tensor,
    positions: Tensor | None = None,
    *,
    window: int | None = None,
    split_size: int = sizes.SPLIT_SIZE,
) -> Tensor:
    """Merge as ``merge_splits_ref.merge_splits`` does, without a device synchronisation.

    Args:
      out: ``[tokens, query_heads, head_dim]``, contiguous.
      weighted: float32 ``[tokens, query_heads, num_splits, head_dim]``, contiguous.
      stats: float32 ``[tokens, query_heads, num_splits, 2]``, contiguous.
      cu_query_lens: int32 ``[sequences + 1]``.
      context_lens: int32 ``[sequences]``.
      positions: int32 or int64 ``[tokens]``, or None if the rows of a sequence are consecutive.
      window: positions that a row sees, or None for all.
      split_size: keys per split.

    Returns:
      ``out``.
    """
    tokens, query_heads, num_splits, head_dim = weighted.shape
    _merge_kernel[(tokens, query_heads)](
        out, weighted, stats, cu_query_lens, context_lens, positions, context_lens.shape[0],
        num_splits, query_heads, HEAD_DIM=head_dim, HEAD_PAD=sizes.padded_head(head_dim),
        SPLIT=split_size, WINDOW=window or 0, TREES=positions is not None, num_warps=1,
    )  # fmt: skip
    return out
