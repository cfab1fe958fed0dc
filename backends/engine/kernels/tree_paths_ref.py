"""Places on the paths of draft trees, in torch.

The draft tokens of a sequence are laid out depth first, at most 64 of them, behind its confirmed
tokens. A path is the ancestor mask of its last token: bit i is set if draft token i is on it.
"""

from __future__ import annotations

import torch


def path_slots(positions: torch.Tensor, draft_start: int, path: int) -> torch.Tensor:
    """Returns which tokens of the sequence have these positions on a path.

    The draft token of the d-th set bit has position ``draft_start + d``; confirmed tokens are where
    their positions say.

    Args:
      positions: int32 or int64 of any shape, none behind the path's end.
      draft_start: confirmed tokens of the sequence.
      path: the mask, of 64 bits.
    """
    drafts = [draft for draft in range(64) if path >> draft & 1]
    tokens = torch.cat([torch.arange(draft_start), draft_start + torch.tensor(drafts).long()])
    return tokens[positions.long()].to(positions.dtype)


def leaves_of_rows(ancestors: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Returns with which row each row is attended: the last real row that descends from it.

    Rows that share a leaf lie on one path, the leaf's. Confirmed tokens are on all paths.

    Args:
      ancestors: int64 ``[rows]``, masks; 0 for confirmed tokens.
      real: bool ``[rows]``, false where a row is padding.

    Returns:
      int64 ``[rows]``; -1 where no real row descends.
    """
    rows = torch.arange(ancestors.shape[0])
    descends = ((ancestors[:, None] & ~ancestors[None, :]) == 0) & real[None, :]
    return torch.where(descends, rows[None, :], -1).amax(1)
