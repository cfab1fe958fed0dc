"""The KV memory: one allocation, viewed as the layers of the target and of a draft model.

The memory has the shape [strips, slots, head_dim]. Each layer and KV head has one strip of all
slots for its keys and one for its values. A block is the same `BLOCK_TOKENS` slots in every strip,
so a run of blocks is a view of any layer.

If an EAGLE-3 head drafts, further strips hold the feature of each token (`taps.py`) in the slot of
its keys and values. Prefix sharing, preemption, transfers and the compaction of trees therefore
cover features as well.

A borrowed block holds pages of a draft model in the same strips (`core/draft_pages.py`). The number
of groups is the target's strips divided by the draft model's strips. A block has a page per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.transfer import host_memory, to_device
from draftgate.backends.kv_transfer.format import KvFormat

BLOCK_TOKENS: Final = 16
"""Tokens per KV block, as in other engines. The block is small to limit the unused memory of a
sequence."""

KV_TILE: Final = 256
"""Number of KV tokens in one tile of attention (`operators/attention.py`)."""

Layers = tuple[Tensor, ...]
"""Keys and values of each layer: [2 * num_kv_heads, slots, head_dim], keys first."""


@dataclass(frozen=True, slots=True)
class DraftLayers:
    """A draft model's view of the pool, over the slots of all groups.

    Attributes:
        layers: keys and values. Page p has the slots from `p * page_tokens` on.
        groups: pages per block, one in each group.
        group_pages: pages per group, including slack after the pages of all blocks.
        page_tokens: tokens of the draft model that a page holds.
        dump_slot: the slot for keys and values of padding rows.
    """

    layers: Layers
    groups: int
    group_pages: int
    page_tokens: int
    dump_slot: int


class KvPool:
    """Keys and values of `num_blocks` blocks.

    A tile of slack follows the blocks. Masked reads of the last block may reach the slack, and
    padding rows write to it.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        feature_size: int = 0,
    ) -> None:
        """Allocate the memory.

        Args:
            feature_size: width of the feature that each token has beside its keys and values.
        """
        self.num_blocks = num_blocks
        slots = num_blocks * BLOCK_TOKENS + KV_TILE
        strips, features = _strips(config), feature_strips(config, feature_size)
        # The memory starts as zeros, because masked reads must return finite values.
        self.memory = _zeros((strips + features, slots, config.head_dim), dtype, device)
        """[strips, slots, head_dim], all layers and then the features."""
        self.layers: Layers = self.memory[:strips].split(2 * config.num_kv_heads)
        self.dump_slot = slots - 1
        self._features = self.memory[strips:]
        self._feature_size = feature_size

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy keys and values between slots in every layer. All reads precede all writes."""
        device = self.memory.device
        moved = self.memory.index_select(1, torch.tensor(sources, device=device))
        self.memory.index_copy_(1, torch.tensor(targets, device=device), moved)

    def write_features(self, slots: Tensor, features: Tensor) -> None:
        """Store the features of tokens, [rows, feature_size], in their slots, int64 [rows]."""
        strips, _, width = self._features.shape
        padding = strips * width - self._feature_size
        if padding:
            features = torch.nn.functional.pad(features, (0, padding))
        parts = features.view(-1, strips, width).transpose(0, 1)
        self._features.index_copy_(1, slots, parts)

    def read_features(self, slots: Tensor) -> Tensor:
        """Return the features of tokens in their slots, int64 [rows]: [rows, feature_size]."""
        parts = self._features.index_select(1, slots).transpose(0, 1)
        return parts.flatten(1)[:, : self._feature_size].contiguous()

    def format(self, numerics_class: str) -> KvFormat:
        """Return the format of the blocks, for a worker of this numerics class."""
        strips, _, head_dim = self.memory.shape
        dtype = str(self.memory.dtype).removeprefix("torch.")
        return KvFormat(numerics_class, dtype, BLOCK_TOKENS, strips, head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self._block_view()[:, 0].nbytes

    def read(self, blocks: Sequence[int]) -> memoryview:
        """Return the bytes of blocks, [blocks, strips, BLOCK_TOKENS, head_dim]."""
        view = self._block_view()
        if view.device.type == "cpu":
            # A copy of 384 KiB takes 49 us, and 93 us with `index_select` (AVX2 machine, CPU time,
            # 2026-11-23).
            memory = view.view(torch.uint8).numpy()
            data = np.empty((len(blocks), len(memory), memory.shape[2]), np.uint8)
            for copied, block in zip(data, blocks, strict=True):
                copied[:] = memory[:, block]
            return data.reshape(-1).data
        places = torch.tensor(blocks, device=view.device)
        found = view.transpose(0, 1).index_select(0, places)
        return found.cpu().view(torch.uint8).numpy().reshape(-1).data

    def write(self, blocks: Sequence[int], data: memoryview) -> None:
        """Replace the bytes of blocks by bytes in the order of `read`."""
        device, view = self.memory.device, self._block_view()
        if device.type == "cpu":
            # One copy of 49 us for 384 KiB, which took torch 164 us in two (AVX2 machine,
            # CPU time, 2026-11-23).
            memory = view.view(torch.uint8).numpy()
            found = np.frombuffer(data, np.uint8).reshape(len(blocks), len(memory), -1)
            memory[:, list(blocks)] = found.swapaxes(0, 1)
            return
        host = host_memory((len(blocks), len(view), view.shape[2]), view.dtype, device)
        host.view(torch.uint8).numpy().reshape(-1)[:] = np.frombuffer(data, np.uint8)
        places = torch.tensor(blocks, device=device)
        view.index_copy_(1, places, to_device(host, device).transpose(0, 1))

    def _block_view(self) -> Tensor:
        """Return the memory by blocks: [strips, blocks and slack, BLOCK_TOKENS * head_dim]."""
        strips, _, head_dim = self.memory.shape
        return self.memory.view(strips, -1, BLOCK_TOKENS * head_dim)

    def draft_layers(self, draft: ModelConfig) -> DraftLayers:
        """Return the view of a draft model in the target's dtype.

        Raises:
            ValueError: the draft model's keys and values do not fit the target's blocks.
        """
        strips, _, head_dim = self.memory.shape
        block_elements = BLOCK_TOKENS * head_dim
        # The slack after the blocks holds a tile only if the draft model's heads are not wider.
        fits = _strips(draft) <= strips and draft.head_dim <= head_dim
        if not fits or block_elements % draft.head_dim:
            raise ValueError(
                f"the draft model's KV layout ({_strips(draft)} strips of {draft.head_dim}) does "
                f"not fit the target's ({strips} strips of {head_dim})"
            )
        groups = strips // _strips(draft)
        # Each strip of the draft takes the memory of `groups` consecutive strips of the target.
        taken = self.memory[: _strips(draft) * groups]
        layers = taken.view(_strips(draft), -1, draft.head_dim).split(2 * draft.num_kv_heads)
        return DraftLayers(
            layers,
            groups,
            group_pages=self.memory.shape[1] // BLOCK_TOKENS,
            page_tokens=block_elements // draft.head_dim,
            dump_slot=layers[0].shape[1] - 1,
        )


def num_blocks_for(config: ModelConfig, kv_bytes: int, itemsize: int, feature_size: int = 0) -> int:
    """Return the number of blocks that fit into `kv_bytes`, with features of this width.

    Raises:
        ValueError: `kv_bytes` is smaller than a block.
    """
    feature_bytes = feature_strips(config, feature_size) * config.head_dim * itemsize
    block_bytes = (config.kv_bytes_per_token(itemsize) + feature_bytes) * BLOCK_TOKENS
    if kv_bytes < block_bytes:
        raise ValueError(f"kv_bytes must be at least {block_bytes}, one block, not {kv_bytes}")
    return kv_bytes // block_bytes


def feature_strips(config: ModelConfig, feature_size: int) -> int:
    """Return the number of strips that hold features of this width."""
    return -(-feature_size // config.head_dim)


def _strips(config: ModelConfig) -> int:
    return config.num_layers * 2 * config.num_kv_heads


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch would write the zeros. The operating system provides zero pages on first use.
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
