"""The work list of paged attention in torch: which program attends which splits of which rows.

The query tokens of a sequence form blocks of ``block_tokens``. The keys that a block sees are tiles
of ``key_tile`` positions, and ``split_size`` positions are a split. A *pair* is a block and a
key-value head. The tiles of all pairs, with the heads of a block one after the other, form one
line. ``programs`` programs divide the line into equal intervals of

    share = ceil(tiles of all pairs / programs) tiles.

A pair is *whole* or *cut*. The program in whose interval a whole pair begins attends all of it. The
splits of a cut pair belong to the programs in whose intervals they begin, and write partial results
to slots, one for each token and split.

The limit of whole pairs is 5/8 of a share: a longer pair is cut if it has several splits. Two equal
pairs that nearly fill a program therefore stay whole, such as those of 64 sequences with 8 heads on
264 programs. If the cut pairs need more than ``slots`` slots, the limit doubles until they fit.
With enough slots, every program attends less than share + max(5/8 share, a split) tiles.

The list only distributes splits. Neither the sums of a split nor the order of the merge depends on
it, so the bits of a row do not depend on the other sequences.

Sources: the equal intervals are those of Stream-K (M. Osama et al., arXiv 2301.03598), as in the
scheduler of FlashInfer (Z. Ye et al., arXiv 2501.01005), with splits of a fixed size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class AttentionWork(NamedTuple):
    """A work list on the device of its step. The sizes of its tensors depend on no length.

    Attributes:
      blocks: int32 ``[query_blocks, 5]``, the sequence, first query token in the sequence, first
        tile, number of tiles, and whether the block is cut. Blocks without tokens have no tiles.
      starts: int32 ``[programs, 3]``, the block in which the program's interval begins, the tiles
        of this block before the interval, and the tiles of the interval.
      partials: int32 ``[tokens, 2]``, the first slot of a token and its number of splits. Tokens
        that are not in a cut block have no splits.
      slots: maximum number of slots.
    """

    blocks: Tensor
    starts: Tensor
    partials: Tensor
    slots: int


class Item(NamedTuple):
    """Splits of a pair that a program attends: ``first_split .. end_split - 1``."""

    block: int
    kv_head: int
    first_split: int
    end_split: int
    is_cut: bool


def plan_work(
    cu_query_lens: Tensor,
    context_lens: Tensor,
    draft_starts: Tensor | None,
    *,
    tokens: int,
    block_tokens: int,
    kv_heads: int,
    window: int | None,
    split_size: int,
    key_tile: int,
    programs: int,
    slots: int,
) -> AttentionWork:
    """List the work of attention.

    Args:
      cu_query_lens: int32 ``[sequences + 1]``.
      context_lens: int32 ``[sequences]``, tokens in the cache including this step's.
      draft_starts: int32 ``[sequences]``, confirmed tokens in the cache, or None without trees.
      tokens: query tokens of all sequences, and padding.
      block_tokens: query tokens of a block.
      kv_heads: key-value heads.
      window: positions that a row sees, including its own, or None for all.
      split_size: keys per split, a multiple of ``key_tile``.
      key_tile: keys per tile.
      programs: number of programs.
      slots: maximum number of slots.
    """
    starts = context_lens if draft_starts is None else draft_starts
    lens = zip(cu_query_lens.tolist(), context_lens.tolist(), starts.tolist(), strict=False)
    ends = cu_query_lens.tolist()[1:]
    blocks = torch.zeros((tokens // block_tokens + len(ends), 5), dtype=torch.int32)
    for sequence, (begin, context, draft_start) in enumerate(lens):
        query_len = ends[sequence] - begin
        for index, first in enumerate(range(0, query_len, block_tokens)):
            position = context - query_len + first
            oldest = 0 if window is None else max(0, min(position, draft_start) - window + 1)
            tiles = -(-min(context, position + block_tokens) // key_tile) - oldest // key_tile
            row = torch.tensor([sequence, first, oldest // key_tile, tiles, 0])
            blocks[begin // block_tokens + sequence + index] = row
    total = kv_heads * int(blocks[:, 3].sum())
    share = max(1, -(-total // programs))
    partials = _cut(
        blocks, cu_query_lens, share, tokens, block_tokens, split_size // key_tile, slots
    )
    intervals = _intervals(blocks[:, 3] * kv_heads, share, total, programs)
    return AttentionWork(blocks, intervals, partials, slots)


def _cut(
    blocks: Tensor,
    cu_query_lens: Tensor,
    share: int,
    tokens: int,
    block_tokens: int,
    split_tiles: int,
    slots: int,
) -> Tensor:
    """Mark the blocks to cut, and return the slots of their tokens, int32 [tokens, 2]."""
    bounds = cu_query_lens.tolist()
    spans, splits = [], []
    for sequence, first, first_tile, tiles, _ in blocks.tolist():
        begin = bounds[sequence] + first
        spans.append(range(begin, min(bounds[sequence + 1], begin + block_tokens)))
        splits.append(-(-(first_tile + tiles) // split_tiles) - first_tile // split_tiles)
    level = 0
    while True:
        limit = (share << level) * 5 // 8
        cut = [
            tiles > limit and n > 1 for tiles, n in zip(blocks[:, 3].tolist(), splits, strict=True)
        ]
        needed = sum(len(s) * n for s, n, is_cut in zip(spans, splits, cut, strict=True) if is_cut)
        if needed <= slots:
            break
        level += 1
    partials = torch.zeros((tokens, 2), dtype=torch.int32)
    blocks[:, 4] = torch.tensor(cut)
    slot = 0
    for span, count, is_cut in zip(spans, splits, cut, strict=True):
        for token in span if is_cut else ():
            partials[token] = torch.tensor([slot, count])
            slot += count
    return partials


def _intervals(tiles: Tensor, share: int, total: int, programs: int) -> Tensor:
    """Return ``starts``, given the tiles of all heads of each block."""
    ends = tiles.cumsum(0).tolist()
    starts = torch.zeros((programs, 3), dtype=torch.int32)
    for program in range(-(-total // share)):
        begin = program * share
        block = next(index for index, end in enumerate(ends) if end > begin)
        before = begin - (ends[block] - int(tiles[block]))
        starts[program] = torch.tensor([block, before, min(share, total - begin)])
    return starts


def items_of(
    work: AttentionWork, program: int, *, kv_heads: int, split_tiles: int
) -> Iterator[Item]:
    """Yield what a program attends, in order."""
    block, before, left = work.starts[program].tolist()
    while left > 0:
        _, _, first_tile, tiles, is_cut = work.blocks[block].tolist()
        end = min(before + left, kv_heads * tiles)
        while before < end:
            head, tile = divmod(before, tiles)
            taken = min(tiles - tile, end - before)
            first, last = first_tile // split_tiles, -(-(first_tile + tiles) // split_tiles)
            if is_cut:
                if tile > 0:
                    first = -(-(first_tile + tile) // split_tiles)
                if tile + taken < tiles:
                    last = -(-(first_tile + tile + taken) // split_tiles)
            elif tile > 0:
                last = first
            if first < last:
                yield Item(block, head, first, last, bool(is_cut))
            before, left = before + taken, left - taken
        block, before = block + 1, 0
