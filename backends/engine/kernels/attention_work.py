"""The work list of paged attention in Triton. ``attention_work_ref`` is the definition.

One program lists the work of a step, 128 query blocks at a time, in three passes: the first pass
adds up the tiles, the second one counts the slots for each limit of whole pairs, and the last one
writes. Each pass computes the tiles of a block again from the lengths, which are in the first-level
cache, because threads would have to exchange them through memory.

The list depends on lengths and on the window, not on the layer, so a step needs one list for each
window. A graph can capture the list, because all sizes are known on the host.

Bytes: 4 per length, 20 per query block, 12 per program and 8 per token. A program with dependent
loads takes a few microseconds, once per step.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftgate.backends.engine.kernels import paged_attention_sizes as sizes
from draftgate.backends.engine.kernels.attention_work_ref import AttentionWork
from draftgate.backends.engine.kernels.paged_attention_ref import BlockTables, DraftTrees

_LANES: Final = 128
_LIMITS: Final = tl.constexpr(16)
"""Limits of whole pairs to choose from. The last one is 2^14 shares, which no pair exceeds with at
most 2^14 programs."""


@triton.jit
def _find_sequences(cu_ptr, blocks, num_sequences, BLOCK_Q: tl.constexpr):
    """Return the last sequence s of each block with ``cu[s] // BLOCK_Q + s`` <= block."""
    low = blocks * 0
    left = num_sequences
    while left > 1:
        middle = low + left // 2
        first = tl.load(cu_ptr + middle) // BLOCK_Q + middle
        low = tl.where(first <= blocks, middle, low)
        left -= left // 2
    return low


