"""The input of the next pass of a draft model, from the drafts that the last one has sampled.

Each row belongs to one sequence. A sequence with drafts left reads its new draft in the next pass.
A sequence whose draft is complete stays in the batch, because the number of rows is fixed: its row
reads only the first token of its own context, and writes to the dump slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftgate.backends.engine.kernels.paged_attention_ref import BlockTables


class DraftRows(NamedTuple):
    """The input of a pass with one row per sequence. All tensors are at least ``[sequences]``.

    Attributes:
      token_ids: int64, the token of the row.
      positions: int64, its position.
      slots: int64, the slot for its keys and values.
      attention_positions: int32, its position in its attention span, the same number.
      context_lens: int32, slots in use, its own included.
      draft_starts: int32, the same number, because no draft branches.
      position: int32, position of the token that the pass samples (``RowSampling.position``).
      remaining: int32, drafts to sample, including that of the pass. 0 for rows without a sequence.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    attention_positions: Tensor
    context_lens: Tensor
    draft_starts: Tensor
    position: Tensor
    remaining: Tensor


def advance_drafts(
    tokens: Tensor,
    rows: DraftRows,
    tables: BlockTables,
    drafts: Tensor,
    *,
    page_tokens: int,
    dump_slot: int,
) -> None:
    """Store sampled drafts, and write the input of the next pass.

    Args:
      tokens: int64 ``[sequences]``, the sampled tokens.
      rows: the pass that sampled the tokens, modified in place. Only ``position`` and ``remaining``
        are read. Rows with 0 remaining drafts do not change.
      tables: the page tables, which hold a slot for every draft but the last one.
      drafts: int64 ``[longest draft + 1, at least sequences]``. The function stores the token of
        sequence s in ``drafts[remaining[s], s]``, so the last draft of every sequence is in row 1.
      page_tokens: slots of a page.
      dump_slot: the slot for keys and values of complete sequences.
    """
    count = min(len(tokens), len(rows.remaining))
    (drawn,) = (rows.remaining[:count] > 0).nonzero(as_tuple=True)
    left, position = rows.remaining[drawn].long(), rows.position[drawn].long()
    drafts[left, drawn] = tokens[drawn]
    continues = left > 1
    at = torch.where(continues, position, 0)
    pages = tables.blocks[tables.starts[drawn].long() + at // page_tokens].long()
    rows.token_ids[drawn] = tokens[drawn]
    rows.positions[drawn] = at
    slots = pages * page_tokens + at % page_tokens
    rows.slots[drawn] = torch.where(continues, slots, dump_slot)
    rows.attention_positions[drawn] = at.int()
    rows.context_lens[drawn] = rows.draft_starts[drawn] = at.int() + 1
    rows.position[drawn] = position.int() + 1
    rows.remaining[drawn] = left.int() - 1
