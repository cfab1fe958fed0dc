"""KV transfer with a worker whose operations run in another thread, process or node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from draftgate.backends.base import KvEndpoint
from draftgate.backends.kv_transfer.exchange import (
    AdoptBlocks,
    BlockCount,
    CountBlocks,
    ExportBlocks,
    KvOperation,
    KvResult,
)
from draftgate.backends.kv_transfer.format import NO_BLOCKS, KvChunk
from draftgate.backends.kv_transfer.transfer import export_chunks


class OperatedBlocks(ABC):
    """Implements `KvSource` and `KvSink` of `backends.base` by operations (`exchange`)."""

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """Bytes of a block."""

    @abstractmethod
    async def operate(self, operation: KvOperation) -> KvResult:
        """Run an operation on the worker's blocks.

        Raises:
            BackendFailed: the worker failed.
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

        async def export(part: tuple[bytes, ...]) -> KvChunk:
            chunk = await self.operate(ExportBlocks(part, urgent))
            assert isinstance(chunk, KvChunk)
            return chunk

        return export_chunks(export, hashes, self.block_bytes)

    async def adopt_blocks(
        self, chunk: KvChunk, parent: bytes, *, urgent: bool = False
    ) -> BlockCount:
        """Store the blocks of a chunk, and return how many the worker holds now."""
        return await self._count(AdoptBlocks(chunk, parent, urgent))

    async def _count(self, operation: CountBlocks | AdoptBlocks) -> BlockCount:
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