@triton.jit
def _load_blocks(
    cu_ptr,
    context_lens_ptr,
    draft_starts_ptr,
    blocks,
    num_blocks,
    num_sequences,
    BLOCK_Q: tl.constexpr,
    KEY_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    TREES: tl.constexpr,
):
    """Return sequence, first token, first query, tokens, first tile, tiles and splits of blocks.

    Blocks without tokens have no tokens and no tiles.
    """
    sequence = _find_sequences(cu_ptr, blocks, num_sequences, BLOCK_Q)
    begin = tl.load(cu_ptr + sequence)
    query_len = tl.load(cu_ptr + sequence + 1) - begin
    first_query = (blocks - begin // BLOCK_Q - sequence) * BLOCK_Q
    real = (blocks < num_blocks) & (first_query < query_len)
    context = tl.load(context_lens_ptr + sequence)
    first_position = context - query_len + first_query
    first_tile = blocks * 0
    if WINDOW > 0:
        oldest = first_position
        if TREES:
            oldest = tl.minimum(oldest, tl.load(draft_starts_ptr + sequence))
        first_tile = tl.where(real, tl.maximum(oldest - WINDOW + 1, 0) // KEY_TILE, 0)
    key_end = tl.minimum(context, first_position + BLOCK_Q)
    tiles = tl.where(real, tl.cdiv(key_end, KEY_TILE) - first_tile, 0)
    tokens = tl.where(real, tl.minimum(query_len - first_query, BLOCK_Q), 0)
    splits = tl.cdiv(first_tile + tiles, SPLIT // KEY_TILE) - first_tile // (SPLIT // KEY_TILE)
    return sequence, begin + first_query, first_query, tokens, first_tile, tiles, splits


@triton.jit
def _store_intervals(starts_ptr, blocks, before, tiles, share, total, programs):
    """Write the intervals of the line that begin in each block.

    ``before`` are the tiles of the line before each block, and ``tiles`` those of the block.
    """
    first = tl.cdiv(before, share)
    count = tl.cdiv(before + tiles, share) - first
    for start in range(0, tl.max(count, axis=0), 16):
        steps = start + tl.arange(0, 16)
        program = first[:, None] + steps[None, :]
        mask = (steps[None, :] < count[:, None]) & (program < programs)
        begin = program * share
        cells = starts_ptr + program * 3
        tl.store(cells, tl.broadcast_to(blocks[:, None], program.shape), mask=mask)
        tl.store(cells + 1, begin - before[:, None], mask=mask)
        tl.store(cells + 2, tl.minimum(total - begin, share), mask=mask)


@triton.jit
def _store_zeros(ptr, first, end, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Write zeros to rows ``first .. end - 1`` of WIDTH numbers."""
    for start in range(first * WIDTH, end * WIDTH, LANES):
        cells = start + tl.arange(0, LANES)
        tl.store(ptr + cells, cells * 0, mask=cells < end * WIDTH)


@triton.jit(
    do_not_specialize=[
        "tokens", "num_blocks", "num_sequences", "kv_heads", "programs", "slots",
    ]
)  # fmt: skip
def _work_kernel(
    blocks_ptr,
    starts_ptr,
    partials_ptr,
    cu_ptr,
    context_lens_ptr,
    draft_starts_ptr,
    tokens,
    num_blocks,
    num_sequences,
    kv_heads,
    programs,
    slots,
    BLOCK_Q: tl.constexpr,
    KEY_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    TREES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the work list of a step. The grid is (1)."""
    total = num_blocks * 0
    for first in range(0, num_blocks, LANES):
        _, _, _, _, _, tiles, _ = _load_blocks(
            cu_ptr, context_lens_ptr, draft_starts_ptr, first + tl.arange(0, LANES), num_blocks,
            num_sequences, BLOCK_Q, KEY_TILE, SPLIT, WINDOW, TREES,
        )  # fmt: skip
        total += tl.sum(tiles, axis=0)
    total *= kv_heads
    share = tl.maximum(tl.cdiv(total, programs), 1)
    limits = (share.to(tl.int64) << tl.arange(0, _LIMITS)) * 5 // 8
    needed = tl.zeros((_LIMITS,), tl.int32)
    for first in range(0, num_blocks, LANES):
        _, _, _, used, _, tiles, splits = _load_blocks(
            cu_ptr, context_lens_ptr, draft_starts_ptr, first + tl.arange(0, LANES), num_blocks,
            num_sequences, BLOCK_Q, KEY_TILE, SPLIT, WINDOW, TREES,
        )  # fmt: skip
        cut = (tiles[:, None] > limits[None, :]) & (splits[:, None] > 1)
        needed += tl.sum(tl.where(cut, (used * splits)[:, None], 0), axis=0)
    limit = tl.min(tl.where(needed <= slots, limits, limits + (1 << 62)), axis=0)
    before = num_blocks * 0
    slot = num_blocks * 0
    for first in range(0, num_blocks, LANES):
        blocks = first + tl.arange(0, LANES)
        sequence, token, first_query, used, first_tile, tiles, splits = _load_blocks(
            cu_ptr, context_lens_ptr, draft_starts_ptr, blocks, num_blocks, num_sequences,
            BLOCK_Q, KEY_TILE, SPLIT, WINDOW, TREES,
        )  # fmt: skip
        is_cut = (tiles > limit) & (splits > 1)
        cells, inside = blocks_ptr + blocks * 5, blocks < num_blocks
        tl.store(cells, tl.where(used > 0, sequence, 0), mask=inside)
        tl.store(cells + 1, tl.where(used > 0, first_query, 0), mask=inside)
        tl.store(cells + 2, first_tile, mask=inside)
        tl.store(cells + 3, tiles, mask=inside)
        tl.store(cells + 4, is_cut.to(tl.int32), mask=inside)
        line = tiles * kv_heads
        _store_intervals(
            starts_ptr, blocks, before + tl.cumsum(line, axis=0) - line, line, share, total,
            programs,
        )  # fmt: skip
        taken = tl.where(is_cut, used * splits, 0)
        first_slot = slot + tl.cumsum(taken, axis=0) - taken
        shown = tl.where(is_cut, splits, 0)
        for index in range(BLOCK_Q):
            cells = partials_ptr + (token + index) * 2
            tl.store(cells, first_slot * is_cut + index * shown, mask=index < used)
            tl.store(cells + 1, shown, mask=index < used)
        before += tl.sum(line, axis=0)
        slot += tl.sum(taken, axis=0)
    _store_zeros(starts_ptr, tl.cdiv(total, share), programs, 3, LANES)
    _store_zeros(partials_ptr, tl.load(cu_ptr + num_sequences), tokens, 2, LANES)


@triton.jit
def fresh_rows(record_ptr, ROWS: tl.constexpr):
    """Return the numbers 0 .. ROWS - 1, which the compiler does not recognise as constants.

    It would otherwise compute the addresses of rows before all loops, and hold them in registers.
    """
    return tl.arange(0, ROWS) + (tl.load(record_ptr + 1, volatile=True) >> 31)


@triton.jit
def block_rows(record_ptr, cu_query_lens_ptr, kv_head, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return the tokens and query heads of a block's rows [ROWS], and a validity mask."""
    BLOCK_Q: tl.constexpr = ROWS // GROUP
    # The loads are volatile to load the values again in each call. Both the start and the end of an
    # item need the values, which would hold registers in between.
    sequence = tl.load(record_ptr, volatile=True)
    first_query = tl.load(record_ptr + 1, volatile=True)
    begin = tl.load(cu_query_lens_ptr + sequence, volatile=True)
    query_len = tl.load(cu_query_lens_ptr + sequence + 1, volatile=True) - begin
    rows = fresh_rows(record_ptr, ROWS)
    in_sequence = first_query + rows // GROUP
    real = (rows < BLOCK_Q * GROUP) & (in_sequence < query_len)
    return begin + in_sequence, kv_head * GROUP + rows % GROUP, real


@triton.jit
def load_query(
    query_ptr,
    token,
    head,
    real,
    token_stride,
    head_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return the queries of the item's rows: [ROWS, HEAD_PAD], zero for padding rows."""
    dims = tl.arange(0, HEAD_PAD)
    cells = (token.to(tl.int64) * token_stride + head * head_stride)[:, None] + dims[None, :]
    mask = real[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(query_ptr + cells, mask=mask, other=0.0)
    return query.to(tl.float32) if UPCAST else query


@triton.jit
def block_keys(
    record_ptr,
    cu_query_lens_ptr,
    context_lens_ptr,
    BLOCK_Q: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """Return the positions outside which no row of a block sees keys: first, and end.

    Paths end before their slots.
    """
    # The loads are volatile for the same reason as those of `block_rows`.
    sequence = tl.load(record_ptr, volatile=True)
    begin = tl.load(cu_query_lens_ptr + sequence, volatile=True)
    query_len = tl.load(cu_query_lens_ptr + sequence + 1, volatile=True) - begin
    context = tl.load(context_lens_ptr + sequence, volatile=True)
    end_query = tl.minimum(tl.load(record_ptr + 1, volatile=True) + BLOCK_Q, query_len)
    first_key = tl.load(record_ptr + 2, volatile=True) * KEY_TILE
    return first_key, context - query_len + end_query


@triton.jit
def splits_of_interval(record_ptr, before, left, SPLIT_TILES: tl.constexpr):
    """Return the head, first split, end split and tiles of the pair at ``before`` of a block.

    ``left`` are the tiles of the interval from there on. See ``attention_work_ref.items_of``.
    """
    first_tile = tl.load(record_ptr + 2)
    tiles = tl.load(record_ptr + 3)
    is_cut = tl.load(record_ptr + 4) != 0
    kv_head = before // tl.maximum(tiles, 1)
    tile = before - kv_head * tiles
    taken = tl.minimum(tiles - tile, left)
    first_split = first_tile // SPLIT_TILES
    end_split = tl.cdiv(first_tile + tiles, SPLIT_TILES)
    if is_cut:
        if tile > 0:
            first_split = tl.cdiv(first_tile + tile, SPLIT_TILES)
        if tile + taken < tiles:
            end_split = tl.cdiv(first_tile + tile + taken, SPLIT_TILES)
    elif tile > 0:
        end_split = first_split
    return kv_head, first_split, end_split, taken


def plan_work(
    query: Tensor,
    layer_kv: Tensor,
    cu_query_lens: Tensor,
    context_lens: Tensor,
    block_tables: BlockTables,
    *,
    block_size: int,
    window: int | None = None,
    trees: DraftTrees | None = None,
    split_size: int = sizes.SPLIT_SIZE,
    programs: int | None = None,
    slots: int | None = None,
) -> AttentionWork:
    """List work as ``attention_work_ref.plan_work`` does, without a device synchronisation.

    Args:
      query, layer_kv, cu_query_lens, context_lens, block_tables, block_size, window, trees,
        split_size: the arguments of ``paged_attention``. The function reads only the lengths.
      programs: number of programs, at most 16,384. The default is what the device runs at once.
      slots: maximum number of slots. The default is what the longest table could need, with at
        most 128 MiB of scratch. 0 cuts no pair.
    """
    tokens, query_heads, head_dim = query.shape
    kv_heads, sequences = layer_kv.shape[0] // 2, context_lens.shape[0]
    group = query_heads // kv_heads
    tiles = sizes.tiles(query.dtype, layer_kv.dtype, head_dim, group)
    block_tokens = tiles.query_rows // group
    num_splits = triton.cdiv(block_tables.longest * block_size, split_size)
    num_blocks = tokens // block_tokens + sequences
    if slots is None:
        slots = sizes.scratch_slots(tokens, num_splits, query_heads, head_dim)
    if programs is None:
        most = max(1, num_blocks * kv_heads * num_splits)
        programs = min(most, sizes.resident_programs(query.device, tiles))

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=query.device)

    work = AttentionWork(empty(num_blocks, 5), empty(programs, 3), empty(tokens, 2), slots)
    _work_kernel[(1,)](
        *work[:3], cu_query_lens, context_lens, None if trees is None else trees.draft_starts,
        tokens, num_blocks, sequences, kv_heads, programs, slots,
        BLOCK_Q=block_tokens, KEY_TILE=sizes.KEY_TILE, SPLIT=split_size, WINDOW=window or 0,
        TREES=trees is not None, LANES=_LANES, num_warps=4, maxnreg=255,
    )  # fmt: skip
    return work
