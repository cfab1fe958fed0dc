"""The memory of keys and values."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from backends.engine.config import ModelConfig

BLOCK_TOKENS: Final = 16
"""Tokens per KV block: small enough that a sequence wastes few, as in other engines."""

KV_TILE: Final = 256
"""KV tokens that attention multiplies at once (`attention.py`)."""


class KvPool:
    """Keys and values of `num_blocks` blocks, one tensor per layer.

    Layout: [2 * num_kv_heads, slots, head_dim], keys first. A run of slots of one sequence is a
    view. Behind the blocks lie a tile of slack, which views of the last run may read (masked),
    and which padding rows write.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, dtype: torch.dtype) -> None:
        """Allocate; zeros, because masked reads must be finite."""
        self.num_blocks = num_blocks
        self.query_group = config.query_group
        slots = num_blocks * BLOCK_TOKENS + KV_TILE
        shape = (2 * config.num_kv_heads, slots, config.head_dim)
        self.layers: list[Tensor] = [
            torch.zeros(shape, dtype=dtype) for _ in range(config.num_layers)
        ]
        self.dump_slot = slots - 1


def num_blocks_for(config: ModelConfig, kv_bytes: int, itemsize: int) -> int:
    """Return how many blocks fit into that many bytes.

    Raises:
        ValueError: not even one does.
    """
    block_bytes = config.kv_bytes_per_token(itemsize) * BLOCK_TOKENS
    if kv_bytes < block_bytes:
        raise ValueError(f"kv_bytes must be at least {block_bytes}, one block, not {kv_bytes}")
    return kv_bytes // block_bytes
