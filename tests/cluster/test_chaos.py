"""Two gateways and three workers under Poisson load, while nodes die, hang and restart.

`make test-long` runs ten minutes with a kill every 30 s; `CLUSTER_S=120` shortens it.
`CLUSTER_JSON=FILE` keeps the measurements.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from draftgate.gateway.dispatch.leases import LEASE_S
from tests.cluster.clients import Clients, clients_of, questions
from tests.cluster.figures import latencies, write_figures
from tests.cluster.nodes import Cluster, cluster
from tests.cluster.pool import settled
from tests.cluster.troubles import Troubles
from tests.cluster.watching import Watch, watching
from tests.gateway.redis_server import RedisServer

CLUSTER_S = float(os.environ.get("CLUSTER_S", "600"))
KILL_EVERY_S = 30.0
RATE_RPS = 0.5
"""Rate of requests of 24 and 192 tokens.

Chosen so that streams last for seconds and queues stay short, with everything on two shared cores
(AMD Zen 5, 2026-11-22)."""

MOST_TOKENS = 192
WORKER = ("--threads", "1", "--kv-bytes", "16MiB")
"""Little memory, so that leases are a real limit."""

MOST_USAGE = 2.0
"""Largest leased share of a capacity, with gateways that decide alone when Redis is late
(docs/guide/cluster.md)."""

SEED = 20261122


@dataclass
class Outcome:
    """The outcome of a run.

    Attributes:
        changed: answers that differ from those of an undisturbed run.
    """

    clients: Clients
    troubles: Troubles
    watch: Watch
    changed: list[str]


async def chaos(
    nodes: Cluster, redis: RedisServer, play: Callable[[Troubles], Awaitable[None]]
) -> Outcome:
    """Send load with failures, then the same requests without; check that nothing is left."""
    over = asyncio.Event()
    async with clients_of(*(gateway.url for gateway in nodes.gateways)) as clients:
        troubles = Troubles(nodes, clients.clock, random.Random(SEED))
        async with watching(redis) as watch:
            asked = questions(RATE_RPS, SEED, MOST_TOKENS)
            sending = asyncio.create_task(clients.send(asked, over))
            playing = asyncio.ensure_future(play(troubles))
            await asyncio.wait({sending, playing}, return_when=asyncio.FIRST_COMPLETED)
            over.set()
            await asyncio.gather(sending, playing)
        await settled(nodes, redis)
        changed = await clients.changed(at_once=4)
        await settled(nodes, redis)
    return Outcome(clients, troubles, watch, changed)


async def one_round(troubles: Troubles) -> None:
    """A kill, a pause and a restart."""
    await troubles.round(0)


async def minutes(troubles: Troubles) -> None:
    """A round of all three every 30 s."""
    begun_s = troubles.now_s()
    for number in range(round(CLUSTER_S / KILL_EVERY_S)):
        await troubles.round(number)
        next_s = begun_s + (number + 1) * KILL_EVERY_S
        await asyncio.sleep(max(0.0, next_s - troubles.now_s()))


def told(outcome: Outcome) -> dict[str, Any]:
    """Return the results."""
    clients, watch = outcome.clients, outcome.watch
    return {
        "requests": len(clients.records),
        "failed": len(clients.failed),
        "texts_that_differ": len(outcome.changed),
        "resumes": clients.resumes,
        "refused_by_a_gateway_that_stopped": clients.refusals,
        "redis_looks": watch.looks,
        "most_leased_of_capacity": round(watch.usage, 3),
        "longest_lease_after_its_end_s": round(watch.overdue_s, 3),
        "latencies": latencies(clients.records),
        "troubles": outcome.troubles.made,
    }


@pytest.mark.parametrize(
    "play", [one_round, pytest.param(minutes, marks=pytest.mark.long)], ids=["round", "minutes"]
)
async def test_no_stream_is_lost_while_nodes_fail(
    tmp_path: Path, own_redis: RedisServer, play: Callable[[Troubles], Awaitable[None]]
) -> None:
    """With workers killed and paused and gateways restarted, every stream is intact, its text is
    that of an undisturbed run, and no lease, block or request is left."""
    async with cluster(tmp_path, own_redis.url, *WORKER) as nodes:
        outcome = await chaos(nodes, own_redis, play)
    command = f'CLUSTER_S={CLUSTER_S:g} make test-long ARGS="tests/cluster/test_chaos.py -s"'
    write_figures("CLUSTER_JSON", command, told(outcome))
    assert outcome.clients.failed == []
    assert outcome.changed == []
    assert outcome.watch.looks
    assert not outcome.watch.wrong
    assert outcome.watch.usage <= MOST_USAGE
    assert outcome.watch.overdue_s < LEASE_S
