"""Compaction of accepted paths in the KV memory, in torch: all reads, then all writes."""

from __future__ import annotations

from typing import Final

from torch import Tensor

NO_MOVE: Final = -1
"""Target of an entry that moves nothing. An entry whose source is its target also moves nothing."""


def kv_move(memory: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy the keys and values of some slots to other slots, in every strip.

    Args:
      memory: ``[strips, slots, head_dim]``, all layers of a pool, modified in place.
      sources: int64 ``[sequences, max_depth]``, the slot of each accepted token by its depth.
      targets: int64 ``[sequences, max_depth]``, the new slot of the token. The function does not
        read the source of ``NO_MOVE``.
    """
    moved = targets != NO_MOVE
    kv = memory.index_select(1, sources[moved])
    memory.index_copy_(1, targets[moved], kv)
