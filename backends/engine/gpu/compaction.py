"""After a walk: keys and values of accepted paths go where a chain would have put them."""

from __future__ import annotations

import torch
from torch import Tensor

from draftgate.backends.engine.kernels.kv_move import kv_move
from draftgate.backends.engine.kernels.kv_move_ref import NO_MOVE


def compact(
    memory: Tensor, row_slots: Tensor, sample_starts: Tensor, kept_rows: Tensor, longest: int
) -> None:
    """Move what an accepted path wrote; never synchronises with the device.

    The token that a row was fed lies in the row's slot; accepted at depth d it belongs into the
    slot of row d. `kept_rows` says which row that was (`accept_walk`), and the walk ascends.

    Args:
        memory: [strips, slots, head_dim], all layers of a pool; modified.
        row_slots: int64 [sampled rows], slot of each.
        sample_starts: int32 [sequences + 1], the first sampled row of each sequence.
        kept_rows: int32 [sampled rows], of the emitted tokens, `NO_ROW` behind the last.
        longest: most sampled rows of a sequence.
    """
    depths = torch.arange(longest, device=memory.device)
    starts, ends = sample_starts[:-1, None].long(), sample_starts[1:, None]
    targets = starts + depths
    inside = targets < ends
    targets = torch.where(inside, targets, 0)
    kept = torch.where(inside, kept_rows[targets].long(), 0)
    moves = kept > depths
    sources = torch.where(moves, starts + kept, 0)
    kv_move(memory, row_slots[sources], torch.where(moves, row_slots[targets], NO_MOVE))
