"""An index of the blocks in a server's KV cache, from the events that the server publishes.

vLLM and SGLang publish an event for each stored and each removed block. The hashes in the events
are opaque, and their algorithm is a setting of the server. The index therefore hashes the tokens in
the events itself (`backends.core.prefix_cache`), and uses the hashes of the server only as names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from draftgate.backends.core.prefix_cache import chain_root, extend_chain_after
from draftgate.backends.prompt_blocks import PromptBlocks, chain_owner

BlockName: TypeAlias = int | bytes
"""The hash by which a server names a block. vLLM's are bytes or integers, by its settings."""

MOST_BLOCKS: Final = 1 << 18
"""Maximum number of blocks of a server in the index: 4M tokens at 16 per block, 80 MB. An H200 has
0.9M tokens of an 8B model. (Chosen by that arithmetic, 2026-11-29.)"""

_DEVICE: Final = frozenset({None, "GPU", "gpu"})
"""Media that count. Blocks in the memory of the host or on a disk have to be loaded first."""

_WHOLE: Final = frozenset({None, "full_attention", "mla_attention"})
"""Kinds of caches that hold all tokens of a prefix. A sliding window holds only the last ones."""


class BlockStored(msgspec.Struct, tag=True):
    """Blocks that a server has stored, each after the one before it.

    The fields, their order and their meanings are vLLM's (`vllm/distributed/kv_events.py`, 0.32).

    Attributes:
        parent_block_hash: the block before the first one, or None at the start of a prompt.
        token_ids: tokens of all blocks.
        block_size: number of tokens of each block.
        medium: where the blocks are, or None for the memory of the device.
        extra_keys: for each block what its hash covers beside its tokens: the name of the LoRA
            adapter, identifiers of images, and the salt in the first block of a prompt.
        group_idx: the group of layers, in models with several kinds of attention.
    """

    block_hashes: list[BlockName]
    parent_block_hash: BlockName | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks that a server has removed from a medium."""

    block_hashes: list[BlockName]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The server has removed all blocks."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class BlockIndex:
    """The blocks in the device memory of a server.

    The index may lack blocks that the server has, but never has blocks that the server lacks, if it
    gets all events in order. If it is full, it ignores new blocks until the server removes others.

    A server may hold two copies of a block, after two requests have computed it at the same time,
    and reports the end of each copy. A block is therefore cached until its last copy is removed.

    Attributes:
        block_tokens: number of tokens in a block, or 0 before the first event.
        is_complete: whether all blocks of the server were stored since the index was empty, so that
            a block that is not in the index is not cached.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self.block_tokens = 0
        self.is_complete = False
        self._most = most_blocks
        self._group: int | None = None
        self._digests: dict[BlockName, bytes] = {}
        self._copies: dict[BlockName, int] = {}  # of blocks with several copies
        self._cached: set[bytes] = set()

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._digests)

    def apply(self, events: Iterable[Event]) -> None:
        """Apply events in the order in which the server sent them."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                if event.medium in _DEVICE and event.group_idx == self._group:
                    self._remove(event.block_hashes)
            else:
                self.clear(is_complete=True)

    def clear(self, *, is_complete: bool) -> None:
        """Forget all blocks.

        Args:
            is_complete: whether the server has none.
        """
        self.is_complete = is_complete
        self.block_tokens, self._group = 0, None
        self._digests.clear()
        self._copies.clear()
        self._cached.clear()

    def cached_tokens(self, prompt: PromptBlocks, adapter: str) -> int:
        """Return how many leading tokens of a prompt the server need not compute.

        The server always computes the last token, because its logits are not cached.

        Args:
            adapter: name of the LoRA adapter that computes the prompt, or empty.
        """
        size, cached = self.block_tokens, self._cached
        if not cached:
            return 0
        found = 0
        for digest in prompt.hashes(adapter, size)[: (len(prompt.token_ids) - 1) // size]:
            if digest not in cached:
                break
            found += size
        return found

    def _store(self, event: BlockStored) -> None:
        size, names = event.block_size, event.block_hashes
        if event.medium not in _DEVICE or event.kv_cache_spec_kind not in _WHOLE:
            return
        if not self.block_tokens:
            self.block_tokens, self._group = size, event.group_idx
        # A block of fewer tokens is the beginning of a block that a later event stores.
        if size != self.block_tokens or event.group_idx != self._group:
            return
        adapter = event.lora_name or ""
        if event.lora_id is not None and not adapter:
            return  # the name by which requests choose the adapter is unknown
        keys = event.extra_keys or [None] * len(names)
        parent = event.parent_block_hash
        if parent is None:
            first = _salt(keys[0] if keys else None, adapter)
            before = None if first is None else chain_root(chain_owner(adapter, first))
            keys = [None, *keys[1:]]
        else:
            before = self._digests.get(parent)
        if before is None:
            return  # without its beginning, the rest of a prompt is of no use
        digests: list[bytes] = []
        extend_chain_after(before, digests, event.token_ids, 0, size)
        for name, digest, extra in zip(names, digests, keys, strict=False):
            if _salt(extra, adapter) != "" or not self._add(name, digest):
                break

    def _add(self, name: BlockName, digest: bytes) -> bool:
        """Add a copy of a block, and return whether the index has the block."""
        known = self._digests.get(name)
        if known == digest:
            self._copies[name] = self._copies.get(name, 1) + 1
            return True
        if known is not None:  # the server uses the name again
            self._remove([name] * self._copies.get(name, 1))
        if len(self._digests) >= self._most:
            return False
        self._digests[name] = digest
        self._cached.add(digest)
        return True

    def _remove(self, names: Sequence[BlockName]) -> None:
        """Remove a copy of each block."""
        for name in names:
            copies = self._copies.pop(name, 1) - 1
            if copies > 1:
                self._copies[name] = copies
            if copies < 1:
                digest = self._digests.pop(name, None)
                if digest is not None:
                    self._cached.discard(digest)


def _salt(extra: Sequence[Any] | None, adapter: str) -> str | None:
    """Return the salt in the keys of a block, or None if they contain anything else.

    The name of the adapter is also allowed. An image is a list of its identifier and its place.
    """
    others = [key for key in extra or () if key != adapter]
    if not others:
        return ""
    return others[0] if len(others) == 1 and isinstance(others[0], str) else None
