"""Workers with KV blocks of known bytes, for transfers between nodes without an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random

from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.kv_transfer.exchange import (
    AdoptBlocks,
    ExportBlocks,
    KvExchange,
    KvOperation,
    KvResult,
)
from draftgate.backends.kv_transfer.format import KvFormat, chunk_of
from draftgate.backends.kv_transfer.transfer import OperatedBlocks
from draftgate.backends.peer.backend import PeerBackend
from draftgate.backends.types import ModelCard
from tests.gateway.harness import ScriptedBackend, running
from tests.gateway.tcp_proxy import TcpProxy, proxied
from tests.peer.harness import linked_to

FORM = KvFormat("test", "float32", block_tokens=16, strips=8, head_dim=96)
NUM_BLOCKS = 64
CHUNK_BLOCKS = 8
"""Blocks of `FORM` in a chunk."""


class ByteMemory:
    """The bytes of blocks in a list."""

    block_bytes = FORM.block_bytes

    def __init__(self) -> None:
        self._blocks = [bytes(self.block_bytes)] * NUM_BLOCKS

    def read(self, blocks: Sequence[int]) -> memoryview:
        return memoryview(b"".join(self._blocks[block] for block in blocks))

    def write(self, blocks: Sequence[int], data: memoryview) -> None:
        for index, block in enumerate(blocks):
            begin = index * self.block_bytes
            self._blocks[block] = bytes(data[begin : begin + self.block_bytes])


class BlockWorker(ScriptedBackend, OperatedBlocks):
    """A worker whose requests the test controls, with real operations on its blocks.

    Attributes:
        exports: number of exported chunks.
        adoptions: number of received chunks.
    """

    block_bytes = FORM.block_bytes

    def __init__(self, form: KvFormat = FORM) -> None:
        super().__init__()
        self.card = ModelCard("scripted", "scripted", 1000, "test", 1, kv_format=form)
        self.exports = self.adoptions = 0
        self._exchange = KvExchange(KvBlocks(NUM_BLOCKS, form.block_tokens), ByteMemory())

    async def operate(self, operation: KvOperation) -> KvResult:
        self.exports += isinstance(operation, ExportBlocks)
        self.adoptions += isinstance(operation, AdoptBlocks)
        return self._exchange.run(operation, 0.0)

    async def fill(self, blocks: int) -> tuple[bytes, ...]:
        """Store some random blocks, and return their hashes."""
        draw = Random(blocks)
        hashes = tuple(draw.randbytes(16) for _ in range(blocks))
        data = draw.randbytes(blocks * FORM.block_bytes)
        self._exchange.run(AdoptBlocks(chunk_of(hashes, memoryview(data))), 0.0)
        return hashes

    async def bytes_of(self, hashes: tuple[bytes, ...]) -> bytes:
        """Return the bytes of the leading blocks of a chain that the worker holds."""
        return bytes(self._exchange.run(ExportBlocks(hashes), 0.0).data)


class Cutting(BlockWorker):
    """A worker whose node loses all connections at its second operation on a chunk."""

    proxy: TcpProxy

    async def operate(self, operation: KvOperation) -> KvResult:
        if self.exports + self.adoptions == 1:
            self.proxy.cut(refuse=True)
        return await super().operate(operation)


@asynccontextmanager
async def remote(worker: BlockWorker) -> AsyncIterator[PeerBackend]:
    """Yield a backend that is linked to a node with this worker."""
    async with running(backends=[worker]) as where, linked_to(where.url) as backend:
        yield backend


@asynccontextmanager
async def remote_behind_proxy(worker: BlockWorker) -> AsyncIterator[tuple[PeerBackend, TcpProxy]]:
    """Yield a backend that is linked to a node with this worker through a proxy."""
    async with (
        running(backends=[worker]) as where,
        proxied(where.url) as proxy,
        linked_to(proxy.url) as backend,
    ):
        yield backend, proxy
