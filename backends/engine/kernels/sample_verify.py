"""Sampling in Triton. ``sample_verify_ref`` is the definition.

Three kernels draw a token. No kernel writes a tensor of the size of the logits:

* ``_cutoff_kernel``, with a program per row, finds the last pair (logit, id) that top-k and top-p
  keep, and the min-p floor. A row without filters costs four scalar loads. The kernel searches the
  cut-off logit over the ordered bit patterns of float32, with four pivots per pass. The search
  takes at most 14 passes of 4V bytes, from cache after the first pass. Threads add up their own
  tokens, and exchange their integer sums once per pass. A further pass cuts ties by id.
* ``_tile_winner_kernel``, with the grid (rows, tiles), finds (max, argmax) of ``logits / T + g``
  over the kept tokens of a tile. The kernel reads 4V bytes per row once and writes 8 bytes per
  tile. Greedy rows draw nothing.
* ``_row_winner_kernel``, with a program per row, reduces the tiles, lowest id first.

``accept_walk`` then compares samples with drafts.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftgate.backends.engine.kernels import noise
from draftgate.backends.engine.kernels.noise_triton import gumbel_tile, noise_key
from draftgate.backends.engine.kernels.sample_verify_ref import MASS_UNIT, RowSampling

_PURPOSE_OUTPUT: Final = tl.constexpr(noise.PURPOSE_OUTPUT)
_MASS_UNIT: Final = tl.constexpr(MASS_UNIT)


@triton.jit
def _float_of_key(key):
    """Return the float32 whose place in the order of floats is ``key`` (int64)."""
    bits = tl.where(key >= 0, key, key ^ 0x7FFFFFFF)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _key_of_float(value):
    """Return an int64 that orders like ``value``, the inverse of ``_float_of_key``."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _load_tile(row_ptr, first, vocab, TILE: tl.constexpr):
    """Load a tile of logits: (ids int32 [TILE], logits float32 [TILE], -inf beyond the end)."""
    ids = first + tl.arange(0, TILE)
    logits = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf"))
    return ids, logits.to(tl.float32)


@triton.jit
def _weight(logits, temperature, top, BY_MASS: tl.constexpr):
    """Return the int64 weight of tokens: 1, or ``floor(exp(logits / T - top) * 2**40)``."""
    if BY_MASS:
        weight = (tl.exp(tl.div_rn(logits, temperature) - top) * _MASS_UNIT).to(tl.int64)
    else:
        weight = (logits == logits).to(tl.int64)
    return weight


@triton.jit
def _row_max(row_ptr, vocab, TILE: tl.constexpr):
    best = tl.full([TILE], float("-inf"), tl.float32)
    first = vocab * 0
    while first < vocab:
        _, logits = _load_tile(row_ptr, first, vocab, TILE)
        best = tl.maximum(best, logits)
        first += TILE
    return tl.max(best, axis=0)


@triton.jit
def _weight_above(
    row_ptr, vocab, temperature, top, logit, BY_MASS: tl.constexpr, TILE: tl.constexpr
):
    """Return the weight of the tokens whose logit is greater than ``logit``."""
    total = tl.zeros([TILE], tl.int64)
    first = vocab * 0
    while first < vocab:
        _, logits = _load_tile(row_ptr, first, vocab, TILE)
        weight = _weight(logits, temperature, top, BY_MASS)
        total += tl.where(logits > logit, weight, 0)
        first += TILE
    return tl.sum(total, axis=0)


