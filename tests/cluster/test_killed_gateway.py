"""A gateway killed with `kill -9`, which breaks only its own connections."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from draftgate.gateway.dispatch.leases import LEASE_S
from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.types import PlannedRequest, RequestSpec
from tests.cluster.clients import Clients, clients_of
from tests.cluster.nodes import Cluster, cluster, eventually
from tests.cluster.pool import read_pool, until_settled
from tests.gateway.redis_server import RedisServer
from tests.peer.harness import SLOW

STREAMS = 4
"""The number of streams at each of the two gateways."""

TOKENS = 900
"""Tokens of a stream, which take six seconds, so that all streams run concurrently."""

EXTRA = (("ignore_eos", True),)


def planned_request(number: int) -> PlannedRequest:
    """Return a request, which even numbers send to the first gateway and odd numbers to
    the second."""
    spec = RequestSpec(f"def f{number}(", (), TOKENS, number, extra=EXTRA)
    return PlannedRequest(number, None, spec)


async def open_streams(nodes: Cluster, clients: Clients) -> list[asyncio.Task]:
    """Open streams at both gateways in turn and wait until they run."""
    tasks = [
        asyncio.create_task(clients.send_request(planned_request(number), clients.clock()))
        for number in range(2 * STREAMS)
    ]

    async def running() -> bool:
        running_sequences = [
            await node.metric_sum("draftgate_running_sequences") for node in nodes.workers
        ]
        return sum(running_sequences) == 2 * STREAMS

    await eventually(running)
    return tasks


@pytest.mark.parametrize(
    "waits", [False, pytest.param(True, marks=pytest.mark.long)], ids=["expiring", "expired"]
)
async def test_killing_a_gateway_breaks_only_its_own_connections(
    tmp_path: Path, own_redis: RedisServer, waits: bool
) -> None:
    """The killed gateway loses its streams, and the other gateway completes all its streams.

    Workers drop the orphaned sequences, their leases expire, and the gateway can restart.
    """
    async with (
        cluster(tmp_path, own_redis.url, "--backend", "sim", "--profile", SLOW) as nodes,
        clients_of(*(gateway.url for gateway in nodes.gateways)) as clients,
    ):
        killed, other = nodes.gateways
        tasks = await open_streams(nodes, clients)
        assert len(read_pool(own_redis).leases) == 2 * STREAMS
        await killed.kill()
        records = await asyncio.gather(*tasks)
        assert [r.verdict for r in records[::2]] == [Verdict.CUT] * STREAMS
        assert [r.verdict for r in records[1::2]] == [Verdict.OK] * STREAMS

        async def freed() -> bool:
            return not any([await node.in_flight() for node in (*nodes.workers, other)])

        await eventually(freed)

        async def only_its_leases_remain() -> bool:
            pool = await asyncio.to_thread(read_pool, own_redis)
            num_nodes = len(nodes.workers) + 1  # The killed gateway no longer counts.
            return len(pool.leases) <= STREAMS and len(pool.nodes) == num_nodes

        await eventually(only_its_leases_remain)
        first = read_pool(own_redis).left_s
        assert all(left_s <= LEASE_S for left_s in first.values())
        await asyncio.sleep(1.0)
        second = read_pool(own_redis).left_s
        assert all(second[request] < first[request] for request in second)
        await killed.start()
        await killed.until_ready()
        assert (
            await clients.send_request(planned_request(0), clients.clock())
        ).verdict == Verdict.OK
        if waits:
            await until_settled(nodes, own_redis)
