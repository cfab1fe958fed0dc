"""Acceptance of tree drafts in Triton. ``accept_walk_ref`` is the definition.

A warp per sequence holds the sequence's rows in registers. The warp first finds all rows that the
walk can reach: the draft equals the sample of its parent, and that sample does not end the
sequence. Each emitted token then costs a minimum over the rows, a few shuffles.

The kernel reads 20 bytes and writes 12 bytes per row (sample 8, draft 8, parent 4; token 8, kept
row 4), and moves about 17 bytes per sequence. 512 sequences of 9 rows are 0.16 MB, which takes at
least 0.03 us at 4.8 TB/s. The launch therefore dominates.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftgate.backends.engine.kernels.accept_walk_ref import (
    NO_DRAFT,
    NO_ROW,
    AcceptedWalk,
    StopRules,
)

_NO_DRAFT: Final = tl.constexpr(NO_DRAFT)
_NO_ROW: Final = tl.constexpr(NO_ROW)


@triton.jit
def _accept_walk_kernel(
    emitted_ptr,
    num_emitted_ptr,
    kept_rows_ptr,
    sampled_ptr,
    draft_tokens_ptr,
    draft_parents_ptr,
    cu_rows_ptr,
    remaining_ptr,
    eos_ptr,
    ignore_eos_ptr,
    NUM_EOS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Walk one sequence per program of one warp. The grid is (sequences)."""
    sequence = tl.program_id(0)
    begin = tl.load(cu_rows_ptr + sequence)
    num_rows = tl.load(cu_rows_ptr + sequence + 1) - begin
    remaining = tl.load(remaining_ptr + sequence)
    stops_at_eos = tl.load(ignore_eos_ptr + sequence) == 0

    rows = tl.arange(0, ROWS)
    inside = rows < num_rows
    has_parent = inside & (rows > 0)
    sampled = tl.load(sampled_ptr + begin + rows, mask=inside, other=_NO_DRAFT)
    draft = tl.load(draft_tokens_ptr + begin + rows, mask=has_parent, other=_NO_DRAFT)
    parent = tl.load(draft_parents_ptr + begin + rows, mask=has_parent, other=_NO_ROW)
    before = tl.load(sampled_ptr + begin + parent, mask=has_parent, other=_NO_DRAFT)
    reached = has_parent & (draft == before)
    for index in tl.static_range(NUM_EOS):
        reached = reached & ~(stops_at_eos & (before == tl.load(eos_ptr + index)))
    parent = tl.where(reached, parent, _NO_ROW)

    order = tl.full([ROWS], -1, tl.int32)
    count = num_rows * 0
    row = num_rows * 0
    # A walk is never longer than the rows, even if the parents are invalid.
    most = tl.minimum(remaining, num_rows)
    while (row < num_rows) & (count < most):
        order = tl.where(rows == row, count, order)
        count += 1
        row = tl.min(tl.where(parent == row, rows, ROWS), axis=0)

    on_path = order >= 0
    tl.store(emitted_ptr + begin + order, sampled, mask=on_path)
    tl.store(kept_rows_ptr + begin + order, rows, mask=on_path)
    unused = inside & (rows >= count)
    tl.store(emitted_ptr + begin + rows, _NO_DRAFT, mask=unused)
    tl.store(kept_rows_ptr + begin + rows, _NO_ROW, mask=unused)
    tl.store(num_emitted_ptr + sequence, count)


def accept_walk(
    sampled: Tensor,
    draft_tokens: Tensor,
    draft_parents: Tensor,
    cu_rows: Tensor,
    stop: StopRules,
    *,
    max_rows: int,
) -> AcceptedWalk:
    """Walk the drafts as ``accept_walk_ref.accept_walk`` does, without a device synchronisation.

    Args:
      sampled: int64 ``[rows]``.
      draft_tokens: int64 ``[rows]``, ``NO_DRAFT`` at roots.
      draft_parents: int32 ``[rows]``, rows within the sequence.
      cu_rows: int32 ``[sequences + 1]``.
      stop: rules that end each sequence.
      max_rows: maximum rows of a sequence, which the function does not check.

    Returns:
      The emitted tokens. Rows from ``cu_rows[-1]`` on belong to no sequence and are undefined.

    Raises:
      ValueError: a tensor is not contiguous.
    """
    if not all(t.is_contiguous() for t in (sampled, draft_tokens, draft_parents, cu_rows, *stop)):
        raise ValueError("accept_walk needs contiguous tensors")
    sequences, device = cu_rows.shape[0] - 1, sampled.device
    acceptance = AcceptedWalk(
        torch.empty_like(sampled),
        torch.empty(sequences, dtype=torch.int32, device=device),
        torch.empty(sampled.shape[0], dtype=torch.int32, device=device),
    )
    if sequences:
        _accept_walk_kernel[(sequences,)](
            *acceptance,
            sampled,
            draft_tokens,
            draft_parents,
            cu_rows,
            *stop,
            NUM_EOS=stop.eos.shape[0],
            ROWS=triton.next_power_of_2(max_rows),
            num_warps=1,
        )
    return acceptance
