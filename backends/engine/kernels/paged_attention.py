"""Ragged paged attention in Triton: one kernel for prefill chunks, decode and verification.

The definition is ``paged_attention_ref``. A program owns ``QUERY_ROWS`` rows of one key-value head:
the query heads of its group packed with neighbouring query tokens, so that verifying several tokens
reads the keys and values once. It finds its sequence by bisection in ``cu_query_lens``: the grid is
an upper bound that needs no lengths on the host, so it can be captured in a graph.

Bits of a row. A verified token must get the bits it gets when decoded alone, so nothing that
touches a row's sums may depend on the batch:

* the context is cut into splits of a fixed *size*; the softmax of a split starts afresh;
* splits are merged one after the other, from the first, with explicit fused multiply-adds;
* keys that a row may not see add exact zeros, and a split that a row does not reach merges as the
  identity;
* the tile shapes are constants of the model.

Few programs: splits run in parallel and a second kernel merges them (scratch per query *row*, 4 *
(head_dim + 2) bytes per row and split). Many programs (prefill): each one loops over the splits
and merges in registers, in the same order with the same operations, without scratch.

Bytes: 2 * context * head_dim * element size per program, read once from device memory and again
from cache by the other query blocks of the sequence; query and output once.

Sources: the packing of heads with tokens follows the unified attention kernel of vLLM
(``v1/attention/ops/triton_unified_attention.py``), the fixed split size Thinking Machines,
"Defeating nondeterminism in LLM inference" (2025), the online softmax FlashAttention-2 (arXiv
2307.08691).
"""

from __future__ import annotations

import os
from typing import Final

import torch
import triton
import triton.language as tl

SPLIT_SIZE: Final = 512
"""Keys per split; part of the numerics class."""

QUERY_ROWS: Final = 64
"""Rows (query heads of a group x query tokens) of a program; part of the numerics class."""

_KEY_TILE: Final = 64
# Two waves on a GPU of 132 multiprocessors: with as many programs splits need no parallelism.
_ENOUGH_PROGRAMS: Final = 264
_LOG2_E: Final = 1.4426950408889634


