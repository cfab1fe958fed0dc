"""Ragged paged attention in Triton: the same kernel for prefill chunks, decode and verification.

``paged_attention_ref`` is the definition. A block of query tokens and a key-value head, a *pair*,
has 64 rows (``paged_attention_sizes.tiles``). The rows are the query heads of the group for
neighbouring query tokens, so a step that verifies several tokens reads the keys and values once.
The work list of a step (``attention_work``) says which splits of which pairs a program attends. The
grid has as many programs as the GPU runs at once, so that a graph can capture the kernel.

Bits of a row. A verified token must have the same bits as in a decode of its own. The sums of a row
must therefore not depend on the batch:

* Splits of a fixed *size* divide the positions, and tiles divide the splits. Each split starts a
  new softmax.
* The merge of splits is in order, with explicit fused multiply-adds. Neither depends on the work
  list, which only distributes the splits.
* Keys that a row may not see add exact zeros. Tiles and splits without visible keys merge as the
  identity, so a program may skip them.
* The tile shapes are constants of the model. A row of a tree reads its path as a chain
  (``tree_paths``).

Whole pairs. A program loops over the splits of a short context, or of any context of a prefill. It
keeps a split and the sums in scratch of its own, 2 * 64 * (head_dim + 2) float32 numbers, which
stay in the second-level cache. The registers do not hold both together with the loop over pairs.

Cut pairs. Several programs attend the splits of a context that is long among those of its step, and
a second kernel merges them in the same order with the same operations. Per row (token x query head)
and split, the kernels write and read head_dim + 2 float32 numbers of scratch. For 64 tokens, 32
heads of 128 and 32768 tokens of context, the scratch is 65 MiB.

Bytes. A pair reads 2 * context * head_dim * element size bytes. With a window, min(context,
window + tokens of the block) replaces the context. The first query block of a sequence reads the
bytes from device memory, later query blocks from cache. Queries and outputs move once. A decode of
4096 tokens with 8 heads of 128 in bfloat16 reads 16.8 MB, which takes at least 3.5 us at 4.8 TB/s.

Sources: vLLM packs heads with tokens (``v1/attention/ops/triton_unified_attention.py``), splits of
a fixed size are from Thinking Machines, "Defeating nondeterminism in LLM inference" (2025), and the
online softmax is from FlashAttention-2 (arXiv 2307.08691).
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftgate.backends.engine.kernels import paged_attention_sizes as sizes
from draftgate.backends.engine.kernels.attention_work import (
    block_keys,
    block_rows,
    fresh_rows,
    load_query,
    plan_work,
    splits_of_interval,
)
from draftgate.backends.engine.kernels.attention_work_ref import AttentionWork
from draftgate.backends.engine.kernels.merge_splits import (
    add_split,
    merge_splits,
    no_keys,
    store_rows,
)
from draftgate.backends.engine.kernels.paged_attention_ref import BlockTables, DraftTrees
from draftgate.backends.engine.kernels.tree_paths import leaves_of_rows, path_slots

_LOG2_E: Final = 1.4426950408889634


@triton.jit
def _attend_keys(
    largest,
    total,
    weighted,
    query,
    position,
    first_key,
    last_key,
    draft_start,
    path,
    key_ptr,
    values_offset,
    table_ptr,
    table_start,
    token_stride,
    score_scale,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    KEY_TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    PATH: tl.constexpr,
    WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
    CAP: tl.constexpr,
):
    """Continue an online softmax with the keys at positions ``first_key .. last_key - 1``.

    The result is wrong for rows that see keys from ``last_key`` on, which the caller must not use.

    The state (largest score, sum of weights, weighted values) is relative to the largest score, in
    base 2. Rows that see none of the keys, e.g. rows with position -1, keep the state bit for bit.
    """
    dims = tl.arange(0, HEAD_PAD)
    # A path has at most two tiles, so a pipeline and hoisted values would only hold registers. In
    # float32, without tensor cores, the tile would hold more registers with a single stage, so use
    # two stages.
    STAGES: tl.constexpr = (2 if query.dtype == tl.float32 else 1) if PATH else None
    for first in tl.range(first_key, last_key, KEY_TILE, num_stages=STAGES, disable_licm=PATH):
        keys = first + tl.arange(0, KEY_TILE)
        # Beyond the end, repeat the last key. Other slots may hold NaN, and 0 * NaN is NaN.
        tokens = tl.minimum(keys, last_key - 1)
        if PATH:
            tokens = path_slots(tokens, draft_start, path)
        block = tl.load(table_ptr + (table_start + tokens // BLOCK_SIZE))
        if WIDE:
            block = block.to(tl.int64)
        cells = ((block * BLOCK_SIZE + tokens % BLOCK_SIZE) * token_stride)[:, None] + dims[None, :]
        if HEAD_DIM == HEAD_PAD:
            key = tl.load(key_ptr + cells)
            value = tl.load(key_ptr + cells + values_offset)
        else:
            key = tl.load(key_ptr + cells, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            value = tl.load(
                key_ptr + cells + values_offset, mask=(dims < HEAD_DIM)[None, :], other=0.0
            )
        # The products with FP8 are those with the same numbers in the dtype of the queries.
        key = key.to(query.dtype)
        if value.dtype == tl.float8e4nv:
            value = value.to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if CAP != 0:
            # tanh(x) = 2 / (1 + exp(-2 x)) - 1, without a product that could fuse with a sum.
            scores = 2.0 / (1.0 + tl.exp2(scores * CAP)) - 1.0
        visible = keys[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (keys[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1) * score_scale)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf if no key was seen yet
        # The fused multiply-add is explicit, because the compiler must not contract differently in
        # variants of the kernel.
        below = tl.broadcast_to(-base[:, None], scores.shape)
        scale = tl.full(scores.shape, 1.0, tl.float32) * score_scale
        weights = tl.exp2(tl.fma(scores, scale, below))
        shrink = tl.exp2(largest - base)
        total = tl.fma(total, shrink, tl.sum(weights, axis=1))
        weights = weights.to(value.dtype)
        if UPCAST:
            weights = weights.to(tl.float32)
            value = value.to(tl.float32)
        weighted = tl.dot(weights, value, weighted * shrink[:, None], input_precision="ieee")
        largest = higher
    return largest, total, weighted


@triton.jit
def _attend_split(
    query,
    position,
    leaves,
    draft_start,
    ancestors_ptr,
    first_key,
    last_key,
    key_ptr,
    values_offset,
    table_ptr,
    table_start,
    token_stride,
    score_scale,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    KEY_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    TREES: tl.constexpr,
    WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
    CAP: tl.constexpr,
):
    """Return the softmax of rows [ROWS] over the keys of a split. ``first_key`` begins a tile.

    The result is the state of ``_attend_keys``, (-inf, 0, 0) for rows that see none of the keys.
    """
    largest, total, weighted = no_keys(ROWS, HEAD_PAD)
    shared_end = last_key
    if TREES:
        shared_end = tl.minimum(last_key, draft_start // KEY_TILE * KEY_TILE)
    largest, total, weighted = _attend_keys(
        largest, total, weighted, query, position, first_key, shared_end, 0, 0,
        key_ptr, values_offset, table_ptr, table_start, token_stride, score_scale,
        BLOCK_SIZE, HEAD_DIM, HEAD_PAD, KEY_TILE, WINDOW, False, WIDE, UPCAST, CAP,
    )  # fmt: skip
    if TREES:
        first_key = tl.maximum(first_key, shared_end)
        unread_leaves = tl.where((position >= first_key) & (first_key < last_key), leaves, -1)
        leaf = tl.max(unread_leaves, axis=0)
        while leaf >= 0:
            path = tl.load(ancestors_ptr + leaf // GROUP)
            leaf_positions = tl.where(leaves == leaf, position, -1)
            path_end = tl.minimum(last_key, tl.max(leaf_positions, axis=0) + 1)
            largest, total, weighted = _attend_keys(
                largest, total, weighted, query, leaf_positions, first_key, path_end, draft_start,
                path, key_ptr, values_offset, table_ptr, table_start, token_stride, score_scale,
                BLOCK_SIZE, HEAD_DIM, HEAD_PAD, KEY_TILE, WINDOW, True, WIDE, UPCAST, CAP,
            )  # fmt: skip
            leaf = tl.max(tl.where(unread_leaves < leaf, unread_leaves, -1), axis=0)
    return largest, total, weighted


@triton.jit
def _attend_item(
    out_ptr,
    query_ptr,
    key_ptr,
    cu_query_lens_ptr,
    context_lens_ptr,
    blocks_ptr,
    table_starts_ptr,
    ancestors_ptr,
    draft_starts_ptr,
    positions_ptr,
    record_ptr,
    partials_ptr,
    scratch_ptr,
    scratch_stats_ptr,
    kv_head,
    first_split,
    end_split,
    slots,
    query_token_stride,
    query_head_stride,
    values_offset,
    strip_stride,
    token_stride,
    num_query_heads,
    score_scale,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    KEY_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    TREES: tl.constexpr,
    WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
    CAP: tl.constexpr,
):
    """Attend splits of a pair."""
    BLOCK_Q: tl.constexpr = ROWS // GROUP
    sequence = tl.load(record_ptr)
    first_query = tl.load(record_ptr + 1)
    token, head, real = block_rows(record_ptr, cu_query_lens_ptr, kv_head, GROUP, ROWS)
    begin = tl.load(cu_query_lens_ptr + sequence)
    query_len = tl.load(cu_query_lens_ptr + sequence + 1) - begin
    context = tl.load(context_lens_ptr + sequence)
    draft_start = tl.load(draft_starts_ptr + sequence) if TREES else context
    position = context - query_len + token - begin
    leaves = position
    if TREES:
        position = tl.load(positions_ptr + token, mask=real, other=-1).to(tl.int32)
        ancestors = tl.load(ancestors_ptr + token, mask=real, other=0)
        leaves = leaves_of_rows(ancestors, real, ROWS)
        ancestors_ptr += begin + first_query
    query = load_query(
        query_ptr, token, head, real, query_token_stride, query_head_stride,
        HEAD_DIM, HEAD_PAD, UPCAST,
    )  # fmt: skip
    key_ptr += kv_head.to(tl.int64) * strip_stride
    table_start = tl.load(table_starts_ptr + sequence)
    for index in tl.range(first_split, end_split, disable_licm=True):
        key_begin, key_end = block_keys(
            record_ptr, cu_query_lens_ptr, context_lens_ptr, BLOCK_Q, KEY_TILE
        )
        largest, total, weighted = _attend_split(
            query, position, leaves, draft_start, ancestors_ptr,
            tl.maximum(index * SPLIT, key_begin), tl.minimum((index + 1) * SPLIT, key_end),
            key_ptr, values_offset, blocks_ptr, table_start, token_stride,
            score_scale, GROUP, BLOCK_SIZE, HEAD_DIM, HEAD_PAD, KEY_TILE, ROWS, WINDOW, TREES,
            WIDE, UPCAST, CAP,
        )  # fmt: skip
        token, head, stored = block_rows(record_ptr, cu_query_lens_ptr, kv_head, GROUP, ROWS)
        is_cut = tl.load(record_ptr + 4, volatile=True) != 0
        first_row = slots.to(tl.int64) * num_query_heads + tl.program_id(0) * 2 * ROWS
        row = first_row + fresh_rows(record_ptr, ROWS)
        if is_cut:
            slot = tl.load(partials_ptr + token * 2, mask=stored, other=0) + index
            slot -= tl.load(record_ptr + 2, volatile=True) // (SPLIT // KEY_TILE)
            row = slot.to(tl.int64) * num_query_heads + head
        store_rows(scratch_ptr, row, weighted, stored, HEAD_DIM, HEAD_PAD)
        tl.store(scratch_stats_ptr + row * 2, largest, mask=stored)
        tl.store(scratch_stats_ptr + row * 2 + 1, total, mask=stored)
        if not is_cut:
            token, head, stored = block_rows(record_ptr, cu_query_lens_ptr, kv_head, GROUP, ROWS)
            add_split(
                out_ptr, token.to(tl.int64) * num_query_heads + head, stored, scratch_ptr,
                scratch_stats_ptr, fresh_rows(record_ptr, ROWS), first_row, index == first_split,
                index == end_split - 1, HEAD_DIM, HEAD_PAD, ROWS,
            )  # fmt: skip


@triton.jit
def _attention_kernel(
    out_ptr,
    query_ptr,
    key_ptr,
    cu_query_lens_ptr,
    context_lens_ptr,
    blocks_ptr,
    table_starts_ptr,
    ancestors_ptr,
    draft_starts_ptr,
    positions_ptr,
    records_ptr,
    intervals_ptr,
    partials_ptr,
    scratch_ptr,
    scratch_stats_ptr,
    kv_heads,
    slots,
    query_token_stride,
    query_head_stride,
    values_offset,
    strip_stride,
    token_stride,
    num_query_heads,
    score_scale,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    KEY_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    TREES: tl.constexpr,
    WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
    CAP: tl.constexpr,
):
    """Attend the interval of a program. WINDOW 0 means no window, and CAP 0 no bound on the scores.

    The grid is (programs of the work list). The scratch has the weighted values of rows, float32
    ``[slots * query_heads + programs * 2 * ROWS, HEAD_DIM]``, and their stats (largest, total),
    float32 ``[..., 2]``.
    """
    interval_ptr = intervals_ptr + tl.program_id(0) * 3
    block = tl.load(interval_ptr)
    before = tl.load(interval_ptr + 1)
    left = tl.load(interval_ptr + 2)
    while left > 0:
        record_ptr = records_ptr + block * 5
        kv_head, first_split, end_split, taken = splits_of_interval(
            record_ptr, before, left, SPLIT // KEY_TILE
        )
        _attend_item(
            out_ptr, query_ptr, key_ptr, cu_query_lens_ptr, context_lens_ptr, blocks_ptr,
            table_starts_ptr, ancestors_ptr, draft_starts_ptr, positions_ptr, record_ptr,
            partials_ptr, scratch_ptr, scratch_stats_ptr, kv_head, first_split, end_split,
            slots, query_token_stride, query_head_stride, values_offset, strip_stride, token_stride,
            num_query_heads, score_scale, GROUP, BLOCK_SIZE, HEAD_DIM, HEAD_PAD, KEY_TILE, SPLIT,
            ROWS, WINDOW, TREES, WIDE, UPCAST, CAP,
        )  # fmt: skip
        left -= taken
        before += taken
        if before == tl.load(record_ptr + 3) * kv_heads:
            block += 1
            before = 0


def paged_attention(
    query: Tensor,
    layer_kv: Tensor,
    cu_query_lens: Tensor,
    context_lens: Tensor,
    block_tables: BlockTables,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    trees: DraftTrees | None = None,
    split_size: int = sizes.SPLIT_SIZE,
    work: AttentionWork | None = None,
) -> Tensor:
    """Attend as ``paged_attention_ref.paged_attention`` does, without a device synchronisation.

    Args:
      query: float32, float16 or bfloat16 ``[tokens, query_heads, head_dim]``, unit last stride.
      layer_kv: ``[2 * kv_heads, slots, head_dim]``, unit last stride, dtype of ``query`` or E4M3.
      cu_query_lens: int32 ``[sequences + 1]``. Padding sequences have no query tokens.
      context_lens: int32 ``[sequences]``.
      block_tables: all tables. Their entries are fewer than 2**31.
      block_size: slots of a block.
      scale: factor on the scores, positive.
      window: positions that a row sees, including its own, or None for all. Each value compiles a
        kernel.
      softcap: bound on the scores, positive, or None. Each value compiles a kernel.
      trees: the draft tokens that each row sees. None compiles a kernel without trees.
      split_size: keys per split, a multiple of 64. The size changes the last bits.
      work: the work list for these arguments, from ``plan_work``, which does not change the sums.
        None lists the work of this call.

    Returns:
      ``[tokens, query_heads, head_dim]`` in the dtype of ``query``. Rows of tokens that belong to
      no sequence are undefined.

    Raises:
      ValueError: the kernel does not support a size or layout.
    """
    sizes.check_arguments(query, layer_kv, block_size, scale, window, softcap, trees, split_size)
    tokens, query_heads, head_dim = query.shape
    kv_heads, sequences = layer_kv.shape[0] // 2, context_lens.shape[0]
    out = torch.empty((tokens, query_heads, head_dim), dtype=query.dtype, device=query.device)
    if tokens == 0 or sequences == 0:
        return out
    if work is None:
        work = plan_work(
            query, layer_kv, cu_query_lens, context_lens, block_tables,
            block_size=block_size, window=window, trees=trees, split_size=split_size,
        )  # fmt: skip
    group = query_heads // kv_heads
    tiles = sizes.tiles(query.dtype, layer_kv.dtype, head_dim, group)
    ancestors, draft_starts, positions = trees or (None, None, None)
    rows = work.slots * query_heads + len(work.starts) * 2 * tiles.query_rows
    weighted, stats = (
        torch.empty((rows, size), dtype=torch.float32, device=query.device)
        for size in (head_dim, 2)
    )
    _attention_kernel[(len(work.starts),)](
        out, query, layer_kv, cu_query_lens, context_lens, *block_tables[:2],
        ancestors, draft_starts, positions, *work[:3], weighted, stats, kv_heads, work.slots,
        query.stride(0), query.stride(1),
        kv_heads * layer_kv.stride(0), layer_kv.stride(0), layer_kv.stride(1),
        query_heads, (softcap or scale) * _LOG2_E, GROUP=group, BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim, HEAD_PAD=sizes.padded_head(head_dim), KEY_TILE=sizes.KEY_TILE,
        SPLIT=split_size, ROWS=tiles.query_rows, WINDOW=window or 0, TREES=trees is not None,
        WIDE=sizes.is_wide(layer_kv), UPCAST=sizes.interpreting(),
        CAP=-2 * scale / softcap * _LOG2_E if softcap else 0.0,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, maxnreg=tiles.max_registers,
    )  # fmt: skip
    if work.slots:
        merge_splits(out, weighted, stats, work.partials)
    return out
