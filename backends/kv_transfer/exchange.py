"""The operations on a worker's blocks: count, export and adopt.

The thread that runs a worker's steps runs each operation between two steps. So no block changes
while it is copied, and the source remembers nothing between two operations. A block that was
evicted in the meantime is missing, and ends the transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from msgspec import Struct

from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.kv_transfer.format import NO_BLOCKS, KvChunk, chunk_of

HOLD_S: Final = 10.0
"""Time in seconds for which imported blocks are held for their request. A request is usually
admitted within a few steps of its last block. (Llumnix ends a migration that makes no progress
after 10 s. Chosen, not tuned, 2026-11-23.)"""


class CountBlocks(Struct, tag=True, frozen=True):
    """Count the leading blocks of a hash chain that the worker holds.

    Attributes:
        for_import: whether the worker expects the rest of the chain, and must not evict the
            beginning meanwhile.
    """

    hashes: tuple[bytes, ...]
    for_import: bool = False


class ExportBlocks(Struct, tag=True, frozen=True):
    """Copy the blocks of consecutive hashes, up to the first that the worker does not hold.

    Attributes:
        urgent: whether a worker that is leaving waits for the operation, which may then delay
            sequences (`turns.URGENT_SHARE`).
    """

    hashes: tuple[bytes, ...]
    urgent: bool = False


class AdoptBlocks(Struct, tag=True, frozen=True):
    """Store the blocks of a chunk in the prefix cache, as far as memory is free.

    Attributes:
        parent: hash before those of the chunk, or empty.
        urgent: as for `ExportBlocks`.
    """

    chunk: KvChunk
    parent: bytes = b""
    urgent: bool = False


class BlockCount(Struct, tag=True, frozen=True):
    """The result of an operation that counts blocks.

    Attributes:
        blocks: leading blocks that the worker holds now.
        damaged: whether a block had a wrong checksum, so that it was dropped.
    """

    blocks: int
    damaged: bool = False


KvOperation = CountBlocks | ExportBlocks | AdoptBlocks
KvResult = BlockCount | KvChunk


class BlockMemory(Protocol):
    """The keys and values of a worker's blocks."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, or 0 if the worker is simulated."""
        ...

    def read(self, blocks: Sequence[int]) -> memoryview:
        """Return the bytes of at least one block, in order."""
        ...

    def write(self, blocks: Sequence[int], data: memoryview) -> None:
        """Replace the bytes of these blocks."""
        ...


class NoMemory:
    """The memory of blocks without bytes, for workers that exchange none."""

    block_bytes = 0

    def read(self, blocks: Sequence[int]) -> memoryview:
        """Return no bytes."""
        return memoryview(b"")

    def write(self, blocks: Sequence[int], data: memoryview) -> None:
        """Write nothing."""


class KvExchange:
    """Runs operations on the blocks of a worker, in the thread of its steps."""

    def __init__(self, blocks: KvBlocks, memory: BlockMemory) -> None:
        self._blocks = blocks
        self._memory = memory

    def run(self, operation: KvOperation, now_s: float) -> KvResult:
        """Run an operation.

        Args:
            now_s: time on the worker's clock, in seconds.
        """
        if isinstance(operation, CountBlocks):
            if operation.for_import:
                self._blocks.expire_holds(now_s)
                return BlockCount(self._blocks.hold(operation.hashes, now_s + HOLD_S))
            return BlockCount(len(self._blocks.located(operation.hashes)))
        if isinstance(operation, ExportBlocks):
            return self._export(operation)
        return self._adopt(operation, now_s)

    def _export(self, operation: ExportBlocks) -> KvChunk:
        blocks = self._blocks.located(operation.hashes)
        if not blocks:
            return NO_BLOCKS
        return chunk_of(operation.hashes[: len(blocks)], self._memory.read(blocks))

    def _adopt(self, operation: AdoptBlocks, now_s: float) -> BlockCount:
        chunk, size = operation.chunk, self._memory.block_bytes
        intact = chunk.hashes[: sum(1 for _ in chunk.intact(size))]
        self._blocks.expire_holds(now_s)
        adopted = self._blocks.adopt(intact, now_s + HOLD_S, operation.parent)
        if adopted:
            parts = [chunk.data[index * size : (index + 1) * size] for index in adopted]
            whole = len(adopted) == len(chunk.hashes)
            data = chunk.data if whole else memoryview(b"".join(parts))
            self._memory.write(list(adopted.values()), data)
        held = len(self._blocks.located(intact))
        return BlockCount(held, damaged=len(intact) < len(chunk.hashes))
