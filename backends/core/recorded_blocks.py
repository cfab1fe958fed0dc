"""KV blocks with recorded evictions.

A draft model borrows blocks, so cached blocks are evicted earlier than without a draft model. A
replay has no draft model. It evicts as many blocks as the live worker, before the same operation.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from draftgate.backends.core.kv_blocks import KvBlocks


class CountedKvBlocks(KvBlocks):
    """KV blocks that count the operations which read or change the cached blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._operations = 0

    def num_cached(self, hashes: Sequence[bytes]) -> int:
        self._begin()
        return super().num_cached(hashes)

    def needed(self, hashes: Sequence[bytes], tokens: int) -> int:
        self._begin()
        return super().needed(hashes, tokens)

    def admit(self, table: array[int], hashes: Sequence[bytes], tokens: int) -> int:
        self._begin()
        return super().admit(table, hashes, tokens)

    def extend(self, table: array[int], tokens: int) -> None:
        self._begin(may_evict=True)
        super().extend(table, tokens)

    def trim(self, table: array[int], tokens: int) -> None:
        self._begin()
        super().trim(table, tokens)

    def confirm(self, table: Sequence[int], hashes: Sequence[bytes], blocks: range) -> None:
        self._begin()
        super().confirm(table, hashes, blocks)

    def _begin(self, *, may_evict: bool = False) -> None:
        """Begin the next operation."""
        self._operations += 1


class RecordedKvBlocks(CountedKvBlocks):
    """KV blocks that record evictions, if they lend blocks.

    Attributes:
        records: whether to record evictions.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.records = True
        self._evictions: list[tuple[int, int]] = []

    def is_cached(self, digest: bytes) -> bool:
        """Return whether the block with this hash is cached."""
        return bool(self._cache.find((digest,)))

    def take_evictions(self) -> list[tuple[int, int]]:
        """Return the operation and the number of blocks of all evictions since the last time."""
        taken, self._evictions = self._evictions, []
        return taken

    def _evict_until(self, free: int) -> None:
        unused = self._cache.num_unused
        super()._evict_until(free)
        evicted = unused - self._cache.num_unused
        if evicted and self.records and self._call_in is not None:
            self._evictions.append((self._operations, evicted))
