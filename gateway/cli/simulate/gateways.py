"""Several gateways over the same workers, each deciding by what workers reported last.

Every gateway has a dispatcher of its own: queue, routing policy, placer, all of them the product's.
Workers are shared, and seen as they were at their last heartbeat (`seen`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Final

from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.sim.clock import LoopClock, run_virtual
from draftgate.gateway.assembly import loop_time_s
from draftgate.gateway.cli.simulate.cluster import Cluster, send
from draftgate.gateway.cli.simulate.prompts import job_of
from draftgate.gateway.cli.simulate.seen import Price, PricedPlacer, Reported, Seen
from draftgate.gateway.dispatch.admission import DEFAULT_BOUNDS, AdmissionController
from draftgate.gateway.dispatch.decisions import Decisions
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.leases import Leases
from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.dispatch.routing import Router
from draftgate.gateway.fleet import BackendFactory, Fleet
from draftgate.gateway.lifecycle import Lifecycle, NodeState
from draftgate.gateway.state.memory import MemoryStore
from draftgate.loadgen.types import PlannedRequest, Record
from draftgate.policies.ordering.returning import ReturningFirst
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.quotas import QuotaLedger
from draftgate.policies.registry import admission_policy, ordering_policy, routing_policy

HEARTBEAT_S: Final = 1.0
"""Between two reports of a worker, as `gateway.heartbeat` has it."""


@dataclass(frozen=True, slots=True)
class Gateways:
    """What is simulated.

    Attributes:
        cluster: the workers, and the rules of each gateway.
        policy: decides about drafts, at every gateway; workers have `cluster.config.speculation`.
        price: what it looks at.
        count: how many gateways there are; requests come to any of them.
    """

    cluster: Cluster
    policy: SpeculationPolicy
    price: Price = Price.REPORTED
    count: int = 4
    heartbeat_s: float = HEARTBEAT_S


def simulate_gateways(
    gateways: Gateways,
    requests: Sequence[PlannedRequest],
    to_job: Callable[[PlannedRequest], Job] = job_of,
) -> list[Record]:
    """Return what became of the requests, in order of the plan. Each has an instant `at_s`."""
    records = run_virtual(_simulate(gateways, requests, to_job))
    return sorted(records, key=lambda record: record.planned.index)


async def _simulate(
    gateways: Gateways, requests: Sequence[PlannedRequest], to_job: Callable[[PlannedRequest], Job]
) -> list[Record]:
    world = gateways.cluster.world
    drawn = Random(f"gateways/{world.seed}")
    shares: list[list[PlannedRequest]] = [[] for _ in range(gateways.count)]
    for planned in requests:
        shares[drawn.randrange(gateways.count)].append(planned)
    async with _started(gateways) as dispatchers:
        sent = [
            send(dispatcher, share, to_job, take=world.ledger.take)
            for dispatcher, share in zip(dispatchers, shares, strict=True)
        ]
        found = await asyncio.gather(*sent)
    return [record for records in found for record in records]


@asynccontextmanager
async def _started(gateways: Gateways) -> AsyncIterator[list[Dispatcher]]:
    """Start workers, gateways and heartbeats; stop them at the end."""
    cluster = gateways.cluster
    backends = [SimBackend(config, build=cluster.world.parts) for config in cluster.configs]
    await asyncio.gather(*(backend.start() for backend in backends))
    workers = [
        Reported(f"w-{place}", backend, backend.load(), loop_time_s())
        for place, backend in enumerate(backends)
    ]
    store = MemoryStore(loop_time_s)
    for worker in workers:
        await store.publish(worker.report())
    dispatchers = [
        _dispatcher(gateways, workers, store, number) for number in range(gateways.count)
    ]
    every_s = gateways.heartbeat_s
    beats = [
        asyncio.create_task(_beat(worker, every_s, place / len(workers), store, dispatchers))
        for place, worker in enumerate(workers)
    ]
    try:
        yield dispatchers
    finally:
        for beat in beats:
            beat.cancel()
        await asyncio.wait(beats)
        await asyncio.gather(*(backend.stop() for backend in backends))


async def _beat(
    worker: Reported,
    every_s: float,
    phase: float,
    store: MemoryStore,
    dispatchers: Sequence[Dispatcher],
) -> None:
    """Report again and again, renew leases; whoever waits at a gateway may go then."""
    clock = LoopClock()
    await clock.sleep_s(phase * every_s)
    while True:
        await store.publish(worker.report())
        for dispatcher in dispatchers:
            await dispatcher.leases.renew()
            dispatcher.queue.pump()
        await clock.sleep_s(every_s)


def _dispatcher(
    gateways: Gateways, workers: Sequence[Reported], store: MemoryStore, number: int
) -> Dispatcher:
    """Return a gateway's dispatcher."""
    rules, world = gateways.cluster.rules, gateways.cluster.world
    fleet, lifecycle = Fleet(_nothing_to_build, ()), Lifecycle()
    fleet.workers = tuple(Seen(worker, gateways.count) for worker in workers)
    lifecycle.move_to(NodeState.READY)
    router = Router(routing_policy(rules.routing), Random(f"routing/{world.seed}/{number}").random)
    ordering = ReturningFirst(partial(ordering_policy, rules.ordering))
    queue = CentralQueue(fleet, ordering, router, loop_time_s, math.inf)
    admission = AdmissionController(
        fleet,
        queue,
        admission_policy(rules.admission),
        QuotaLedger({}),
        replace(DEFAULT_BOUNDS, timeout_s=math.inf),
        loop_time_s,
    )
    decisions = Decisions(None, loop_time_s)
    placer = PricedPlacer(fleet, gateways.policy, decisions, gateways.price)
    leases = Leases(store, shared=True)
    return Dispatcher(fleet, lifecycle, leases, placer, queue, admission, rules.most_resumes)


def _nothing_to_build() -> BackendFactory:
    raise AssertionError("a gateway of a simulation starts no worker")
