"""Compaction of accepted paths in the KV memory, in torch: all reads, then all writes."""

from __future__ import annotations

from typing import Final

from torch import Tensor

NO_MOVE: Final = -1
"""Target of an entry that moves nothing, as does an entry whose source is its target."""


def kv_move(memory: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy the keys and values of some slots to others, in every strip.

    Args:
      memory: ``[strips, slots, head_dim]``, all layers of a pool; modified.
      sources: int64 ``[sequences, max_depth]``, the slot of each accepted token by its depth.
      targets: int64 ``[sequences, max_depth]``, the slot where the token belongs. The source of
        ``NO_MOVE`` is not read.
    """
    moved = targets != NO_MOVE
    kv = memory.index_select(1, sources[moved])
    memory.index_copy_(1, targets[moved], kv)
