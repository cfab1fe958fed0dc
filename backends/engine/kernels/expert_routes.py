"""The choice of experts and the grouping of rows by expert in Triton, without a synchronisation.

``expert_routes_ref`` is the definition.

``route`` has a program per row, which holds all logits and takes the largest one ``per_row`` times.
The bits of a row depend only on its logits.

``group`` has a program per 64 pairs. It counts all pairs and the earlier ones by expert, 1,024 of
them at a time. The place of a pair is the number of pairs of lower experts, of earlier pairs of its
expert, and of those among its 64. Counts are whole numbers, so their order changes no bit. A launch
of 16,384 pairs (2,048 rows of 8 experts) counts 4 million pairs twice. Comparisons of all pairs,
as in an earlier version, would be 270 million. More launches would count fewer, and lengthen every
decode.

Bytes: 4 per logit, and 24 per pair. Launches bound the time of a decode.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftgate.backends.engine.kernels.expert_routes_ref import Groups, Routes

_PAIRS: Final = 64
_COUNTED: Final = 1024
"""Pairs of a program, and pairs that it counts at once. The sizes are not timed on a GPU. With 128
experts a thread has 72 registers (sm_90, Triton 3.7, 2026-11-27)."""


@triton.jit
def _route_kernel(
    experts_ptr,
    shares_ptr,
    logits_ptr,
    live_rows_ptr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    PER_ROW: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    NORMALISED: tl.constexpr,
):
    """Write the experts and shares of a row. The grid is (rows)."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, EXPERTS_PAD)
    inside = ids < NUM_EXPERTS
    logits = tl.load(logits_ptr + row * NUM_EXPERTS + ids, mask=inside, other=float("-inf"))
    weights = tl.exp(logits - tl.max(logits, axis=0))
    left = tl.where(inside, tl.div_rn(weights, tl.sum(weights, axis=0)), -1.0)
    ranks = tl.arange(0, RANKS_PAD)
    experts = tl.zeros((RANKS_PAD,), tl.int32)
    shares = tl.zeros((RANKS_PAD,), tl.float32)
    for rank in tl.static_range(PER_ROW):
        best = tl.max(left, axis=0)
        expert = tl.min(tl.where(left == best, ids, EXPERTS_PAD), axis=0)
        experts = tl.where(ranks == rank, expert, experts)
        shares = tl.where(ranks == rank, best, shares)
        left = tl.where(ids == expert, -1.0, left)
    if NORMALISED:
        shares = tl.div_rn(shares, tl.sum(shares, axis=0))
    experts = tl.where(row < tl.load(live_rows_ptr), experts, NUM_EXPERTS)
    cells, used = row * PER_ROW + ranks, ranks < PER_ROW
    tl.store(experts_ptr + cells, experts, mask=used)
    tl.store(shares_ptr + cells, shares, mask=used)


@triton.jit(do_not_specialize=["pairs"])
def _group_kernel(
    places_ptr,
    sources_ptr,
    starts_ptr,
    tiles_ptr,
    experts_ptr,
    pairs,
    NUM_EXPERTS: tl.constexpr,
    ENDS_PAD: tl.constexpr,
    PAIRS: tl.constexpr,
    COUNTED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Write the places of PAIRS pairs. The first program also writes the starts and tiles.

    The grid is (blocks of pairs).
    """
    first = tl.program_id(0) * PAIRS
    counts = tl.zeros((ENDS_PAD,), tl.int32)
    earlier = tl.zeros((ENDS_PAD,), tl.int32)
    for counted in range(0, pairs, COUNTED):
        others = counted + tl.arange(0, COUNTED)
        other = tl.load(experts_ptr + others, mask=others < pairs, other=0)
        counts += tl.histogram(other, ENDS_PAD, mask=others < pairs)
        earlier += tl.histogram(other, ENDS_PAD, mask=others < tl.minimum(first, pairs))
    starts = tl.cumsum(counts, axis=0) - counts
    own = first + tl.arange(0, PAIRS)
    expert = tl.load(experts_ptr + own, mask=own < pairs, other=NUM_EXPERTS)
    same = expert[None, :] == expert[:, None]
    rank = tl.sum((same & (own[None, :] < own[:, None])).to(tl.int32), axis=1)
    place = tl.gather(starts + earlier, expert, axis=0) + rank
    tl.store(places_ptr + own, place, mask=own < pairs)
    tl.store(sources_ptr + place, own, mask=own < pairs)
    if first == 0:
        ids = tl.arange(0, ENDS_PAD)
        tiles = tl.where(ids < NUM_EXPERTS, (counts + TILE_ROWS - 1) // TILE_ROWS, 0)
        first_tile = tl.cumsum(tiles, axis=0) - tiles
        tl.store(starts_ptr + ids, starts, mask=ids <= NUM_EXPERTS)
        tl.store(tiles_ptr + ids, first_tile, mask=ids <= NUM_EXPERTS)


def route(logits: Tensor, per_row: int, live_rows: Tensor, *, normalised: bool) -> Routes:
    """Choose experts as ``expert_routes_ref.route`` does, without a device synchronisation.

    Args:
      logits: float32 ``[rows, num_experts]``, contiguous and finite.
      per_row: number of experts of a row, at most ``num_experts``.
      live_rows: int32 ``[1]``, the number of rows before the padding.
      normalised: whether the shares of a row add up to 1.

    Raises:
      ValueError: the logits have another dtype or layout, or ``per_row`` is too large.
    """
    rows, num_experts = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError("route needs contiguous logits in float32")
    if not 1 <= per_row <= num_experts:
        raise ValueError(f"a row cannot have {per_row} of {num_experts} experts")
    experts = torch.empty((rows, per_row), dtype=torch.int32, device=logits.device)
    shares = torch.empty((rows, per_row), dtype=torch.float32, device=logits.device)
    if rows:
        _route_kernel[(rows,)](
            experts,
            shares,
            logits,
            live_rows,
            NUM_EXPERTS=num_experts,
            EXPERTS_PAD=triton.next_power_of_2(num_experts),
            PER_ROW=per_row,
            RANKS_PAD=triton.next_power_of_2(per_row),
            NORMALISED=normalised,
            num_warps=1,
        )
    return Routes(experts, shares)


def group(experts: Tensor, num_experts: int, tile_rows: int) -> Groups:
    """Group pairs as ``expert_routes_ref.group`` does, without a device synchronisation.

    Args:
      experts: int32 ``[rows, per_row]``, contiguous, from ``route``.
      num_experts: number of experts.
      tile_rows: number of pairs of a tile.

    Raises:
      ValueError: the experts have another dtype or layout.
    """
    if experts.dtype != torch.int32 or not experts.is_contiguous():
        raise ValueError("group needs contiguous experts in int32")
    pairs = experts.numel()

    def empty(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device=experts.device)

    groups = Groups(empty(pairs), empty(pairs), empty(num_experts + 1), empty(num_experts + 1))
    _group_kernel[(max(1, triton.cdiv(pairs, _PAIRS)),)](
        *groups,
        experts,
        pairs,
        NUM_EXPERTS=num_experts,
        ENDS_PAD=triton.next_power_of_2(num_experts + 1),
        PAIRS=_PAIRS,
        COUNTED=_COUNTED,
        TILE_ROWS=tile_rows,
        num_warps=4,
    )
    return groups
