"""The input of the next pass of a draft model, in Triton. ``advance_drafts_ref`` is the definition.

The kernel reads 20 bytes and a page of each sequence, and writes 56 bytes. 256 sequences are 20 kB,
so the launch dominates. In a captured pass, the kernel replaces the copies and the wait of the host
between two drafts.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from draftgate.backends.engine.kernels.advance_drafts_ref import DraftRows
from draftgate.backends.engine.kernels.paged_attention_ref import BlockTables

_ROWS: Final = 64
"""Rows of a program, two warps."""


@triton.jit(do_not_specialize=["sequences"])
def _advance_drafts_kernel(
    tokens_ptr,
    token_ids_ptr,
    positions_ptr,
    slots_ptr,
    attention_positions_ptr,
    context_lens_ptr,
    draft_starts_ptr,
    position_ptr,
    remaining_ptr,
    tables_ptr,
    table_starts_ptr,
    drafts_ptr,
    drafts_stride,
    sequences,
    page_tokens,
    dump_slot,
    ROWS: tl.constexpr,
):
    """Advance ROWS sequences per program. The grid is (groups of ROWS sequences)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    remaining = tl.load(remaining_ptr + row, mask=row < sequences, other=0)
    drawn = remaining > 0
    continues = remaining > 1
    token = tl.load(tokens_ptr + row, mask=drawn)
    tl.store(drafts_ptr + remaining * drafts_stride + row, token, mask=drawn)

    position = tl.load(position_ptr + row, mask=drawn, other=0)
    at = tl.where(continues, position, 0)
    start = tl.load(table_starts_ptr + row, mask=continues, other=0)
    page = tl.load(tables_ptr + start + at // page_tokens, mask=continues, other=0)
    slot = page.to(tl.int64) * page_tokens + at % page_tokens

    tl.store(token_ids_ptr + row, token, mask=drawn)
    tl.store(positions_ptr + row, at.to(tl.int64), mask=drawn)
    tl.store(slots_ptr + row, tl.where(continues, slot, dump_slot), mask=drawn)
    tl.store(attention_positions_ptr + row, at, mask=drawn)
    tl.store(context_lens_ptr + row, at + 1, mask=drawn)
    tl.store(draft_starts_ptr + row, at + 1, mask=drawn)
    tl.store(position_ptr + row, position + 1, mask=drawn)
    tl.store(remaining_ptr + row, remaining - 1, mask=drawn)


def advance_drafts(
    tokens: Tensor,
    rows: DraftRows,
    tables: BlockTables,
    drafts: Tensor,
    *,
    page_tokens: int,
    dump_slot: int,
) -> None:
    """Advance drafts as ``advance_drafts_ref.advance_drafts`` does, without a synchronisation.

    Args:
      tokens: int64 ``[sequences]``, contiguous.
      rows: the pass that sampled the tokens, each field contiguous, modified in place.
      tables: int32 page tables.
      drafts: int64 ``[longest draft + 1, at least sequences]``, each row contiguous.
      page_tokens: slots of a page.
      dump_slot: the slot for keys and values of complete sequences.
    """
    sequences = min(len(tokens), len(rows.remaining))
    _advance_drafts_kernel[(triton.cdiv(sequences, _ROWS),)](
        tokens,
        *rows,
        tables.blocks,
        tables.starts,
        drafts,
        drafts.stride(0),
        sequences,
        page_tokens,
        dump_slot,
        ROWS=_ROWS,
        num_warps=2,
    )