@triton.jit
def _find_sequence(cu_ptr, target, num_sequences, BLOCK_Q: tl.constexpr):
    """Returns the last sequence s whose first query block (``cu[s] // BLOCK_Q + s``) <= target.

    With BLOCK_Q = 0 it compares ``cu[s]`` itself with a query token.
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
def _attend_split(
    query,
    position,
    first_key,
    last_key,
    key_ptr,
    value_ptr,
    table_ptr,
    block_stride,
    token_stride,
    score_scale,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    KEY_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Online softmax over the keys ``first_key .. last_key`` for all rows of a program.

    Returns (largest score, sum of weights, weighted values), weights being relative to the largest
    score, in base 2; (-inf, 0, 0) for rows that see none of the keys.
    """
    dims = tl.arange(0, HEAD_PAD)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    for first in range(first_key, last_key, KEY_TILE):
        keys = first + tl.arange(0, KEY_TILE)
        inside = keys < last_key
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        offset = block * block_stride + (keys % BLOCK_SIZE) * token_stride
        # Masked, since a cache slot past the context may hold anything, and 0 * NaN is NaN.
        mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(key_ptr + offset[:, None] + dims[None, :], mask=mask, other=0.0)
        value = tl.load(value_ptr + offset[:, None] + dims[None, :], mask=mask, other=0.0)
        if UPCAST:
            key = key.to(tl.float32)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * score_scale
        visible = inside[None, :] & (keys[None, :] <= position[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        # A row that has seen no key yet has no largest score to subtract.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, axis=1)
        weights = weights.to(value.dtype)
        if UPCAST:
            weights = weights.to(tl.float32)
            value = value.to(tl.float32)
        weighted = tl.dot(weights, value, weighted * shrink[:, None], input_precision="ieee")
        largest = higher
    return largest, total, weighted


@triton.jit
def _merge(sum_largest, sum_total, sum_weighted, largest, total, weighted):
    """Merges a split into the sums of those before it, which start as (-inf, 0, 0).

    Shapes: [rows], [rows], [rows, HEAD_PAD], twice. Both kernels merge by this function, with
    explicit fused multiply-adds, so that no compiler decides which product is rounded.
    """
    higher = tl.maximum(sum_largest, largest)
    # A row that sees no key at all (padding) has no largest score to subtract.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    keep = tl.exp2(sum_largest - base)
    add = tl.exp2(largest - base)
    sum_total = tl.fma(total, add, sum_total * keep)
    spread = tl.broadcast_to(add[:, None], weighted.shape)
    return higher, sum_total, tl.fma(weighted, spread, sum_weighted * keep[:, None])


@triton.jit
def _attention_kernel(
    out_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    cu_query_lens_ptr,
    context_lens_ptr,
    block_tables_ptr,
    scratch_ptr,
    scratch_stats_ptr,
    num_sequences,
    num_splits,
    table_stride,
    query_token_stride,
    query_head_stride,
    block_stride,
    token_stride,
    head_stride,
    num_query_heads,
    score_scale,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    KEY_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    PARALLEL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (query blocks, kv heads, splits or 1).

    PARALLEL: program (b, h, s) writes its split to the scratch, float32 ``[tokens, query_heads,
    num_splits, HEAD_DIM]`` and stats (largest, total) ``[tokens, query_heads, num_splits, 2]``.
    Otherwise it merges all splits and writes the output.
    """
    BLOCK_Q: tl.constexpr = ROWS // GROUP
    query_block = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _find_sequence(cu_query_lens_ptr, query_block, num_sequences, BLOCK_Q)
    begin = tl.load(cu_query_lens_ptr + sequence)
    query_len = tl.load(cu_query_lens_ptr + sequence + 1) - begin
    first_query = (query_block - begin // BLOCK_Q - sequence) * BLOCK_Q
    if first_query >= query_len:
        return
    context = tl.load(context_lens_ptr + sequence)
    last_query = tl.minimum(first_query + BLOCK_Q, query_len)
    # Keys from here on are visible to no row of this program.
    key_end = context - query_len + last_query
    if PARALLEL and tl.program_id(2) * SPLIT >= key_end:
        return

    rows = tl.arange(0, ROWS)
    in_sequence = first_query + rows // GROUP
    real = (rows < BLOCK_Q * GROUP) & (in_sequence < query_len)
    position = context - query_len + in_sequence
    token = (begin + in_sequence).to(tl.int64)
    head = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, HEAD_PAD)
    mask = real[:, None] & (dims < HEAD_DIM)[None, :]
    query_row = token * query_token_stride + head * query_head_stride
    query = tl.load(query_ptr + query_row[:, None] + dims[None, :], mask=mask, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride
    key_ptr += kv_head.to(tl.int64) * head_stride
    value_ptr += kv_head.to(tl.int64) * head_stride
    out_row = token * num_query_heads + head

    if PARALLEL:
        split = tl.program_id(2)
        first_key = split * SPLIT
        largest, total, weighted = _attend_split(
            query, position, first_key, tl.minimum(first_key + SPLIT, key_end),
            key_ptr, value_ptr, table_ptr, block_stride, token_stride, score_scale,
            BLOCK_SIZE, HEAD_DIM, HEAD_PAD, KEY_TILE, ROWS, UPCAST,
        )  # fmt: skip
        slot = out_row * num_splits + split
        tl.store(scratch_ptr + slot[:, None] * HEAD_DIM + dims[None, :], weighted, mask=mask)
        tl.store(scratch_stats_ptr + slot * 2, largest, mask=real)
        tl.store(scratch_stats_ptr + slot * 2 + 1, total, mask=real)
    else:
        sum_largest = tl.full([ROWS], float("-inf"), tl.float32)
        sum_total = tl.zeros([ROWS], tl.float32)
        sum_weighted = tl.zeros([ROWS, HEAD_PAD], tl.float32)
        for first_key in range(0, key_end, SPLIT):
            largest, total, weighted = _attend_split(
                query, position, first_key, tl.minimum(first_key + SPLIT, key_end),
                key_ptr, value_ptr, table_ptr, block_stride, token_stride, score_scale,
                BLOCK_SIZE, HEAD_DIM, HEAD_PAD, KEY_TILE, ROWS, UPCAST,
            )  # fmt: skip
            sum_largest, sum_total, sum_weighted = _merge(
                sum_largest, sum_total, sum_weighted, largest, total, weighted
            )
        result = _normalise(sum_weighted, sum_total)
        tl.store(out_ptr + out_row[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)


@triton.jit
def _normalise(weighted, total):
    """Divides weighted values [rows, HEAD_PAD] by the sums of their weights [rows]."""
    return tl.div_rn(weighted, tl.broadcast_to(total[:, None], weighted.shape))


@triton.jit
def _merge_kernel(
    out_ptr,
    scratch_ptr,
    scratch_stats_ptr,
    cu_query_lens_ptr,
    context_lens_ptr,
    num_sequences,
    num_splits,
    num_query_heads,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid (tokens, query heads): merges the splits that the row reaches, from the first."""
    token = tl.program_id(0)
    sequence = _find_sequence(cu_query_lens_ptr, token, num_sequences, 0)
    end = tl.load(cu_query_lens_ptr + sequence + 1)
    if token >= end:
        return
    position = tl.load(context_lens_ptr + sequence) - end + token
    dims = tl.arange(0, HEAD_PAD)
    row = token.to(tl.int64) * num_query_heads + tl.program_id(1)
    mask = (dims < HEAD_DIM)[None, :]
    sum_largest = tl.full([1], float("-inf"), tl.float32)
    sum_total = tl.zeros([1], tl.float32)
    sum_weighted = tl.zeros([1, HEAD_PAD], tl.float32)
    for split in range(position // SPLIT + 1):
        slot = row * num_splits + split + tl.arange(0, 1)
        largest = tl.load(scratch_stats_ptr + slot * 2)
        total = tl.load(scratch_stats_ptr + slot * 2 + 1)
        values = scratch_ptr + slot[:, None] * HEAD_DIM + dims[None, :]
        weighted = tl.load(values, mask=mask, other=0.0)
        sum_largest, sum_total, sum_weighted = _merge(
            sum_largest, sum_total, sum_weighted, largest, total, weighted
        )
    result = _normalise(sum_weighted, sum_total)
    tl.store(out_ptr + row * HEAD_DIM + dims[None, :], result, mask=mask)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cu_query_lens: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    scale: float,
    max_context: int | None = None,
    parallel_splits: bool | None = None,
    split_size: int = SPLIT_SIZE,
) -> torch.Tensor:
    """As ``paged_attention_ref.paged_attention``; never synchronises with the device.

    Args:
      query: float32, float16 or bfloat16 ``[tokens, query_heads, head_dim]``, unit last stride.
      key_cache: ``[blocks, block_size, kv_heads, head_dim]``, unit last stride.
      value_cache: same shape and strides as ``key_cache``.
      cu_query_lens: int32 ``[sequences + 1]``; padding sequences have no query tokens.
      context_lens: int32 ``[sequences]``.
      block_tables: int32 ``[sequences, max_blocks]``.
      scale: factor on the scores.
      max_context: upper bound of ``context_lens``; the block tables bound it otherwise.
      parallel_splits: whether splits get their own programs; by default where programs are few.
        Does not change the sums.
      split_size: keys per split, a multiple of 64. Changes the last bits.

    Returns:
      ``[tokens, query_heads, head_dim]`` in the dtype of ``query``; rows of tokens that belong to
      no sequence are undefined.
    """
    tokens, query_heads, head_dim = query.shape
    _, block_size, kv_heads, _ = key_cache.shape
    group = query_heads // kv_heads
    sequences = context_lens.shape[0]
    _check(query, key_cache, value_cache, split_size)
    out = torch.empty((tokens, query_heads, head_dim), dtype=query.dtype, device=query.device)
    if tokens == 0 or sequences == 0:
        return out
    rows = max(QUERY_ROWS, triton.next_power_of_2(group))
    query_blocks = tokens // (rows // group) + sequences
    num_splits = triton.cdiv(max_context or block_tables.shape[1] * block_size, split_size)
    if parallel_splits is None:
        parallel_splits = num_splits > 1 and query_blocks * kv_heads < _ENOUGH_PROGRAMS
    slots = (tokens, query_heads, num_splits) if parallel_splits else (1, 1, 1)
    scratch = torch.empty((*slots, head_dim), dtype=torch.float32, device=query.device)
    stats = torch.empty((*slots, 2), dtype=torch.float32, device=query.device)
    _attention_kernel[(query_blocks, kv_heads, num_splits if parallel_splits else 1)](
        out,
        query,
        key_cache,
        value_cache,
        cu_query_lens,
        context_lens,
        block_tables,
        scratch,
        stats,
        sequences,
        num_splits,
        block_tables.stride(0),
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        query_heads,
        scale * _LOG2_E,
        GROUP=group,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HEAD_PAD=_padded(head_dim),
        KEY_TILE=_KEY_TILE,
        SPLIT=split_size,
        ROWS=rows,
        PARALLEL=parallel_splits,
        UPCAST=_interpreting(),
        num_warps=4,
    )
    if parallel_splits:
        _merge_splits(out, scratch, stats, cu_query_lens, context_lens, split_size)
    return out


def _merge_splits(
    out: torch.Tensor,
    scratch: torch.Tensor,
    stats: torch.Tensor,
    cu_query_lens: torch.Tensor,
    context_lens: torch.Tensor,
    split_size: int,
) -> None:
    """Merges the splits of every row into ``out``."""
    tokens, query_heads, num_splits, head_dim = scratch.shape
    _merge_kernel[(tokens, query_heads)](
        out,
        scratch,
        stats,
        cu_query_lens,
        context_lens,
        context_lens.shape[0],
        num_splits,
        query_heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=_padded(head_dim),
        SPLIT=split_size,
        num_warps=1,
    )


def _padded(head_dim: int) -> int:
    """Returns the columns of a tile that holds a head; products need 16."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def _check(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, split_size: int
) -> None:
    """Raises ValueError for layouts that the kernel would read wrongly."""
    if query.shape[1] % key_cache.shape[2]:
        raise ValueError(f"{query.shape[1]} query heads over {key_cache.shape[2]} kv heads")
    if query.stride(2) != 1 or key_cache.stride(3) != 1:
        raise ValueError("query and cache need unit stride along the head dimension")
    if key_cache.stride() != value_cache.stride() or key_cache.shape != value_cache.shape:
        raise ValueError("key and value cache need the same shape and strides")
    if split_size % _KEY_TILE:
        raise ValueError(f"split_size {split_size} is not a multiple of {_KEY_TILE}")


def _interpreting() -> bool:
    """Whether Triton interprets; its bfloat16 ``tl.dot`` is wrong, so inputs are upcast there."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
