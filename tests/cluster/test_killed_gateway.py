"""`kill -9` of a gateway: its own connections break, and nothing of it is left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from draftgate.gateway.dispatch.leases import LEASE_S
from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.types import PlannedRequest, RequestSpec
from tests.cluster.clients import Clients, clients_of
from tests.cluster.nodes import Cluster, cluster, eventually
from tests.cluster.pool import look, settled
from tests.gateway.redis_server import RedisServer
from tests.peer.harness import SLOW

STREAMS = 4
"""Streams at each of two gateways."""

TOKENS = 900
"""Tokens of a stream: six seconds of the simulated device, so that all streams run at once."""

EXTRA = (("ignore_eos", True),)


def asked(number: int) -> PlannedRequest:
    """A request for the first gateway if its number is even, otherwise for the second."""
    question = RequestSpec(f"def f{number}(", (), TOKENS, number, extra=EXTRA)
    return PlannedRequest(number, None, question)


async def opened(nodes: Cluster, clients: Clients) -> list[asyncio.Task]:
    """Open streams at both gateways in turn, and wait until they run."""
    tasks = [
        asyncio.create_task(clients.ask(asked(number), clients.clock()))
        for number in range(2 * STREAMS)
    ]

    async def running() -> bool:
        seen = [await node.figure("draftgate_running_sequences") for node in nodes.workers]
        return sum(seen) == 2 * STREAMS

    await eventually(running)
    return tasks


@pytest.mark.parametrize(
    "waits", [False, pytest.param(True, marks=pytest.mark.long)], ids=["expiring", "expired"]
)
async def test_killing_a_gateway_breaks_only_its_own_connections(
    tmp_path: Path, own_redis: RedisServer, waits: bool
) -> None:
    """Streams of the other gateway continue, workers drop the orphaned sequences, the leases
    expire, and the gateway can return."""
    async with (
        cluster(tmp_path, own_redis.url, "--backend", "sim", "--profile", SLOW) as nodes,
        clients_of(*(gateway.url for gateway in nodes.gateways)) as clients,
    ):
        killed, other = nodes.gateways
        tasks = await opened(nodes, clients)
        assert len(look(own_redis).leases) == 2 * STREAMS
        await killed.kill()
        records = await asyncio.gather(*tasks)
        assert [r.verdict for r in records[::2]] == [Verdict.CUT] * STREAMS
        assert [r.verdict for r in records[1::2]] == [Verdict.OK] * STREAMS

        async def freed() -> bool:
            return not any([await node.in_flight() for node in (*nodes.workers, other)])

        await eventually(freed)

        async def only_its_own() -> bool:
            pool = await asyncio.to_thread(look, own_redis)
            others = len(nodes.workers) + 1  # the killed gateway is no longer counted
            return len(pool.leases) <= STREAMS and len(pool.gateways) == others

        await eventually(only_its_own)
        first = look(own_redis).left_s
        assert all(left_s <= LEASE_S for left_s in first.values())
        await asyncio.sleep(1.0)
        second = look(own_redis).left_s
        assert all(second[request] < first[request] for request in second)
        await killed.start()
        await killed.until_ready()
        assert (await clients.ask(asked(0), clients.clock())).verdict == Verdict.OK
        if waits:
            await settled(nodes, own_redis)
