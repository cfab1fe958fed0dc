"""The transfer of a prefix: the destination pulls blocks, and the source keeps no state for it.

A transfer may end after any block, because every leading part of a prefix is useful. The
destination computes the rest. A stream resumes by the same steps with and without a transfer, so a
transfer can only save time.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from enum import StrEnum
from itertools import islice
from typing import Final, NamedTuple, Protocol, cast, runtime_checkable

from draftgate.backends.base import KvEndpoint
from draftgate.backends.errors import BackendFailed
from draftgate.backends.kv_transfer.exchange import (
    AdoptBlocks,
    BlockCount,
    CountBlocks,
    ExportBlocks,
    KvOperation,
    KvResult,
)
from draftgate.backends.kv_transfer.format import NO_BLOCKS, KvChunk

WINDOW_CHUNKS: Final = 8
"""The flow-control window: most chunks that the source prepares ahead, and that the destination
stores at the same time. A busy worker runs its operations after a step. With two chunks, a worker
with long steps would transfer only two chunks per step, although it has time for more. (Chosen, not
tuned, 2026-11-23.)"""

CHUNK_BYTES: Final = 384 << 10
"""Bytes of a chunk, which one turn of a worker's thread copies. Its turn takes 0.2 ms, or 2% of a
step of 10 ms. (Copy and checksum on one core, AVX-512 machine, 2026-11-23.)"""

Hashes = tuple[bytes, ...]


class TransferEnd(StrEnum):
    """The reason for the end of a transfer."""

    COMPLETE = "complete"
    MISSING = "missing"
    """The source does not hold the next block."""
    FULL = "full"
    """The destination has no free block left."""
    DAMAGED = "damaged"
    """A block had another checksum, so the destination dropped it."""
    LATE = "late"
    """The time that the caller allowed has passed."""
    FAILED = "failed"
    """The source or the destination failed."""


class TransferOutcome(NamedTuple):
    """The outcome of a transfer: its end, and the numbers of stored blocks and of chunks."""

    end: TransferEnd
    blocks: int = 0
    chunks: int = 0


@runtime_checkable
class FetchingSink(KvEndpoint, Protocol):
    """A destination that may pull blocks itself, so that they do not pass through this process."""

    async def fetch_blocks(
        self,
        source: KvEndpoint,
        hashes: Sequence[bytes],
        first: int,
        most_s: float | None,
        *,
        urgent: bool,
    ) -> TransferOutcome | None:
        """Transfer blocks as `Transfer` does, or return None if the source cannot be reached.

        Raises:
            BackendFailed: the destination failed.
        """


class Transfer:
    """A transfer of blocks from one worker to another.

    Attributes:
        blocks: number of blocks that the destination has stored or held already.
        chunks: number of chunks that have arrived.
    """

    def __init__(
        self,
        source: KvEndpoint,
        sink: KvEndpoint,
        hashes: Sequence[bytes],
        first: int = 0,
        *,
        urgent: bool = False,
    ) -> None:
        """Prepare a transfer without sending anything.

        Args:
            source: the worker that holds the blocks, in the format of the sink.
            sink: the destination.
            hashes: hash chain of the prefix.
            first: number of leading blocks that the destination holds already.
            urgent: as for `KvEndpoint.pull_blocks`.
        """
        self._source = source
        self._sink = sink
        self._hashes = tuple(hashes)
        self._first = first
        self._urgent = urgent
        self._end: TransferEnd | None = None  # the reason why the destination stores no more
        self.blocks = 0
        self.chunks = 0

    async def run(self, most_s: float | None = None) -> TransferEnd:
        """Transfer blocks until the end of the chain, or as far as possible.

        Args:
            most_s: time after which the transfer ends, in seconds, or None for no limit.
        """
        now_s = asyncio.get_running_loop().time
        until_s = None if most_s is None else now_s() + most_s
        try:
            if isinstance(self._sink, FetchingSink):
                fetched = await self._sink.fetch_blocks(
                    self._source, self._hashes, self._first, most_s, urgent=self._urgent
                )
                if fetched is not None:
                    end, self.blocks, self.chunks = fetched
                    return end
            async with asyncio.timeout_at(until_s):
                return await self._relay()
        except TimeoutError:
            return TransferEnd.LATE
        except BackendFailed:
            return TransferEnd.FAILED

    async def _relay(self) -> TransferEnd:
        under_way = deque[_Storing]()
        parent = self._hashes[self._first - 1] if self._first else b""
        pulled = self._source.pull_blocks(self._hashes[self._first :], urgent=self._urgent)
        try:
            async with aclosing(pulled) as chunks:
                async for chunk in chunks:
                    if len(under_way) == WINDOW_CHUNKS:
                        await under_way[0].stored
                    self._count_stored(under_way)
                    if self._end is not None:
                        return self._end
                    storing = self._sink.adopt_blocks(chunk, parent, urgent=self._urgent)
                    under_way.append(_Storing(chunk, asyncio.ensure_future(storing)))
                    parent = chunk.hashes[-1]
            while under_way:
                await under_way[0].stored
                self._count_stored(under_way)
        except BackendFailed:  # the blocks that have arrived are stored all the same
            await asyncio.gather(*(one.stored for one in under_way), return_exceptions=True)
            raise
        finally:
            self._count_stored(under_way)
            for one in under_way:
                one.stored.cancel()
        if self._end is not None:
            return self._end
        is_whole = self._first + self.blocks == len(self._hashes)
        return TransferEnd.COMPLETE if is_whole else TransferEnd.MISSING

    def _count_stored(self, under_way: deque[_Storing]) -> None:
        """Count the first chunks that are stored. Chunks are useless after a missing block."""
        while under_way and under_way[0].stored.done():
            chunk, result = under_way.popleft()
            if self._end is not None or result.cancelled() or result.exception() is not None:
                continue
            stored = result.result()
            self.chunks += 1
            self.blocks += stored.blocks
            if stored.damaged:
                self._end = TransferEnd.DAMAGED
            elif stored.blocks < len(chunk.hashes):
                self._end = TransferEnd.FULL


class _Storing(NamedTuple):
    """A chunk that the destination stores. Chunks are stored in order."""

    chunk: KvChunk
    stored: asyncio.Future[BlockCount]


def blocks_per_chunk(block_bytes: int) -> int:
    """Return the number of blocks in a full chunk, which is at least one."""
    return max(1, CHUNK_BYTES // max(block_bytes, 1))


async def export_chunks(
    export: Callable[[Hashes], Awaitable[KvChunk]], hashes: Sequence[bytes], block_bytes: int
) -> AsyncGenerator[KvChunk, None]:
    """Yield the blocks of a hash chain in chunks, up to the first that the source does not hold.

    Args:
        export: begins to copy the blocks of some hashes up to the first missing one.
        hashes: consecutive part of a chain.
        block_bytes: bytes of a block.
    """
    size = blocks_per_chunk(block_bytes)
    parts = iter([tuple(hashes[i : i + size]) for i in range(0, len(hashes), size)])
    under_way = deque(
        (len(part), asyncio.ensure_future(export(part))) for part in islice(parts, WINDOW_CHUNKS)
    )
    try:
        while under_way:
            wanted, chunk = under_way[0][0], await under_way[0][1]
            under_way.popleft()
            if chunk.hashes:
                yield chunk
            if len(chunk.hashes) < wanted:
                return
            for part in islice(parts, 1):
                under_way.append((len(part), asyncio.ensure_future(export(part))))
    finally:
        for _, pending in under_way:
            pending.cancel()


# --- KV transfer with a worker whose operations run in another thread, process or node ------------


class OperatedBlocks(ABC):
    """Implements `KvEndpoint` of `backends.base` by operations (`exchange`)."""

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """Bytes of a block."""

    @abstractmethod
    def operate(self, operation: KvOperation) -> Awaitable[KvResult]:
        """Begin an operation on the worker's blocks, and return its result.

        A transfer has several operations under way. A worker of this process therefore returns a
        future, because a task for each operation takes longer than a simulated operation.

        Raises:
            BackendFailed: the worker failed, also when the result is awaited.
        """

    async def held_blocks(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of a hash chain the worker holds."""
        return (await self._count(CountBlocks(tuple(hashes)))).blocks

    async def begin_import(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of a hash chain the worker holds, and keep them."""
        return (await self._count(CountBlocks(tuple(hashes), for_import=True))).blocks

    def pull_blocks(
        self, hashes: Sequence[bytes], *, urgent: bool = False
    ) -> AsyncGenerator[KvChunk, None]:
        """Yield the blocks of a part of a hash chain, up to the first that the worker lacks."""

        def export(part: tuple[bytes, ...]) -> Awaitable[KvChunk]:
            return cast("Awaitable[KvChunk]", self.operate(ExportBlocks(part, urgent)))

        return export_chunks(export, hashes, self.block_bytes)

    def adopt_blocks(
        self, chunk: KvChunk, parent: bytes, *, urgent: bool = False
    ) -> Awaitable[BlockCount]:
        """Begin to store the blocks of a chunk, and return how many the worker holds then."""
        operation = AdoptBlocks(chunk, parent, urgent)
        return cast("Awaitable[BlockCount]", self.operate(operation))

    async def _count(self, operation: CountBlocks) -> BlockCount:
        count = await self.operate(operation)
        assert isinstance(count, BlockCount)
        return count


async def operate_on(worker: KvEndpoint, operation: KvOperation) -> KvResult:
    """Run an operation that another node requests on a worker.

    An export ends after one chunk (`transfer.CHUNK_BYTES`), however many blocks the node requests.

    Raises:
        BackendFailed: the worker failed.
    """
    if isinstance(operation, AdoptBlocks):
        chunk, parent, urgent = operation.chunk, operation.parent, operation.urgent
        return await worker.adopt_blocks(chunk, parent, urgent=urgent)
    if isinstance(operation, ExportBlocks):
        async with aclosing(
            worker.pull_blocks(operation.hashes, urgent=operation.urgent)
        ) as chunks:
            return await anext(chunks, NO_BLOCKS)
    count = worker.begin_import if operation.for_import else worker.held_blocks
    return BlockCount(await count(operation.hashes))
