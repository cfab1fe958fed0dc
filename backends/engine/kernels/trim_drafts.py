"""Draft slots of a step under a budget, in Triton; the definition is in ``trim_drafts_ref``.

One program holds all survivals in registers (32 per thread at most), so a step needs one launch and
no scratch:

1. The cut-off is the budget-th largest survival. Positive floats are ordered like their bit
   patterns, so bisection finds it exactly, in 31 counts at most.
2. Survivals above it are kept. Of those equal to it, which tables make common, whole slots are kept
   from the first on, and of the slot where the budget ends the first sequences.

All counts are integers: the result depends on no order of summation.

Bytes: 4 per slot and 17 per sequence, once. Floor: 512 sequences of 64 slots are 0.13 MB, 0.03 us
at 4.8 TB/s; one multiprocessor reads them in about 2 us, and the counts are what takes time.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from draftgate.backends.engine.kernels.trim_drafts_ref import TrimmedDrafts

MAX_PADDED_SLOTS: Final = 1 << 15
"""Most slots of all sequences, both sizes rounded up to powers of two: 512 sequences of 64."""

_SLOTS_PER_WARP: Final = 1024


@triton.jit
def _cutoff(keys, budget):
    """Returns the largest key (int32) that at least ``budget`` keys reach, 0 if too few do.

    Keeps the invariant count(low) >= budget > count(high), but for low = 0, which all may reach,
    and for budgets below 1, under which ``low`` ends at the largest key.
    """
    low = budget * 0
    high = tl.max(keys) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum((keys >= middle).to(tl.int32)) >= budget
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _trim_drafts_kernel(
    kept_ptr,
    cu_rows_ptr,
    survivals_ptr,
    valid_ptr,
    active_ptr,
    budget_ptr,
    row_stride,
    num_sequences,
    num_slots,
    SEQUENCES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """One program for the whole batch."""
    sequences = tl.arange(0, SEQUENCES)
    slots = tl.arange(0, SLOTS)
    listed = sequences < num_sequences
    active = tl.load(active_ptr + sequences, mask=listed, other=0) != 0
    valid = tl.load(valid_ptr + sequences, mask=active, other=0)
    read = slots[None, :] < tl.minimum(valid, num_slots)[:, None]
    cells = sequences.to(tl.int64)[:, None] * row_stride + slots[None, :]
    survivals = tl.load(survivals_ptr + cells, mask=read, other=0.0)
    # A key is positive where there is a slot: not for 0.0, -0.0 and less.
    keys = survivals.to(tl.int32, bitcast=True)
    budget = tl.load(budget_ptr)
    cutoff = _cutoff(keys, budget)

    # Where budget is left there are no ties: no key is -1, the pattern of a NaN.
    tie = tl.where(cutoff > 0, cutoff, -1)
    ties = budget - tl.sum((keys > cutoff).to(tl.int32))
    per_slot = tl.sum((keys == tie).to(tl.int32), axis=0)
    last_slot = tl.sum((tl.cumsum(per_slot, axis=0) < ties).to(tl.int32), axis=0)
    # Comparisons again, instead of what they gave: half the registers.
    whole = (slots < last_slot)[None, :] & (keys == tie)
    kept = tl.sum(((keys > cutoff) | whole).to(tl.int32), axis=1)
    of_last = tl.sum(((slots == last_slot)[None, :] & (keys == tie)).to(tl.int32), axis=1)
    rank = tl.sum(tl.where(slots < last_slot, per_slot, 0), axis=0) + tl.cumsum(of_last, axis=0)
    kept += tl.where(rank <= ties, of_last, 0)

    ends = tl.cumsum(tl.where(active, 1 + kept, 0), axis=0)
    tl.store(kept_ptr + sequences, kept, mask=listed)
    tl.store(cu_rows_ptr, 0)
    tl.store(cu_rows_ptr + 1 + sequences, ends, mask=listed)


def trim_drafts(
    survivals: torch.Tensor, valid: torch.Tensor, active: torch.Tensor, budget: torch.Tensor
) -> TrimmedDrafts:
    """As ``trim_drafts_ref.trim_drafts``; never synchronises with the device.

    Args:
      survivals: float32 ``[sequences, max_slots]``, unit last stride, never rising along a row.
      valid: int32 ``[sequences]``.
      active: int8 or bool ``[sequences]``.
      budget: int32 scalar on the device.

    Returns:
      The kept slots and the rows that they make.

    Raises:
      ValueError: more slots than ``MAX_PADDED_SLOTS``, or a layout that would be read wrongly.
    """
    sequences, max_slots = survivals.shape
    padded = triton.next_power_of_2(max(sequences, 1)), triton.next_power_of_2(max(max_slots, 1))
    cells = padded[0] * padded[1]
    if cells > MAX_PADDED_SLOTS:
        raise ValueError(f"{sequences} sequences of {max_slots} slots do not fit one program")
    if max_slots > 1 and survivals.stride(1) != 1:
        raise ValueError("the survivals of a sequence need to be contiguous")
    if not (valid.is_contiguous() and active.is_contiguous()):
        raise ValueError("tensors of one dimension need to be contiguous")
    kept = torch.empty(sequences, dtype=torch.int32, device=survivals.device)
    cu_rows = torch.empty(sequences + 1, dtype=torch.int32, device=survivals.device)
    _trim_drafts_kernel[(1,)](
        kept,
        cu_rows,
        survivals,
        valid,
        active,
        budget,
        survivals.stride(0),
        sequences,
        max_slots,
        SEQUENCES=padded[0],
        SLOTS=padded[1],
        num_warps=max(1, cells // _SLOTS_PER_WARP),
    )
    return TrimmedDrafts(kept, cu_rows)
