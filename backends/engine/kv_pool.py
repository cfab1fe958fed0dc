"""The memory of keys and values: one allocation, read as the target's layers and as a draft's.

Memory is [strips, slots, head_dim]: for each layer and KV head one strip of all slots for its keys
and one for its values. A block is the same `BLOCK_TOKENS` slots in every strip, so a run of blocks
is a view of any layer, and a borrowed block holds pages of a draft model in the same strips
(`core/draft_pages.py`): as many groups of pages as the draft's strips go into the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from draftgate.backends.engine.config import ModelConfig

BLOCK_TOKENS: Final = 16
"""Tokens per KV block: small enough that a sequence wastes few, as in other engines."""

KV_TILE: Final = 256
"""KV tokens that attention multiplies at once (`attention.py`)."""

Layers = tuple[Tensor, ...]
"""Keys and values by layer: [2 * num_kv_heads, slots, head_dim] each, keys first."""


@dataclass(frozen=True, slots=True)
class DraftLayers:
    """A draft model's view of the pool: layers of its own, over the slots of all groups.

    Attributes:
        layers: page p has the slots from `p * page_tokens` on.
        groups: pages of a block, one in each group.
        group_pages: pages of a group: those of all blocks, then slack.
        page_tokens: tokens of the draft model that a page holds.
        dump_slot: where padding rows write.
    """

    layers: Layers
    groups: int
    group_pages: int
    page_tokens: int
    dump_slot: int


class KvPool:
    """Keys and values of `num_blocks` blocks.

    Behind the blocks lies a tile of slack, which views of the last run may read (masked), and which
    padding rows write.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate; zeros, because masked reads must be finite."""
        self.num_blocks = num_blocks
        slots = num_blocks * BLOCK_TOKENS + KV_TILE
        self.memory = _zeros((_strips(config), slots, config.head_dim), dtype, device)
        """[strips, slots, head_dim], all layers."""
        self.layers: Layers = self.memory.split(2 * config.num_kv_heads)
        self.dump_slot = slots - 1

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy the keys and values of some slots to others, in every layer.

        All sources are read before any target is written.
        """
        device = self.memory.device
        moved = self.memory.index_select(1, torch.tensor(sources, device=device))
        self.memory.index_copy_(1, torch.tensor(targets, device=device), moved)

    def draft_layers(self, draft: ModelConfig) -> DraftLayers:
        """Return the view of a draft model, in the target's dtype.

        Raises:
            ValueError: the draft model's keys and values do not go into the target's blocks.
        """
        strips, _, head_dim = self.memory.shape
        block_elements = BLOCK_TOKENS * head_dim
        # Wider heads would have fewer tokens of slack behind the blocks than a tile reads.
        fits = _strips(draft) <= strips and draft.head_dim <= head_dim
        if not fits or block_elements % draft.head_dim:
            raise ValueError(
                f"keys and values of the draft model ({_strips(draft)} strips of heads of "
                f"{draft.head_dim}) do not fit the target's ({strips} of {head_dim})"
            )
        groups = strips // _strips(draft)
        # The strips of one of the draft's own, group by group, lie behind each other.
        taken = self.memory[: _strips(draft) * groups]
        layers = taken.view(_strips(draft), -1, draft.head_dim).split(2 * draft.num_kv_heads)
        return DraftLayers(
            layers,
            groups,
            group_pages=self.memory.shape[1] // BLOCK_TOKENS,
            page_tokens=block_elements // draft.head_dim,
            dump_slot=layers[0].shape[1] - 1,
        )


def num_blocks_for(config: ModelConfig, kv_bytes: int, itemsize: int) -> int:
    """Return how many blocks fit into that many bytes.

    Raises:
        ValueError: not even one does.
    """
    block_bytes = config.kv_bytes_per_token(itemsize) * BLOCK_TOKENS
    if kv_bytes < block_bytes:
        raise ValueError(f"kv_bytes must be at least {block_bytes}, one block, not {kv_bytes}")
    return kv_bytes // block_bytes


def _strips(config: ModelConfig) -> int:
    return config.num_layers * 2 * config.num_kv_heads


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch writes its zeros; the system hands them out page by page when they are first used.
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