@triton.jit
def _search_logit(
    row_ptr,
    vocab,
    temperature,
    top,
    target,
    low,
    high,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the largest logit x such that tokens with logit >= x weigh at least ``target``.

    The invariant is weight(low) >= target > weight(high), on ordered bit patterns (int64).
    """
    while high - low > 1:
        width = high - low
        pivot_1 = _float_of_key(low + width // 5)
        pivot_2 = _float_of_key(low + width * 2 // 5)
        pivot_3 = _float_of_key(low + width * 3 // 5)
        pivot_4 = _float_of_key(low + width * 4 // 5)
        # Each thread adds up its own tokens, so that threads wait for each other only at the end
        # of a pass. A tensor [TILE, 4] would need another layout, and exchange every tile between
        # threads.
        sums_1 = tl.zeros([TILE], tl.int64)
        sums_2 = tl.zeros([TILE], tl.int64)
        sums_3 = tl.zeros([TILE], tl.int64)
        sums_4 = tl.zeros([TILE], tl.int64)
        first = vocab * 0
        while first < vocab:
            ids, logits = _load_tile(row_ptr, first, vocab, TILE)
            weight = tl.where(ids < vocab, _weight(logits, temperature, top, BY_MASS), 0)
            sums_1 += tl.where(logits >= pivot_1, weight, 0)
            sums_2 += tl.where(logits >= pivot_2, weight, 0)
            sums_3 += tl.where(logits >= pivot_3, weight, 0)
            sums_4 += tl.where(logits >= pivot_4, weight, 0)
            first += TILE
        # Weights fall from pivot to pivot, so the number of heavy pivots selects the interval.
        heavy = (tl.sum(sums_1, axis=0) >= target).to(tl.int64)
        heavy += (tl.sum(sums_2, axis=0) >= target).to(tl.int64)
        heavy += (tl.sum(sums_3, axis=0) >= target).to(tl.int64)
        heavy += (tl.sum(sums_4, axis=0) >= target).to(tl.int64)
        high = tl.where(heavy < 4, low + width * (heavy + 1) // 5, high)
        low = low + width * heavy // 5
    return _float_of_key(low)


@triton.jit
def _tie_id(row_ptr, vocab, logit, rank, TILE: tl.constexpr):
    """Return the id of the ``rank``-th token (from 1, by id) whose logit is ``logit``."""
    found = vocab
    before = rank * 0
    first = vocab * 0
    while first < vocab:
        ids, logits = _load_tile(row_ptr, first, vocab, TILE)
        equal = (logits == logit) & (ids < vocab)
        order = before + tl.cumsum(equal.to(tl.int64), axis=0)
        found = tl.minimum(found, tl.min(tl.where(equal & (order == rank), ids, vocab), axis=0))
        before += tl.sum(equal.to(tl.int64), axis=0)
        # Stop at the first tile with the token.
        first = tl.where(found < vocab, vocab, first + TILE)
    return found


@triton.jit
def _cutoff_kernel(
    logits_ptr,
    row_stride,
    vocab,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    cut_logit_ptr,
    cut_id_ptr,
    floor_ptr,
    TILE: tl.constexpr,
):
    """Write the last kept pair (float32 logit, int32 id) and the float32 floor.

    The grid is (rows).
    """
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    has_top_k = (top_k > 0) & (top_k < vocab)
    has_top_p = top_p < 1.0
    has_filter = (has_top_k | has_top_p | (min_p > 0.0)) & (temperature > 0.0)

    cut_logit = tl.full([], float("-inf"), tl.float32)
    cut_id = vocab
    floor = tl.full([], float("-inf"), tl.float32)
    if has_filter:
        best = _row_max(row_ptr, vocab, TILE)
        top = tl.div_rn(best, temperature)
        if min_p > 0.0:
            floor = top + tl.log(min_p)
        if has_top_k:
            target = top_k.to(tl.int64)
            cut_logit = _search_logit(
                row_ptr, vocab, temperature, top, target,
                _key_of_float(cut_logit), _key_of_float(best) + 1,
                False, TILE,
            )  # fmt: skip
            above = _weight_above(row_ptr, vocab, temperature, top, cut_logit, False, TILE)
            ties = target - above
            cut_id = _tie_id(row_ptr, vocab, cut_logit, ties, TILE)
        else:
            ties = vocab.to(tl.int64)
        if has_top_p:
            above = _weight_above(row_ptr, vocab, temperature, top, cut_logit, True, TILE)
            # Without top-k, the ties are tokens at -inf, whose weight is 0.
            total = above + ties * _weight(cut_logit, temperature, top, True)
            target = _mass_target(top_p, total)
            cut_logit = _search_logit(
                row_ptr, vocab, temperature, top, target,
                _key_of_float(cut_logit), _key_of_float(best) + 1,
                True, TILE,
            )  # fmt: skip
            above = _weight_above(row_ptr, vocab, temperature, top, cut_logit, True, TILE)
            weight = tl.maximum(_weight(cut_logit, temperature, top, True), 1)
            ties = (target - above + weight - 1) // weight
            cut_id = _tie_id(row_ptr, vocab, cut_logit, ties, TILE)
    tl.store(cut_logit_ptr + row, cut_logit)
    tl.store(cut_id_ptr + row, cut_id)
    tl.store(floor_ptr + row, floor)


@triton.jit
def _mass_target(top_p, total):
    """Return ``max(1, ceil(p * total))`` in double precision, as the reference does."""
    product = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(product, 1), total)


@triton.jit
def _tile_winner_kernel(
    logits_ptr,
    row_stride,
    vocab,
    temperature_ptr,
    seed_ptr,
    choice_ptr,
    position_ptr,
    cut_logit_ptr,
    cut_id_ptr,
    floor_ptr,
    tile_max_ptr,
    tile_arg_ptr,
    TILE: tl.constexpr,
):
    """Write the best score of a tile and the lowest id with that score.

    The grid is (rows, tiles).
    """
    row = tl.program_id(0)
    tile = tl.program_id(1)
    first = tile * TILE
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    ids, logits = _load_tile(row_ptr, first, vocab, TILE)
    temperature = tl.load(temperature_ptr + row)
    scores = logits
    if temperature > 0.0:
        cut_logit = tl.load(cut_logit_ptr + row)
        cut_id = tl.load(cut_id_ptr + row)
        floor = tl.load(floor_ptr + row)
        key = noise_key(tl.load(seed_ptr + row), tl.load(choice_ptr + row))
        position = tl.load(position_ptr + row)
        scaled = tl.div_rn(logits, temperature)
        kept = (logits > cut_logit) | ((logits == cut_logit) & (ids <= cut_id))
        kept = kept & (scaled >= floor) & (ids < vocab)
        scores = tl.where(kept, scaled, float("-inf"))
        # After top-p, few tiles have a token left, and noise takes most of the time.
        if tl.max(scores, axis=0) > float("-inf"):
            scores += gumbel_tile(key, position, _PURPOSE_OUTPUT, first, TILE)
    best, offset = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    slot = row.to(tl.int64) * tl.num_programs(1) + tile
    tl.store(tile_max_ptr + slot, best)
    tl.store(tile_arg_ptr + slot, first + offset)


@triton.jit
def _row_winner_kernel(tile_max_ptr, tile_arg_ptr, num_tiles, token_ptr, TILES: tl.constexpr):
    """Write the token (int64) of the best tile, the first among equals. The grid is (rows)."""
    row = tl.program_id(0)
    tiles = tl.arange(0, TILES)
    slots = row.to(tl.int64) * num_tiles + tiles
    scores = tl.load(tile_max_ptr + slots, mask=tiles < num_tiles, other=float("-inf"))
    _, winner = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    winner = tl.minimum(winner, num_tiles - 1)  # the logits of a row of padding may be NaN
    token = tl.load(tile_arg_ptr + row.to(tl.int64) * num_tiles + winner)
    tl.store(token_ptr + row, token.to(tl.int64))


def sample(logits: Tensor, rows: RowSampling, *, tile: int = 4096) -> Tensor:
    """Sample as ``sample_verify_ref.sample`` does, without a device synchronisation.

    The kernels read each logit once. Rows with top-k or top-p read their logits again from cache
    during the search.

    Args:
      logits: float32, bfloat16 or float16 ``[rows, vocab]``, unit stride along the vocabulary, not
        modified.
      rows: parameters per row, with the dtypes of ``RowSampling``.
      tile: logits per program, a power of two. The value does not change the result.

    Returns:
      The token of every row, int64 ``[rows]``.
    """
    num_rows, vocab = logits.shape
    num_tiles = triton.cdiv(vocab, tile)
    device = logits.device
    cut_logit = torch.empty(num_rows, dtype=torch.float32, device=device)
    cut_id = torch.empty(num_rows, dtype=torch.int32, device=device)
    floor = torch.empty(num_rows, dtype=torch.float32, device=device)
    tile_max = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=device)
    tile_arg = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return tokens
    _cutoff_kernel[(num_rows,)](
        logits,
        logits.stride(0),
        vocab,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        cut_logit,
        cut_id,
        floor,
        # 4 logits per thread and as many warps as fit without spilled registers: a row alone on its
        # multiprocessor needs the loads of all warps in flight (sm_90, Triton 3.6, 2026-11-27).
        TILE=min(tile, 2048),
        num_warps=16,
    )
    _tile_winner_kernel[(num_rows, num_tiles)](
        logits,
        logits.stride(0),
        vocab,
        rows.temperature,
        rows.seed,
        rows.choice,
        rows.position,
        cut_logit,
        cut_id,
        floor,
        tile_max,
        tile_arg,
        TILE=tile,
        num_warps=8,
    )
    _row_winner_kernel[(num_rows,)](
        tile_max, tile_arg, num_tiles, tokens, TILES=triton.next_power_of_2(num_tiles)
    )
    return tokens
