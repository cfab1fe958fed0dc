"""The KV memory: one allocation, viewed as the layers of the target and of a draft model.

The memory has the shape [strips, slots, head_dim]. Each layer and KV head has one strip of all
slots for its keys and one for its values. A block is the same `BLOCK_TOKENS` slots in every strip,
so a run of blocks is a view of any layer.

If an EAGLE-3 head drafts, further strips hold the feature of each token (`taps.py`) in the slot of
its keys and values. Prefix sharing, preemption, transfers and the compaction of trees therefore
cover features as well.

A borrowed block holds pages of a draft model in the same strips (`core/draft_pages.py`). The number
of groups is the target's strips divided by the draft model's strips. A block has a page per group.

The memory may be in FP8 (E4M3), which takes half the bytes of bfloat16. The operators round keys
and values as they write them (`quantisation/fp8_kv.py`). Features are never rounded.
"""

from __future__ import annotations

import heapq
import math
import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.quantisation.fp8_kv import as_cells
from draftgate.backends.engine.transfer import host_memory, to_device
from draftgate.backends.kv_transfer.format import KvFormat

BLOCK_TOKENS: Final = 16
"""Tokens per KV block, as in other engines. The block is small to limit the unused memory of a
sequence."""

KV_TILE: Final = 256
"""Number of KV tokens in one tile of attention (`operators/attention.py`)."""

_MOST_ADVICE: Final = 4096
"""Maximum number of system calls in a release, about 4 ms. The largest runs are released first.
(Chosen.)"""

Layers = tuple[Tensor, ...]
"""Keys and values of each layer: [2 * num_kv_heads, slots, head_dim], keys first."""


class Features(NamedTuple):
    """The features that each token has beside its keys and values.

    Attributes:
        size: width of a feature.
        dtype: its dtype, which may differ from that of keys and values.
    """

    size: int
    dtype: torch.dtype

    def per_strip(self, config: ModelConfig, dtype: torch.dtype) -> int:
        """Return the numbers of a feature that fit into the bytes of a head in `dtype`."""
        return config.head_dim * dtype.itemsize // self.dtype.itemsize

    def strips(self, config: ModelConfig, dtype: torch.dtype) -> int:
        """Return the number of strips that hold a feature."""
        return -(-self.size // self.per_strip(config, dtype))


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
        features: Features | None = None,
    ) -> None:
        """Allocate the memory.

        Args:
            dtype: dtype of keys and values.
            features: the features of tokens, or None without features.
        """
        self.num_blocks = num_blocks
        slots = num_blocks * BLOCK_TOKENS + KV_TILE
        strips = _strips(config)
        shape = (strips + _feature_strips(config, dtype, features), slots, config.head_dim)
        self._pages: mmap.mmap | None = None
        # The memory starts as zeros, because masked reads must return finite values.
        if torch.device(device).type == "cpu":
            # torch would write the zeros. The operating system provides zero pages on first use.
            self._pages = _zero_pages(math.prod(shape) * dtype.itemsize)
            self.memory = torch.frombuffer(self._pages, dtype=torch.uint8).view(dtype).view(shape)
        else:
            self.memory = torch.zeros(shape, dtype=dtype, device=device)
        """[strips, slots, head_dim], all layers and then the features."""
        self.cells = as_cells(self.memory)
        """The memory in a dtype that torch copies."""
        self.layers: Layers = self.memory[:strips].split(2 * config.num_kv_heads)
        self.dump_slot = slots - 1
        self._feature_size = 0 if features is None else features.size
        self._features = self.memory[strips:]
        if features is not None:
            self._features = self._features.view(features.dtype)

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy keys and values between slots in every layer. All reads precede all writes."""
        cells, device = self.cells, self.memory.device
        moved = cells.index_select(1, torch.tensor(sources, device=device))
        cells.index_copy_(1, torch.tensor(targets, device=device), moved)

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

    def release(self, runs: Iterable[range]) -> None:
        """Return the memory of runs of blocks to the system, on a CPU.

        The blocks become zeros, except for a page that another block shares.
        """
        if self._pages is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        strips = len(self.memory)
        strip_bytes = self.memory[0].nbytes
        block_bytes = self.block_bytes // strips
        most = max(1, _MOST_ADVICE // strips)
        for run in heapq.nlargest(most, runs, key=len):
            for start in range(0, strips * strip_bytes, strip_bytes):
                first = -(-(start + run.start * block_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
                end = (start + run.stop * block_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
                if first < end:
                    self._pages.madvise(mmap.MADV_DONTNEED, first, end - first)

    def _block_view(self) -> Tensor:
        """Return the memory by blocks: [strips, blocks and slack, BLOCK_TOKENS * head_dim]."""
        strips, _, head_dim = self.cells.shape
        return self.cells.view(strips, -1, BLOCK_TOKENS * head_dim)

    def draft_layers(self, draft: ModelConfig) -> DraftLayers:
        """Return the view of a draft model in the pool's dtype.

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


def num_blocks_for(
    config: ModelConfig, kv_bytes: int, dtype: torch.dtype, features: Features | None = None
) -> int:
    """Return the number of blocks that fit into `kv_bytes`.

    Args:
        dtype: dtype of keys and values.
        features: the features of tokens, or None without features.

    Raises:
        ValueError: `kv_bytes` is smaller than a block.
    """
    size = dtype.itemsize
    feature_bytes = _feature_strips(config, dtype, features) * config.head_dim * size
    block_bytes = (config.kv_bytes_per_token(size) + feature_bytes) * BLOCK_TOKENS
    if kv_bytes < block_bytes:
        raise ValueError(f"kv_bytes must be at least {block_bytes}, one block, not {kv_bytes}")
    return kv_bytes // block_bytes


def _feature_strips(config: ModelConfig, dtype: torch.dtype, features: Features | None) -> int:
    return 0 if features is None else features.strips(config, dtype)


def _strips(config: ModelConfig) -> int:
    return config.num_layers * 2 * config.num_kv_heads


def _zero_pages(num_bytes: int) -> mmap.mmap:
    """Return zeros, of which only those pages occupy memory that have been written.

    Huge pages would occupy 2 MiB of each strip for a single block: 360 MB with SmolLM2-135M, and
    again for each run that begins elsewhere. With 64 streams, these were 8.2 GB (2026-11-28).
    """
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return pages
