"""Transfers of KV blocks between two peers, and requests that take their blocks to another node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from aiohttp.test_utils import make_mocked_request

from draftgate.backends.kv_transfer.exchange import ExportBlocks, KvOperation, KvResult
from draftgate.backends.kv_transfer.transfer import Transfer, TransferEnd
from draftgate.backends.peer.backend import PeerBackend
from draftgate.backends.peer.blocks import BLOCKS_PATH
from draftgate.backends.peer.channel import WORKER_PATH
from draftgate.backends.sim.profile import load_profile
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.http.peers.blocks import BlockSession
from tests.gateway.harness import client, running, until
from tests.gateway.tcp_proxy import TcpProxy
from tests.gateway.troubles import lose_first_stream
from tests.peer.blocks import (
    CHUNK_BLOCKS,
    FORM,
    BlockWorker,
    Cutting,
    remote,
    remote_behind_proxy,
)
from tests.upstream_settings import at

PATH = WORKER_PATH + "0" + BLOCKS_PATH


@asynccontextmanager
async def peers(
    *workers: BlockWorker,
) -> AsyncIterator[tuple[PeerBackend, PeerBackend, TcpProxy]]:
    """Connect to two peers, and yield the source, the destination, and the source's proxy."""
    async with remote_behind_proxy(workers[0]) as (source, proxy), remote(workers[1]) as sink:
        yield source, sink, proxy


@pytest.fixture
def _direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no block pass through the gateway."""

    def pull(self: PeerBackend, hashes: Sequence[bytes], *, urgent: bool) -> None:
        raise AssertionError("the gateway pulls blocks of a peer")

    monkeypatch.setattr(PeerBackend, "pull_blocks", pull)


@pytest.mark.usefixtures("_direct")
async def test_peers_exchange_blocks_directly() -> None:
    """The destination's node pulls the missing blocks from the source's node."""
    workers = [BlockWorker(), BlockWorker()]
    hashes = await workers[0].fill(30)
    async with peers(*workers) as (source, sink, _):
        assert await Transfer(source, sink, hashes[:5]).run() is TransferEnd.COMPLETE
        transfer = Transfer(source, sink, (*hashes, b"unknown hash 16b"), first=5)
        assert await transfer.run() is TransferEnd.MISSING
        assert (transfer.blocks, transfer.chunks) == (25, 4)
    assert await workers[1].bytes_of(hashes) == await workers[0].bytes_of(hashes)


async def test_blocks_pass_through_the_gateway_if_the_peers_cannot_meet() -> None:
    """A destination that cannot reach the source gets the blocks from the gateway, and is not asked
    again soon."""
    workers = [BlockWorker(), BlockWorker()]
    hashes = await workers[0].fill(30)
    async with peers(*workers) as (source, sink, _):
        source.url = "http://127.0.0.1:1/peer/v1/workers/0"  # the address that the peer gets
        assert await sink.fetch_blocks(source, hashes, 0, None, urgent=False) is None
        assert await Transfer(source, sink, hashes).run() is TransferEnd.COMPLETE
    assert await workers[1].bytes_of(hashes) == await workers[0].bytes_of(hashes)


@pytest.mark.parametrize(
    ("source", "remote", "may"),
    [
        ("http://10.0.0.7:8000/peer/v1/workers/1", "10.0.0.8", True),
        ("http://127.0.0.1:8000/peer/v1/workers/0", "127.0.0.1", True),
        ("http://127.0.0.1:8000/peer/v1/workers/0", "10.0.0.8", False),
        ("http://10.0.0.7:8000/v1/completions", "10.0.0.8", False),
        ("http://10.0.0.7:8000/peer/v1/workers/1/../../..", "10.0.0.8", False),
    ],
)
def test_node_connects_only_to_workers_that_the_gateway_means(
    source: str, remote: str, may: bool
) -> None:
    """A node connects to no other path, and not to its own loopback address for another machine."""
    request = make_mocked_request("GET", PATH).clone(remote=remote)
    session = BlockSession(FleetWorker("w", BlockWorker()), FORM, request, None)
    assert session._may_reach(source) is may


@pytest.mark.usefixtures("_direct")
async def test_lost_source_ends_a_direct_transfer() -> None:
    """The gateway learns how many blocks the destination has got."""
    workers = [Cutting(), BlockWorker()]
    hashes = await workers[0].fill(30)
    async with peers(*workers) as (source, sink, workers[0].proxy):
        transfer = Transfer(source, sink, hashes)
        assert await transfer.run() is TransferEnd.FAILED
        assert transfer.blocks == await sink.held_blocks(hashes) <= CHUNK_BLOCKS


class Stalling(BlockWorker):
    """A worker that exports no chunk after the first.

    Attributes:
        stalled: number of exports that hang.
    """

    stalled = 0

    async def operate(self, operation: KvOperation) -> KvResult:
        if isinstance(operation, ExportBlocks) and self.exports:
            self.stalled += 1
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.stalled -= 1
        return await super().operate(operation)


@pytest.mark.usefixtures("_direct")
async def test_direct_transfer_ends_at_the_time_limit() -> None:
    """The gateway learns how many blocks the destination has got from a source that hangs."""
    workers = [Stalling(), BlockWorker()]
    hashes = await workers[0].fill(30)
    async with peers(*workers) as (source, sink, _):
        transfer = Transfer(source, sink, hashes)
        assert await transfer.run(0.1) is TransferEnd.LATE
        assert transfer.blocks in {0, await sink.held_blocks(hashes)}
        await until(lambda: workers[0].stalled == 0)


@pytest.mark.usefixtures("_direct")
async def test_cancelled_direct_transfer_ends_at_both_peers() -> None:
    """No operation is left at the source when the gateway cancels a transfer between peers."""
    workers = [Stalling(), BlockWorker()]
    hashes = await workers[0].fill(30)
    async with peers(*workers) as (source, sink, _):
        transfer = asyncio.create_task(Transfer(source, sink, hashes).run())
        await until(lambda: workers[0].stalled > 0)
        transfer.cancel()
        await until(lambda: workers[0].stalled == 0)


@pytest.mark.usefixtures("_always_pulls")
async def test_resumed_request_takes_its_blocks_to_another_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that loses its stream resumes on another node with the blocks of the first."""
    lose_first_stream(monkeypatch, after_deltas=5)
    body = {"prompt": [7 + place * 31 % 500 for place in range(600)], "max_tokens": 20, "seed": 1}
    async with (
        running() as first,
        running() as second,
        running(backend="peer", upstream=at(first.url, second.url)) as where,
        client(where) as http,
    ):
        found = (await http.post("/v1/completions", json=body)).json()
        page = (await http.get("/metrics")).text
        again = (await http.post("/v1/completions", json=body)).json()  # without a loss
    assert found["choices"] == again["choices"]
    (resumed,) = found["metrics"]["resumes"]
    (line,) = (row for row in page.splitlines() if row.startswith("draftgate_kv_fetched_bytes_"))
    block_bytes = 16 * load_profile("cpu-demo").kv_token_bytes
    blocks = (600 + resumed["kept_tokens"] - 1) // 16
    assert float(line.rpartition(" ")[2]) == blocks * block_bytes
