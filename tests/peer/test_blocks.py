"""KV blocks that travel between nodes: transfers, faults, access and back-pressure."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import aiohttp
import pytest
import uvloop
from msgspec import structs

from draftgate.backends.errors import BackendFailed
from draftgate.backends.framing import framed
from draftgate.backends.kv_transfer.exchange import ExportBlocks, KvOperation, KvResult
from draftgate.backends.kv_transfer.format import KvChunk
from draftgate.backends.kv_transfer.transfer import WINDOW_CHUNKS, Transfer, TransferEnd
from draftgate.backends.peer.backend import PeerBackend
from draftgate.backends.peer.blocks import BLOCKS_PATH, PeerBlocks, format_digest
from draftgate.backends.peer.channel import WORKER_PATH
from draftgate.backends.peer.proof import SharedSecret
from draftgate.backends.peer.upgrade import PROOF_HEADER
from draftgate.gateway.app import Listening
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.http.peers.blocks import MOST_CALLS
from draftgate.gateway.lifecycle import NodeState
from tests.gateway.certificates import make_certificate
from tests.gateway.harness import client, running, until
from tests.peer.blocks import (
    CHUNK_BLOCKS,
    FORM,
    BlockWorker,
    Cutting,
    remote,
    remote_behind_proxy,
)
from tests.peer.harness import SECRET, a_card, impostor, linked_to, ready_message

PATH = WORKER_PATH + "0" + BLOCKS_PATH
VARIABLE = "CLUSTER_SECRET"


async def pulled(source: PeerBackend, hashes: tuple[bytes, ...]) -> list[int]:
    """Return the numbers of blocks in the chunks of a pull."""
    async with aclosing(source.pull_blocks(hashes)) as chunks:
        return [len(chunk.hashes) async for chunk in chunks]


@pytest.mark.parametrize("remotes", [(True, False), (False, True)], ids=["from", "to"])
async def test_blocks_travel_between_nodes(remotes: tuple[bool, bool]) -> None:
    """The destination gets the bytes of all blocks, from or to a worker of another node."""
    workers = [BlockWorker(), BlockWorker()]
    hashes = await workers[0].fill(30)
    async with AsyncExitStack() as stack:
        source, sink = [
            await stack.enter_async_context(remote(worker)) if is_remote else worker
            for worker, is_remote in zip(workers, remotes, strict=True)
        ]
        assert await source.held_blocks([*hashes, b"unknown hash 16b"]) == 30
        assert await sink.begin_import(hashes) == 0
        transfer = Transfer(source, sink, hashes)
        assert await transfer.run() is TransferEnd.COMPLETE
        assert (transfer.blocks, transfer.chunks) == (30, 4)
        assert await sink.held_blocks(hashes) == 30
    assert await workers[1].bytes_of(hashes) == await workers[0].bytes_of(hashes)


async def test_pull_ends_at_the_first_missing_block() -> None:
    """A chain whose end the source lacks ends early, and one that it lacks entirely is empty."""
    worker = BlockWorker()
    hashes = await worker.fill(10)
    async with remote(worker) as source:
        assert await pulled(source, (*hashes, *[b"unknown hash 16b"] * 9)) == [8, 2]
        assert await pulled(source, (b"unknown hash 16b", *hashes)) == []


async def test_request_for_many_blocks_gets_one_chunk() -> None:
    """A node that requests all blocks in one operation gets no more than a chunk."""
    worker = BlockWorker()
    hashes = await worker.fill(40)
    async with remote(worker) as source:
        chunk = await source.operate(ExportBlocks(hashes))
        assert isinstance(chunk, KvChunk)
        assert chunk.hashes == hashes[:CHUNK_BLOCKS]


@pytest.mark.parametrize("block", [0, 5, 20])
async def test_damaged_block_is_dropped(block: int) -> None:
    """A bit that is flipped between the nodes ends the transfer, and the blocks before the flip
    are used."""
    worker, sink = BlockWorker(), BlockWorker()
    hashes = await worker.fill(30)
    async with remote_behind_proxy(worker) as (source, proxy):
        await source.held_blocks(hashes)  # opens the stream
        transfer = Transfer(source, sink, hashes)
        chunk = block // CHUNK_BLOCKS
        # Half a block more than the blocks before this one is inside this one, because all
        # messages and reports together are shorter than that.
        proxy.flip_at = proxy.passed_bytes + block * FORM.block_bytes + FORM.block_bytes // 2
        assert await transfer.run() is TransferEnd.DAMAGED
        assert transfer.chunks == chunk + 1
        assert transfer.blocks == block
    expected = (await worker.bytes_of(hashes))[: block * FORM.block_bytes]
    assert await sink.bytes_of(hashes) == expected


@pytest.mark.parametrize("chunks", [0, 2])
async def test_truncated_stream_keeps_the_whole_chunks(chunks: int) -> None:
    """A connection that ends within a chunk fails the transfer after the chunks before."""
    worker, sink = BlockWorker(), BlockWorker()
    hashes = await worker.fill(30)
    async with remote_behind_proxy(worker) as (source, proxy):
        await source.held_blocks(hashes)
        passed = int((chunks + 0.5) * CHUNK_BLOCKS * FORM.block_bytes)
        proxy.most_bytes = proxy.passed_bytes + passed
        transfer = Transfer(source, sink, hashes)
        assert await transfer.run() is TransferEnd.FAILED
        assert transfer.blocks == chunks * CHUNK_BLOCKS == await sink.held_blocks(hashes)


async def test_lost_source_ends_the_transfer() -> None:
    """The transfer fails when the source's machine is lost, and so does each later operation."""
    worker, sink = Cutting(), BlockWorker()
    hashes = await worker.fill(30)
    async with remote_behind_proxy(worker) as (source, worker.proxy):
        transfer = Transfer(source, sink, hashes)
        assert await transfer.run() is TransferEnd.FAILED
        assert transfer.blocks == await sink.held_blocks(hashes) <= CHUNK_BLOCKS
        with pytest.raises(BackendFailed):
            await source.held_blocks(hashes)


