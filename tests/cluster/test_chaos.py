"""Two gateways and three workers under Poisson load, while nodes die, hang and restart.

`make soak` runs hours with more nodes, the shipped model and more kinds of faults (`tests/chaos`).
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftgate.gateway.dispatch.leases import LEASE_S
from draftgate.loadgen.types import PlannedRequest
from tests.cluster.clients import Clients, clients_of, planned_requests
from tests.cluster.nodes import Cluster, cluster
from tests.cluster.pool import until_settled
from tests.cluster.results import latencies
from tests.cluster.troubles import NodeFailures
from tests.cluster.watching import Watch, watching
from tests.gateway.redis_server import RedisServer
from tests.peer.harness import SLOW

CLUSTER_S = float(os.environ.get("CLUSTER_S", "600"))
KILL_EVERY_S = 30.0
MOST_TOKENS = 192

SIMULATED = ("--backend", "sim", "--profile", SLOW, "--kv-bytes", "64MiB")
"""Flags of workers with little memory."""

RATE_RPS = 1.0
"""Rate of requests of 24 and 192 tokens."""

MOST_USAGE = 2.0
"""The largest leased share of a capacity when gateways decide alone because Redis is late
(docs/guide/cluster.md)."""

SEED = 20261122


@dataclass
class Outcome:
    """The outcome of a run.

    Attributes:
        changed_responses: descriptions of responses that differ from those of an undisturbed run.
    """

    clients: Clients
    troubles: NodeFailures
    watch: Watch
    changed_responses: list[str]


async def chaos(
    nodes: Cluster,
    redis: RedisServer,
    planned: Iterator[PlannedRequest],
    play: Callable[[NodeFailures], Awaitable[None]],
    concurrency: int = 4,
) -> Outcome:
    """Send load during failures, repeat the same requests without failures, and check the
    cleanup.

    Args:
        concurrency: number of requests that are repeated at the same time.
    """
    over = asyncio.Event()
    async with clients_of(*(gateway.url for gateway in nodes.gateways)) as clients:
        troubles = NodeFailures(nodes, clients.clock, random.Random(SEED))
        async with watching(redis) as watch:
            sending = asyncio.create_task(clients.send(planned, over))
            playing = asyncio.ensure_future(play(troubles))
            await asyncio.wait({sending, playing}, return_when=asyncio.FIRST_COMPLETED)
            over.set()
            await asyncio.gather(sending, playing)
        await until_settled(nodes, redis)
        changed_responses = await clients.changed_responses(concurrency)
        await until_settled(nodes, redis)
    return Outcome(clients, troubles, watch, changed_responses)


def results_of(outcome: Outcome) -> dict[str, Any]:
    """Return the results of a run by name."""
    clients, watch = outcome.clients, outcome.watch
    return {
        "requests": len(clients.records),
        "failed": len(clients.failed),
        "texts_that_differ": len(outcome.changed_responses),
        "resumes": clients.resumes,
        "refused_by_a_gateway_that_stopped": clients.refusals,
        "redis_looks": watch.num_reads,
        "most_leased_of_capacity": round(watch.usage, 3),
        "longest_lease_after_its_end_s": round(watch.overdue_s, 3),
        "latencies": latencies(clients.records),
        "troubles": outcome.troubles.events,
    }


async def test_no_stream_is_lost_while_nodes_fail(tmp_path: Path, own_redis: RedisServer) -> None:
    """Every stream stays intact and unchanged while nodes are killed, paused and restarted.

    No lease, block or request remains afterwards.
    """
    async with cluster(tmp_path, own_redis.url, *SIMULATED) as nodes:
        planned = planned_requests(RATE_RPS, SEED, MOST_TOKENS)
        outcome = await chaos(nodes, own_redis, planned, lambda troubles: troubles.round(0))
    assert outcome.clients.failed == []
    assert outcome.changed_responses == []
    assert outcome.watch.num_reads
    assert not outcome.watch.wrong
    assert outcome.watch.usage <= MOST_USAGE
    assert outcome.watch.overdue_s < LEASE_S
