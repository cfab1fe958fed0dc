"""Positions and slots on the paths of draft trees in torch.

The draft tokens of a sequence, at most 64, follow its confirmed tokens depth first. A path is the
ancestor mask of its last token: bit i is set if draft token i is on the path.
"""

from __future__ import annotations

import torch
from torch import Tensor


def path_slots(positions: Tensor, draft_start: int, path: int) -> Tensor:
    """Return the index in the sequence of the token at each position of a path.

    The draft token of the d-th set bit has position ``draft_start + d``. The index of a confirmed
    token is its position.

    Args:
      positions: int32 or int64 of any shape, all within the path.
      draft_start: number of confirmed tokens.
      path: the mask, of 64 bits.

    Returns:
      Shape and dtype of positions.
    """
    drafts = [draft for draft in range(64) if path >> draft & 1]
    tokens = torch.cat([torch.arange(draft_start), draft_start + torch.tensor(drafts).long()])
    return tokens[positions.long()].to(positions.dtype)


def leaves_of_rows(ancestors: Tensor, real: Tensor) -> Tensor:
    """Return the leaf of each row: the last real row that descends from it.

    Rows that share a leaf are on one path, the leaf's. Confirmed tokens are on all paths.

    Args:
      ancestors: int64 ``[rows]``, masks, 0 for confirmed tokens.
      real: bool ``[rows]``, false for padding rows.

    Returns:
      int64 ``[rows]``, -1 if no real row descends from the row.
    """
    rows = torch.arange(ancestors.shape[0])
    descends = ((ancestors[:, None] & ~ancestors[None, :]) == 0) & real[None, :]
    return torch.where(descends, rows[None, :], -1).amax(1)