async def test_lost_destination_ends_the_transfer() -> None:
    """The transfer fails when the destination's machine is lost, and the source lives on."""
    source, worker = BlockWorker(), Cutting()
    hashes = await source.fill(30)
    async with remote_behind_proxy(worker) as (sink, worker.proxy):
        assert await Transfer(source, sink, hashes).run() is TransferEnd.FAILED
        assert await source.held_blocks(hashes) == 30


async def test_broken_stream_is_opened_again() -> None:
    """The first operation after the end of a stream opens another stream."""
    worker = BlockWorker()
    hashes = await worker.fill(3)
    async with remote_behind_proxy(worker) as (source, proxy):
        assert await source.held_blocks(hashes) == 3
        proxy.cut()
        await until(lambda: source.failure is not None)
        await until(lambda: source.failure is None)
        assert await source.held_blocks(hashes) == 3


async def test_frozen_source_ends_at_the_time_limit() -> None:
    """A source that hangs within a transfer costs the destination the time that it allowed."""
    worker, sink = BlockWorker(), BlockWorker()
    hashes = await worker.fill(30)
    async with remote_behind_proxy(worker) as (source, proxy):
        await source.held_blocks(hashes)
        proxy.freeze()
        assert await Transfer(source, sink, hashes).run(0.05) is TransferEnd.LATE
        proxy.thaw()
        assert await source.held_blocks(hashes) == 30


class Confused(BlockWorker):
    """A worker that answers with the blocks of other hashes."""

    async def operate(self, operation: KvOperation) -> KvResult:
        result = await super().operate(operation)
        if isinstance(result, KvChunk):
            return structs.replace(result, hashes=result.hashes[::-1])
        return result


async def test_blocks_of_other_hashes_are_refused() -> None:
    """Blocks that the destination did not request never reach its cache."""
    worker, sink = Confused(), BlockWorker()
    hashes = await worker.fill(8)
    async with remote(worker) as source:
        assert await Transfer(source, sink, hashes).run() is TransferEnd.FAILED
        with pytest.raises(BackendFailed, match="unexpected answer"):
            await pulled(source, hashes)
    assert await sink.held_blocks(hashes[::-1]) == 0


class Failing(BlockWorker):
    """A worker whose operations on blocks fail."""

    async def operate(self, operation: KvOperation) -> KvResult:
        raise BackendFailed("the engine died")


