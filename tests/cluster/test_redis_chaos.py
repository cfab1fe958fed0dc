"""A cluster under Poisson load whose Redis is paused, killed, emptied, delayed or cut off.

`make test-long` uses the shipped model and holds each failure for `CLUSTER_TROUBLE_S` (20) seconds.
`CLUSTER_REDIS_JSON=FILE` writes the measurements to a file.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from draftgate.loadgen.types import Record
from tests.cluster.clients import Clients, clients_of, planned_requests
from tests.cluster.nodes import NodeProcess, cluster
from tests.cluster.pool import until_settled
from tests.cluster.redis_troubles import REDIS_FAILURES, RedisBehindProxy, recovered, uses_redis
from tests.cluster.results import latencies, write_results
from tests.cluster.watching import Watch, watching
from tests.gateway.redis_server import RedisServer
from tests.gateway.tcp_proxy import proxied
from tests.peer.harness import SLOW

SEED = 20261122
MOST_TOKENS = 128
"""The maximum number of tokens of a response, and of a prompt."""


class Load(NamedTuple):
    """Flags of workers with little memory, and the load of a run.

    Attributes:
        rate_rps: requests per second.
        hold_s: duration of each failure, in seconds.
    """

    flags: tuple[str, ...]
    rate_rps: float
    hold_s: float


HOLD_S = float(os.environ.get("CLUSTER_TROUBLE_S", "20"))
SIMULATED = Load(("--backend", "sim", "--profile", SLOW, "--kv-bytes", "64MiB"), 2.0, 1.5)
SHIPPED = Load(("--threads", "1", "--kv-bytes", "4MiB"), 1.0, HOLD_S)

MOST_USAGE = 2.0
"""The largest leased share of a capacity while the store is unavailable or has just lost its memory
(docs/guide/cluster.md).

Each gateway may exceed this share by one request that is longer than its share."""


@dataclass
class Phases:
    """The start of each phase on the clients' clock, and whether gateways detected the failure."""

    begun_s: list[tuple[str, float]] = field(default_factory=list)
    noticed: dict[str, bool] = field(default_factory=dict)

    def of(self, records: list[Record], name: str) -> list[Record]:
        """Return the records of requests that were due in a phase."""
        ends_s = [at_s for _, at_s in self.begun_s[1:]] + [float("inf")]
        return [
            record
            for (phase, from_s), to_s in zip(self.begun_s, ends_s, strict=True)
            for record in records
            if phase == name and from_s <= record.scheduled_s < to_s
        ]


async def play(
    store: RedisBehindProxy, nodes: list[NodeProcess], clients: Clients, hold_s: float
) -> Phases:
    """Cause each failure in turn, with pauses of equal length before and after."""
    phases = Phases()

    def begin(name: str) -> None:
        phases.begun_s.append((name, clients.clock()))

    await recovered(nodes, store.server)  # A slow start may appear as an outage.
    begin("before")
    await asyncio.sleep(hold_s)
    for name, trouble in REDIS_FAILURES.items():
        begin(name)
        await trouble(store, hold_s)
        phases.noticed[name] = not all([await uses_redis(node) for node in nodes])
        begin(f"recovering from {name}")
        await recovered(nodes, store.server)
        begin("after")
        await asyncio.sleep(hold_s)
    return phases


def results_of(clients: Clients, phases: Phases, watch: Watch) -> dict[str, Any]:
    """Return the results of a run by name."""
    names = dict.fromkeys(name for name, _ in phases.begun_s)
    begun = {name: at_s for name, at_s in phases.begun_s if name.startswith("recovering")}
    after = [at_s for name, at_s in phases.begun_s if name == "after"]
    return {
        "requests": len(clients.records),
        "failed": len(clients.failed),
        "phases": {
            name: {"requests": len(found), **latencies(found)}
            for name in names
            if (found := phases.of(clients.records, name))
        },
        "outage_noticed": phases.noticed,
        "seconds_to_recover": {
            name: round(to_s - from_s, 2)
            for (name, from_s), to_s in zip(begun.items(), after, strict=True)
        },
        "capacity_tokens": watch.capacity_tokens,
        "most_leased_of_capacity": round(watch.usage, 3),
        "health_asked": watch.health_checks,
        "unhealthy": len(watch.unhealthy),
        "slowest_health_s": round(watch.slowest_s, 3),
    }


@pytest.mark.parametrize(
    "load",
    [SIMULATED, pytest.param(SHIPPED, marks=pytest.mark.long)],
    ids=["simulated", "shipped"],
)
async def test_no_request_fails_while_redis_fails(
    tmp_path: Path, own_redis: RedisServer, load: Load
) -> None:
    """Every stream stays intact and every node healthy while Redis fails in five ways.

    Leases stay within their bound.
    """
    over = asyncio.Event()
    async with proxied(own_redis.url) as proxy:
        store = RedisBehindProxy(own_redis, proxy)
        async with (
            cluster(tmp_path, store.url, *load.flags) as nodes,
            clients_of(*(gateway.url for gateway in nodes.gateways)) as clients,
        ):
            async with watching(own_redis, *nodes.nodes) as watch:
                planned = planned_requests(load.rate_rps, SEED, MOST_TOKENS)
                sending = asyncio.create_task(clients.send(planned, over))
                phases = await play(store, nodes.nodes, clients, load.hold_s)
                over.set()
                await sending
            await until_settled(nodes, own_redis)
    command = (
        f"CLUSTER_TROUBLE_S={HOLD_S:g} make test-long ARGS='tests/cluster/test_redis_chaos.py -s'"
    )
    write_results("CLUSTER_REDIS_JSON", command, results_of(clients, phases, watch))
    assert clients.failed == []
    assert clients.refusals == 0
    assert watch.health_checks
    assert not watch.unhealthy
    assert not watch.wrong
    longer = len(nodes.gateways) * 2 * MOST_TOKENS / watch.capacity_tokens
    assert watch.usage <= MOST_USAGE + longer
    assert phases.noticed["killed"]
