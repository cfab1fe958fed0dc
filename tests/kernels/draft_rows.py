"""Passes of a draft model with sequences that have drafts left, complete ones, and padding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftgate.backends.engine.kernels.advance_drafts_ref import DraftRows
from draftgate.backends.engine.kernels.paged_attention_ref import BlockTables

PAGE_TOKENS = 24
DUMP_SLOT = 9999
LONGEST = 4
PAGES = 8


class DraftCase(NamedTuple):
    """The arguments of `advance_drafts` besides the tokens."""

    rows: DraftRows
    tables: BlockTables
    drafts: Tensor

    @property
    def sizes(self) -> dict[str, int]:
        """The page size and the dump slot."""
        return {"page_tokens": PAGE_TOKENS, "dump_slot": DUMP_SLOT}

    def arguments(self) -> tuple[DraftRows, BlockTables, Tensor]:
        """Return the arguments that follow the tokens."""
        return self.rows, self.tables, self.drafts

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the function modifies."""
        return [*self.rows, self.drafts]


def draft_case(sequences: int) -> DraftCase:
    """Return a pass of `sequences`, of which about a fifth has no draft left, and two of padding.

    The contexts end at most `LONGEST` tokens before the end of their pages.
    """
    generator = torch.Generator().manual_seed(sequences)
    count = sequences + 2

    def below(limit: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(limit, (count,), generator=generator).to(dtype)

    remaining = below(LONGEST + 1)
    remaining[sequences:] = 0
    rows = DraftRows(
        *(below(50, torch.int64) for _ in range(3)),
        *(below(50) for _ in range(3)),
        position=1 + below(PAGES * PAGE_TOKENS - LONGEST),
        remaining=remaining,
    )
    blocks = torch.randint(400, (count * PAGES,), generator=generator, dtype=torch.int32)
    starts = torch.arange(count, dtype=torch.int32) * PAGES
    drafts = torch.full((LONGEST + 1, count), -1)
    return DraftCase(rows, BlockTables(blocks, starts, PAGES), drafts)