async def test_failure_of_the_worker_reaches_the_other_node() -> None:
    """The other node gets the worker's error."""
    async with remote(Failing()) as source:
        with pytest.raises(BackendFailed, match="the engine died"):
            await source.held_blocks([b"h" * 16])


class Hanging(BlockWorker):
    """A worker whose operations end only when the test allows it.

    Attributes:
        running: number of operations.
        may_end: whether operations end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running = 0
        self.may_end = asyncio.Event()

    async def operate(self, operation: KvOperation) -> KvResult:
        self.running += 1
        try:
            await self.may_end.wait()
            return await super().operate(operation)
        finally:
            self.running -= 1


async def test_cancelled_operation_ends_at_the_source() -> None:
    """An operation whose caller is gone ends at the worker, and the stream stays open."""
    worker = Hanging()
    async with remote(worker) as source:
        call = asyncio.create_task(source.held_blocks([b"h" * 16]))
        await until(lambda: worker.running == 1)
        call.cancel()
        await until(lambda: worker.running == 0)


async def test_end_of_the_connection_ends_its_operations() -> None:
    """A node that closes its link leaves no operation."""
    worker = Hanging()
    async with running(backends=[worker]) as where:
        async with linked_to(where.url) as source:
            calls = [asyncio.create_task(source.held_blocks([b"h" * 16])) for _ in range(3)]
            await until(lambda: worker.running == 3)
        await until(lambda: worker.running == 0)
        for call in calls:
            with pytest.raises(BackendFailed):
                await call


async def test_operations_of_a_node_are_limited() -> None:
    """More operations than the limit wait in the connection, and all of them end."""
    worker = Hanging()
    async with running(backends=[worker]) as where, linked_to(where.url) as source:
        calls = [source.held_blocks([b"h" * 16]) for _ in range(MOST_CALLS + 9)]
        ended = asyncio.gather(*calls)
        await until(lambda: worker.running == MOST_CALLS)
        async with client(where) as http:  # the node has read what it is going to read
            await http.get("/health")
        assert worker.running == MOST_CALLS
        worker.may_end.set()
        assert await ended == [0] * len(calls)


async def test_slow_destination_slows_down_the_source() -> None:
    """The source copies no more chunks than the credit while the destination stores none."""
    worker = BlockWorker()
    hashes = await worker.fill((WINDOW_CHUNKS + 2) * CHUNK_BLOCKS)
    async with remote(worker) as source, aclosing(source.pull_blocks(hashes)) as chunks:
        await anext(chunks)
        await until(lambda: worker.exports == WINDOW_CHUNKS)
        await source.held_blocks(hashes)  # later operations have had their turn
        assert worker.exports == WINDOW_CHUNKS
        await anext(chunks)
        await until(lambda: worker.exports == WINDOW_CHUNKS + 1)


async def test_workers_of_other_formats_exchange_nothing() -> None:
    """A stream with another format looks like an unknown path."""
    other = structs.replace(FORM, numerics_class="another")
    async with running(backends=[BlockWorker(other)]) as where, aiohttp.ClientSession() as http:
        blocks = PeerBlocks(http, where.url + WORKER_PATH + "0", None, FORM)
        with pytest.raises(BackendFailed, match="status 404"):
            await blocks.held_blocks([b"h" * 16])


async def test_older_peer_is_served_without_blocks() -> None:
    """A peer that announces no stream of blocks gets no operation, although it has a format."""
    ready = ready_message(card=a_card(kv_format=FORM))
    async with impostor(ready) as peer, linked_to(peer.url) as backend:
        assert backend.card.kv_format is None
        assert FleetWorker("w", backend).kv_format is None
        with pytest.raises(BackendFailed, match="exchanges no KV blocks"):
            await backend.held_blocks([b"h" * 16])


async def test_peer_announces_its_stream() -> None:
    """A worker with blocks has its format at the other node, and a worker without blocks none."""
    async with remote(BlockWorker()) as backend:
        assert FleetWorker("w", backend).kv_format == FORM
    worker = BlockWorker()
    worker.card = a_card()
    async with remote(worker) as backend:
        assert FleetWorker("w", backend).kv_format is None


async def test_draining_node_still_supplies_blocks() -> None:
    """A node that shuts down supplies the blocks that its streams take along."""
    worker = BlockWorker()
    hashes = await worker.fill(3)
    async with running(backends=[worker]) as where, linked_to(where.url) as source:
        where.node.lifecycle.move_to(NodeState.DRAINING)
        assert await source.held_blocks(hashes) == 3


@pytest.fixture
async def guarded(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Listening, BlockWorker]]:
    """Yield a node that requires the cluster's secret, and its worker."""
    monkeypatch.setenv(VARIABLE, "a secret of the cluster")
    worker = BlockWorker()
    async with running(peer_secret_env=VARIABLE, backends=[worker]) as listening:
        yield listening, worker


