"""Acceptance of tree drafts in Triton; the definition is in ``accept_walk_ref``.

One warp per sequence holds its rows in registers. It first finds for all rows at once which of them
can be reached: the draft equals the sample of its parent, and that sample does not end the
sequence. The walk then costs one minimum over the rows, a few shuffles, for each emitted token.

Bytes: 8 (sample) + 8 (draft) + 4 (parent) read and 8 + 4 written per row, 4 more per token in the
history, some 30 per sequence. Floor: 512 sequences of 9 rows are 0.16 MB, 0.03 us at 4.8 TB/s, so
the launch is what counts.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from draftgate.backends.engine.kernels.accept_walk_ref import (
    NO_DRAFT,
    NO_ROW,
    Acceptance,
    StopRules,
    TokenHistory,
)

_NO_DRAFT: Final = tl.constexpr(NO_DRAFT)
_NO_ROW: Final = tl.constexpr(NO_ROW)


@triton.jit
def _is_eos(tokens, eos_ptr, NUM_EOS: tl.constexpr):
    """Returns which tokens are of the set."""
    found = tokens != tokens
    for index in tl.static_range(NUM_EOS):
        found = found | (tokens == tl.load(eos_ptr + index))
    return found


@triton.jit
def _accept_walk_kernel(
    emitted_ptr,
    num_emitted_ptr,
    finished_ptr,
    kept_rows_ptr,
    sampled_ptr,
    draft_tokens_ptr,
    draft_parents_ptr,
    cu_rows_ptr,
    remaining_ptr,
    eos_ptr,
    ignore_eos_ptr,
    seq_lens_ptr,
    history_ptr,
    history_rows_ptr,
    history_stride,
    NUM_EOS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (sequences), one warp each; ``history_ptr`` may be None."""
    sequence = tl.program_id(0)
    begin = tl.load(cu_rows_ptr + sequence)
    num_rows = tl.load(cu_rows_ptr + sequence + 1) - begin
    remaining = tl.load(remaining_ptr + sequence)
    heeds_eos = tl.load(ignore_eos_ptr + sequence) == 0
    length = tl.load(seq_lens_ptr + sequence)

    rows = tl.arange(0, ROWS)
    inside = rows < num_rows
    has_parent = inside & (rows > 0)
    sampled = tl.load(sampled_ptr + begin + rows, mask=inside, other=_NO_DRAFT)
    draft = tl.load(draft_tokens_ptr + begin + rows, mask=has_parent, other=_NO_DRAFT)
    parent = tl.load(draft_parents_ptr + begin + rows, mask=has_parent, other=_NO_ROW)
    before = tl.load(sampled_ptr + begin + parent, mask=has_parent, other=_NO_DRAFT)
    reached = has_parent & (draft == before) & ~(heeds_eos & _is_eos(before, eos_ptr, NUM_EOS))
    parent = tl.where(reached, parent, _NO_ROW)

    order = tl.full([ROWS], -1, tl.int32)
    count = num_rows * 0
    row = num_rows * 0
    # No walk is longer than the rows, whatever the parents are.
    most = tl.minimum(remaining, num_rows)
    while (row < num_rows) & (count < most):
        order = tl.where(rows == row, count, order)
        count += 1
        row = tl.min(tl.where(parent == row, rows, ROWS), axis=0)

    on_path = order >= 0
    tl.store(emitted_ptr + begin + order, sampled, mask=on_path)
    tl.store(kept_rows_ptr + begin + order, rows, mask=on_path)
    behind = inside & (rows >= count)
    tl.store(emitted_ptr + begin + rows, _NO_DRAFT, mask=behind)
    tl.store(kept_rows_ptr + begin + rows, _NO_ROW, mask=behind)

    ends = heeds_eos & on_path & _is_eos(sampled, eos_ptr, NUM_EOS)
    finished = (count >= remaining) | (tl.max(ends.to(tl.int32), axis=0) > 0)
    finished = finished & (num_rows > 0)
    tl.store(num_emitted_ptr + sequence, count)
    tl.store(finished_ptr + sequence, finished.to(tl.int8))
    tl.store(seq_lens_ptr + sequence, length + count, mask=count > 0)
    if history_ptr is not None:
        history_row = tl.load(history_rows_ptr + sequence).to(tl.int64)
        places = history_row * history_stride + length + order
        tl.store(history_ptr + places, sampled.to(tl.int32), mask=on_path)


def accept_walk(
    sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_parents: torch.Tensor,
    cu_rows: torch.Tensor,
    stop: StopRules,
    seq_lens: torch.Tensor,
    *,
    max_rows: int,
    history: TokenHistory | None = None,
) -> Acceptance:
    """As ``accept_walk_ref.accept_walk``; never synchronises with the device.

    Args:
      sampled: int64 ``[rows]``.
      draft_tokens: int64 ``[rows]``, ``NO_DRAFT`` at roots.
      draft_parents: int32 ``[rows]``, rows within the sequence.
      cu_rows: int32 ``[sequences + 1]``.
      stop: when sequences are finished.
      seq_lens: int32 ``[sequences]``; grows by what is emitted.
      max_rows: most rows of a sequence; not checked.
      history: gets the emitted tokens at the old length of each sequence, where they must fit.

    Returns:
      What is emitted. Rows behind ``cu_rows[-1]`` belong to no sequence and are undefined.

    Raises:
      ValueError: a layout that the kernel would read wrongly.
    """
    vectors = (sampled, draft_tokens, draft_parents, cu_rows, seq_lens, *stop)
    if not all(tensor.is_contiguous() for tensor in vectors):
        raise ValueError("tensors of one dimension need to be contiguous")
    if history is not None and history.tokens.stride(1) != 1:
        raise ValueError("a sequence's history needs to be contiguous")
    sequences, device = cu_rows.shape[0] - 1, sampled.device
    acceptance = Acceptance(
        torch.empty_like(sampled),
        torch.empty(sequences, dtype=torch.int32, device=device),
        torch.empty(sequences, dtype=torch.int8, device=device),
        torch.empty(sampled.shape[0], dtype=torch.int32, device=device),
    )
    if sequences:
        tokens, history_rows = history or (None, None)
        # One warp: others might read a sequence's length when it has grown already.
        _accept_walk_kernel[(sequences,)](
            *acceptance,
            sampled,
            draft_tokens,
            draft_parents,
            cu_rows,
            *stop,
            seq_lens,
            tokens,
            history_rows,
            0 if tokens is None else tokens.stride(0),
            NUM_EOS=stop.eos.shape[0],
            ROWS=triton.next_power_of_2(max_rows),
            num_warps=1,
        )
    return acceptance
