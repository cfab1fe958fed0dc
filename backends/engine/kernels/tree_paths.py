"""Positions and slots on the paths of draft trees in Triton. ``tree_paths_ref`` is the definition.

Attention inlines these functions, which read and write no memory.

A product adds keys in the order of their places in the tile. If a path has gaps, a mask over
the slots of a tree would therefore give other bits than a chain. To avoid this, the program reads
tiles that reach beyond ``draft_starts`` once for each leaf among its rows. It gathers the keys of
the leaf's path to their *positions*. The draft token of the d-th set bit of the ancestor mask has
position draft_start + d. Rows of other leaves see none of these keys. Every row of
every branch therefore has the bits of its path as a chain. All rows share the earlier tiles. Each
leaf after the first costs 1 or 2 more tiles, because a path of up to 64 tokens touches two tiles. A
chain has one leaf.

Ancestor masks are from SpecInfer (arXiv 2305.09781).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def leaves_of_rows(ancestors, real, ROWS: tl.constexpr):
    """Find leaves as ``tree_paths_ref.leaves_of_rows`` does.

    The shapes are ancestors int64 [ROWS] and real int1 [ROWS].
    """
    rows = tl.arange(0, ROWS)
    descends = real[None, :] & ((ancestors[:, None] & ~ancestors[None, :]) == 0)
    return tl.max(tl.where(descends, rows[None, :], -1), axis=1)


@triton.jit
def _popcounts(bits):
    """Count the bits that are set in each field of 2, 4, 8, 16 and all 32 bits of an int32."""
    by_2 = bits - ((bits >> 1) & 0x55555555)
    by_4 = (by_2 & 0x33333333) + ((by_2 >> 2) & 0x33333333)
    by_8 = (by_4 + (by_4 >> 4)) & 0x0F0F0F0F
    by_16 = (by_8 + (by_8 >> 8)) & 0x00FF00FF
    return by_2, by_4, by_8, by_16, (by_16 + (by_16 >> 16)) & 0xFF


@triton.jit
def _skip(bit, rank, counts, WIDTH: tl.constexpr):
    """Skip WIDTH bits if at most ``rank`` of these bits are set.

    Reduce the rank by the number of skipped set bits.
    """
    count = (counts >> bit) & (WIDTH * 2 - 1)
    passes = rank >= count
    return tl.where(passes, bit + WIDTH, bit), tl.where(passes, rank - count, rank)


@triton.jit
def _place_of_bit(path, rank):
    """Return the index of set bit number ``rank`` (int32 of any shape, from 0) of an int64.

    The search descends by the counts of set bits in fields of 32, 16, ... 1 bits, which takes six
    steps and few registers. The result is arbitrary if the int64 has fewer set bits. Source: S.
    Anderson, "Bit twiddling hacks".
    """
    low = path.to(tl.int32)
    high = (path >> 32).to(tl.int32)
    low_2, low_4, low_8, low_16, low_32 = _popcounts(low)
    high_2, high_4, high_8, high_16, _ = _popcounts(high)
    in_high = rank >= low_32
    rank = tl.where(in_high, rank - low_32, rank)
    bit = rank * 0
    bit, rank = _skip(bit, rank, tl.where(in_high, high_16, low_16), 16)
    bit, rank = _skip(bit, rank, tl.where(in_high, high_8, low_8), 8)
    bit, rank = _skip(bit, rank, tl.where(in_high, high_4, low_4), 4)
    bit, rank = _skip(bit, rank, tl.where(in_high, high_2, low_2), 2)
    bit, rank = _skip(bit, rank, tl.where(in_high, high, low), 1)
    return tl.where(in_high, bit + 32, bit)


@triton.jit
def path_slots(positions, draft_start, path):
    """Find slots as ``tree_paths_ref.path_slots`` does.

    The arguments are positions, int32 of any shape, and path, an int64 scalar.
    """
    draft = _place_of_bit(path, positions - draft_start)
    return tl.where(positions < draft_start, positions, draft_start + draft)