async def test_stream_needs_a_proof(guarded: tuple[Listening, BlockWorker]) -> None:
    """The path looks missing without a proof, and with a proof that is too old, of another secret,
    or for requests."""
    where, worker = guarded
    upgrade = {"Connection": "Upgrade", "Upgrade": "tcp"}
    other = SharedSecret("a secret of another cluster")
    proofs = (
        SECRET.proof(PATH, 0.0),
        other.proof(PATH, time.time()),
        SECRET.proof(WORKER_PATH + "0", time.time()),
    )
    async with client(where) as http:
        for header in ({}, *({"Authorization": proof.header} for proof in proofs)):
            response = await http.get(
                PATH, params={"format": format_digest(FORM)}, headers={**upgrade, **header}
            )
            assert response.status_code == 404
    async with linked_to(where.url, secret=SECRET) as source:
        assert await source.held_blocks(await worker.fill(2)) == 2


async def test_server_without_the_secret_gets_no_hashes() -> None:
    """A server that cannot prove the secret gets neither hashes nor blocks."""
    received = bytearray()

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        answer = f"{PROOF_HEADER}: {'0' * 64}"
        head = f"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: tcp\r\n{answer}\r\n\r\n"
        writer.write(head.encode())
        received.extend(await reader.read())
        writer.close()

    server = await asyncio.start_server(pretend, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, aiohttp.ClientSession() as http:
        blocks = PeerBlocks(http, f"http://127.0.0.1:{port}{WORKER_PATH}0", SECRET, FORM)
        with pytest.raises(BackendFailed, match="has another secret, or none"):
            await blocks.held_blocks([b"h" * 16])
    assert not received


@pytest.mark.parametrize(
    "frame",
    [
        framed(b""),
        bytes([0x7F]) + bytes(3),
        framed(b"junk", 1 << 31),
        framed(b"junk"),
    ],
    ids=["empty", "long message", "long chunk", "no message"],
)
async def test_invalid_frame_ends_the_connection(frame: bytes) -> None:
    """A frame of another protocol, or one that is too long, ends the stream, not the node."""
    worker = BlockWorker()
    async with running(backends=[worker]) as where:
        reader, writer = await asyncio.open_connection("127.0.0.1", where.node.port)
        target = f"{PATH}?format={format_digest(FORM)}"
        head = f"GET {target} HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: tcp\r\n\r\n"
        writer.write(head.encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        writer.write(frame)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        async with linked_to(where.url) as source:
            assert await source.held_blocks([b"h" * 16]) == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_blocks_travel_over_tls_and_on_uvloop(
    new_loop: Callable[[], asyncio.AbstractEventLoop], tls: bool, tmp_path: Path
) -> None:
    """Blocks arrive unchanged with and without TLS, on both event loops."""
    certificate = make_certificate(tmp_path, "node")
    files = {"tls_certfile": str(certificate.cert), "tls_keyfile": str(certificate.key)}
    worker, sink = BlockWorker(), BlockWorker()

    async def scenario() -> None:
        hashes = await worker.fill(30)
        connector = aiohttp.TCPConnector(ssl=certificate.trusting_context())
        async with (
            running(backends=[worker], **(files if tls else {})) as where,
            aiohttp.ClientSession(connector=connector) as http,
        ):
            source = PeerBlocks(http, where.url + WORKER_PATH + "0", None, FORM)
            assert await Transfer(source, sink, hashes).run() is TransferEnd.COMPLETE
            source.close()
        assert await sink.bytes_of(hashes) == await worker.bytes_of(hashes)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())
