"""Ragged paged attention in Triton: the same kernel for prefill chunks, decode and verification.

``paged_attention_ref`` is the definition. A program owns 64 rows (``paged_attention_sizes.tiles``)
of one key-value head. The rows are the query heads of its group for neighbouring query tokens, so a
step that verifies several tokens reads the keys and values once. A program finds its sequence by
bisection in ``cu_query_lens``. The grid is an upper bound that needs no lengths on the host, so a
graph can capture it.

Bits of a row. A verified token must have the same bits as in a decode of its own. The sums of a row
must therefore not depend on the batch:

* Splits of a fixed *size* divide the positions, and tiles divide the splits. Each split starts a
  new softmax.
* The merge of splits is in order, with explicit fused multiply-adds.
* Keys that a row may not see add exact zeros. Tiles and splits without visible keys merge as the
  identity, so a program may skip them.
* The tile shapes are constants of the model.

Trees. A product adds keys in the order of their places in the tile. If a path has gaps, a mask over
the slots of a tree would therefore give other bits than a chain. To avoid this, the program reads
tiles that reach beyond ``draft_starts`` once for each leaf among its rows. It gathers the keys of
the leaf's path to their *positions*. The draft token of the d-th set bit of the ancestor mask has
position draft_start + d (``tree_paths``). Rows of other leaves see none of these keys. Every row of
every branch therefore has the bits of its path as a chain. All rows share the earlier tiles. Each
leaf after the first costs 1 or 2 more tiles, because a path of up to 64 tokens touches two tiles. A
chain has one leaf.

Few programs. Splits run in parallel, and a second kernel merges them. Per row (token x query head)
and split, the kernels write and read head_dim + 2 float32 numbers of scratch. For 64 tokens, 32
heads of 128 and 32768 tokens of context, the scratch is 65 MiB.

Many programs (prefill). Each program loops over the splits and merges them in registers, in the
same order with the same operations, without scratch.

Bytes. A program reads 2 * context * head_dim * element size bytes. With a window, min(context,
window + tokens of the program) replaces the context. The first query block of a sequence reads the
bytes from device memory, later query blocks from cache. Queries and outputs move once. A decode of
4096 tokens with 8 heads of 128 in bfloat16 reads 16.8 MB, which takes at least 3.5 us at 4.8 TB/s.

Empty programs. The grid has (tokens * group // rows + sequences) * kv_heads programs for any
lengths. With parallel splits, the grid has this number times the splits of the longest block table.
A program without keys bisects (log2(sequences) dependent loads), loads up to four words and
returns. The program occupies its multiprocessor for a few microseconds, so capture graphs for
several table widths.

Sources: the packing of heads with tokens follows the unified attention kernel of vLLM
(``v1/attention/ops/triton_unified_attention.py``). The fixed split size is from Thinking Machines,
"Defeating nondeterminism in LLM inference" (2025). The online softmax is from FlashAttention-2
(arXiv 2307.08691), ancestor masks are from SpecInfer (arXiv 2305.09781).
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftgate.backends.engine.kernels import paged_attention_sizes as sizes
from draftgate.backends.engine.kernels.merge_splits import (
    block_rows,
    find_sequence,
    first_visible,
    merge,
    merge_splits,
    no_keys,
    normalise,
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

    The result is wrong for rows that see keys from ``last_key`` on. The caller must not use these
    rows.

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
        # A row that has seen no key yet has no largest score to subtract.
        base = tl.where(higher == float("-inf"), 0.0, higher)
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

    The result is the state of ``_attend_keys``. It is (-inf, 0, 0) for rows that see none of the
    keys.
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
def _load_query(
    query_ptr,
    token,
    real,
    token_stride,
    head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return the queries of the program's rows: [ROWS, HEAD_PAD], zero for padding rows."""
    head = tl.program_id(1) * GROUP + tl.arange(0, ROWS) % GROUP
    dims = tl.arange(0, HEAD_PAD)
    cells = (token.to(tl.int64) * token_stride + head * head_stride)[:, None] + dims[None, :]
    mask = real[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(query_ptr + cells, mask=mask, other=0.0)
    return query.to(tl.float32) if UPCAST else query


@triton.jit
def _result_rows(
    cu_query_lens_ptr, sequence, num_query_heads, GROUP: tl.constexpr, ROWS: tl.constexpr
):
    """Return the program's rows among all rows (token x query head), int64, and a validity mask."""
    BLOCK_Q: tl.constexpr = ROWS // GROUP
    begin, query_len, first_query = block_rows(cu_query_lens_ptr, sequence, BLOCK_Q)
    rows = tl.arange(0, ROWS)
    in_group = first_query * GROUP + rows
    real = (rows < BLOCK_Q * GROUP) & (in_group < query_len * GROUP)
    head = tl.program_id(1) * GROUP + in_group % GROUP
    return ((begin + in_group // GROUP) * num_query_heads + head).to(tl.int64), real


@triton.jit(do_not_specialize=["num_sequences", "num_splits"])
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
    scratch_ptr,
    scratch_stats_ptr,
    num_sequences,
    num_splits,
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
    PARALLEL: tl.constexpr,
    WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
    CAP: tl.constexpr,
):
    """Attend the rows of one program. WINDOW 0 means no window, and CAP 0 no bound on the scores.

    The grid is (query blocks, kv heads, splits or 1). With PARALLEL, program (b, h, s) writes its
    split to the scratch. The scratch has weighted values, float32 ``[tokens, query_heads,
    num_splits, HEAD_DIM]``, and stats (largest, total), float32 ``[tokens, query_heads, num_splits,
    2]``. Without PARALLEL, the program merges all splits and writes the output.
    """
    BLOCK_Q: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    sequence = find_sequence(cu_query_lens_ptr, tl.program_id(0), num_sequences, BLOCK_Q)
    begin, query_len, first_query = block_rows(cu_query_lens_ptr, sequence, BLOCK_Q)
    if first_query >= query_len:
        return
    context = tl.load(context_lens_ptr + sequence)
    draft_start = tl.load(draft_starts_ptr + sequence) if TREES else context
    first_position = context - query_len + first_query
    # No row of this program sees keys outside key_begin .. key_end. Paths end before their slots.
    key_end = tl.minimum(context, first_position + BLOCK_Q)
    key_begin = first_visible(tl.minimum(first_position, draft_start), KEY_TILE, WINDOW)
    first_split = key_begin // SPLIT
    end_split = tl.cdiv(key_end, SPLIT)
    if PARALLEL and ((split < first_split) | (split >= end_split)):
        return
    rows = tl.arange(0, ROWS)
    in_sequence = first_query + rows // GROUP
    real = (rows < BLOCK_Q * GROUP) & (in_sequence < query_len)
    token = begin + in_sequence
    position = first_position + rows // GROUP
    leaves = rows
    if TREES:
        position = tl.load(positions_ptr + token, mask=real, other=-1).to(tl.int32)
        ancestors = tl.load(ancestors_ptr + token, mask=real, other=0)
        leaves = leaves_of_rows(ancestors, real, ROWS)
        ancestors_ptr += begin + first_query
    query = _load_query(
        query_ptr, token, real, query_token_stride, query_head_stride,
        GROUP, HEAD_DIM, HEAD_PAD, ROWS, UPCAST,
    )  # fmt: skip
    key_ptr += kv_head.to(tl.int64) * strip_stride
    table_start = tl.load(table_starts_ptr + sequence)
    if PARALLEL:
        first_split, end_split = split, split + 1
    sum_largest, sum_total, sum_weighted = no_keys(ROWS, HEAD_PAD)
    for index in tl.range(first_split, end_split, disable_licm=True):
        largest, total, weighted = _attend_split(
            query, position, leaves, draft_start, ancestors_ptr,
            tl.maximum(index * SPLIT, key_begin), tl.minimum((index + 1) * SPLIT, key_end),
            key_ptr, values_offset, blocks_ptr, table_start, token_stride,
            score_scale, GROUP, BLOCK_SIZE, HEAD_DIM, HEAD_PAD, KEY_TILE, ROWS, WINDOW, TREES,
            WIDE, UPCAST, CAP,
        )  # fmt: skip
        if PARALLEL:
            row, stored = _result_rows(cu_query_lens_ptr, sequence, num_query_heads, GROUP, ROWS)
            slot = row * num_splits + index
            store_rows(scratch_ptr, slot, weighted, stored, HEAD_DIM, HEAD_PAD)
            tl.store(scratch_stats_ptr + slot * 2, largest, mask=stored)
            tl.store(scratch_stats_ptr + slot * 2 + 1, total, mask=stored)
        else:
            sum_largest, sum_total, sum_weighted = merge(
                sum_largest, sum_total, sum_weighted, largest, total, weighted
            )
    if not PARALLEL:
        row, stored = _result_rows(cu_query_lens_ptr, sequence, num_query_heads, GROUP, ROWS)
        result = normalise(sum_weighted, sum_total)
        store_rows(out_ptr, row, result, stored, HEAD_DIM, HEAD_PAD)


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
    parallel_splits: bool | None = None,
    split_size: int = sizes.SPLIT_SIZE,
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
      parallel_splits: whether splits get programs of their own. The default is to do so for few
        programs. The setting does not change the sums.
      split_size: keys per split, a multiple of 64. The size changes the last bits.

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
    group = query_heads // kv_heads
    tiles = sizes.tiles(query.dtype, layer_kv.dtype, head_dim, group)
    query_blocks = tokens // (tiles.query_rows // group) + sequences
    num_splits = triton.cdiv(block_tables.longest * block_size, split_size)
    if parallel_splits is None:
        parallel_splits = sizes.runs_parallel(num_splits, query_blocks * kv_heads)
    ancestors, draft_starts, positions = trees or (None, None, None)
    weighted, stats = None, None
    if parallel_splits:
        rows = (tokens, query_heads, num_splits)
        weighted = torch.empty((*rows, head_dim), dtype=torch.float32, device=query.device)
        stats = torch.empty((*rows, 2), dtype=torch.float32, device=query.device)
    _attention_kernel[(query_blocks, kv_heads, num_splits if parallel_splits else 1)](
        out, query, layer_kv, cu_query_lens, context_lens, *block_tables[:2],
        ancestors, draft_starts, positions, weighted, stats, sequences, num_splits,
        query.stride(0), query.stride(1),
        kv_heads * layer_kv.stride(0), layer_kv.stride(0), layer_kv.stride(1),
        query_heads, (softcap or scale) * _LOG2_E, GROUP=group, BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim, HEAD_PAD=sizes.padded_head(head_dim), KEY_TILE=sizes.KEY_TILE,
        SPLIT=split_size, ROWS=tiles.query_rows, WINDOW=window or 0, TREES=trees is not None,
        PARALLEL=parallel_splits, WIDE=sizes.is_wide(layer_kv), UPCAST=sizes.interpreting(),
        CAP=-2 * scale / softcap * _LOG2_E if softcap else 0.0,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, maxnreg=tiles.max_registers,
    )  # fmt: skip
    if weighted is not None and stats is not None:
        merge_splits(
            out, weighted, stats, cu_query_lens, context_lens, positions,
            window=window, split_size=split_size,
        )  # fmt: skip
    return out
