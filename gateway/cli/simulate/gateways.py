"""Several gateways over the same workers, each deciding by what workers reported last.

Every gateway has a dispatcher of its own: queue, routing policy, placer, all of them the product's.
Workers are shared. A gateway sees of them what they said with their last heartbeat, and what is
leased since, which a ledger knows that all share: the least score with these leases takes a
request, and they are what is behind the report where its drafts are decided, as a state store
answers in one round trip. What is left out: the network, and that a lease may be on its way.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from random import Random
from typing import Any, Final, cast

from backends.base import Backend
from backends.sim.backend import SimBackend
from backends.sim.clock import LoopClock, run_virtual
from backends.types import GenerationRequest
from gateway.assembly import loop_time_s
from gateway.cli.simulate.cluster import Cluster, send
from gateway.cli.simulate.prompts import job_of
from gateway.dispatch.admission import DEFAULT_BOUNDS, AdmissionController
from gateway.dispatch.decisions import Decisions
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.job import Job
from gateway.dispatch.leases import Leases
from gateway.dispatch.placement import Placement, Placer, need_of
from gateway.dispatch.queue import CentralQueue
from gateway.dispatch.routing import Routed, Router, View
from gateway.fleet import BackendFactory, Fleet, FleetWorker
from gateway.lifecycle import Lifecycle, NodeState
from gateway.state.memory import MemoryStore
from loadgen.types import Planned, Record
from policies.cluster_price import UsualNeed, projected
from policies.ordering.returning import ReturningFirst
from policies.protocols import SpeculationPolicy
from policies.quotas import Ledger as QuotaLedger
from policies.registry import admission_policy, ordering_policy, routing_policy
from policies.room import Occupancy
from policies.routing import Candidate, Candidates
from policies.routing.choosing import settled
from policies.types import WorkerLoad

HEARTBEAT_S: Final = 1.0


class Price(StrEnum):
    """By which price of a worker a gateway decides how far a request may draft."""

    REPORTED = "reported"
    """The one that it told with its last heartbeat."""
    PROJECTED = "projected"
    """The same, with what is leased behind it (`policies.cluster_price`)."""
    PRESENT = "present"
    """The one that it has at that moment, which no gateway knows: what there is to gain."""


@dataclass(slots=True)
class Reported:
    """A worker, and what all gateways know of it.

    Attributes:
        load, at_s: its last report.
        behind_tokens: leased since then.
    """

    backend: SimBackend
    load: WorkerLoad
    at_s: float
    behind_tokens: int = 0

    def report(self, now_s: float) -> None:
        """Take a heartbeat: all that is leased has arrived by now."""
        self.load, self.at_s, self.behind_tokens = self.backend.load(), now_s, 0


class Seen(FleetWorker):
    """A worker as one gateway sees it."""

    def __init__(self, worker_id: str, reported: Reported) -> None:
        """See a worker that others see, too."""
        self.reported = reported
        self.shown: WorkerLoad | None = None
        super().__init__(worker_id, cast(Backend, _ShownBackend(reported.backend, self)))

    def candidate(self, at: Occupancy) -> Candidate:
        """Return what a routing policy may know of it."""
        return replace(
            super().candidate(at),
            leased_tokens=self.reported.behind_tokens,
            age_s=loop_time_s() - self.reported.at_s,
            own=False,
        )

    @contextmanager
    def showing(self, load: WorkerLoad) -> Iterator[None]:
        """Let its load be another one than the reported one meanwhile."""
        self.shown = load
        try:
            yield
        finally:
            self.shown = None


class _ShownBackend:
    """A worker's backend, but for the load that is seen of it."""

    def __init__(self, backend: SimBackend, seen: Seen) -> None:
        self._backend = backend
        self._seen = seen

    def load(self) -> WorkerLoad:
        return self._seen.shown or self._seen.reported.load

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class LeasingRouter(Router):
    """Chooses among offers by all leases, and leases what it has chosen."""

    def choose(
        self, view: View, there: Sequence[tuple[FleetWorker, Occupancy]], *, alone: bool
    ) -> Routed:
        """Return which of these workers takes a request."""
        request = view()
        seen = {worker.worker_id: cast(Seen, worker) for worker, _ in there}
        candidates = Candidates(tuple(worker.candidate(at) for worker, at in there))
        route = self._policy.route(request, candidates, self._draw)
        behind = {name: worker.reported.behind_tokens for name, worker in seen.items()}
        chosen = seen[settled(route.offers, behind).worker_id]
        (candidate,) = (one for one in candidates.workers if one.worker_id == chosen.worker_id)
        self._policy.placed(request, candidate)
        chosen.reported.behind_tokens += request.most_tokens
        return Routed(chosen, None if alone else route)


class PricedPlacer(Placer):
    """Decides about drafts by the price that it is told to look at."""

    def __init__(
        self, fleet: Fleet, policy: SpeculationPolicy, decisions: Decisions, price: Price
    ) -> None:
        """Place requests on the workers of a fleet."""
        super().__init__(fleet, policy, decisions, reads_prompts=True)
        self._price = price
        self._usual = UsualNeed()

    def place(self, job: Job, index: int, request: GenerationRequest, routed: Routed) -> Placement:
        """Decide how far a request may speculate on its worker."""
        need, seen = need_of(request), cast(Seen, routed.worker)
        self._usual.note(need)
        reported = seen.reported
        load = reported.load
        if self._price is Price.PROJECTED:
            behind_tokens = reported.behind_tokens - need.most_tokens
            load = projected(load, behind_tokens, self._usual.need)
        elif self._price is Price.PRESENT:
            load = reported.backend.load()
        with seen.showing(load):
            return super().place(job, index, request, routed)


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
    gateways: Gateways, requests: Sequence[Planned], to_job: Callable[[Planned], Job] = job_of
) -> list[Record]:
    """Return what became of the requests, in order of the plan. Each has an instant `at_s`."""
    records = run_virtual(_simulate(gateways, requests, to_job))
    return sorted(records, key=lambda record: record.planned.index)


async def _simulate(
    gateways: Gateways, requests: Sequence[Planned], to_job: Callable[[Planned], Job]
) -> list[Record]:
    world = gateways.cluster.world
    drawn = Random(f"gateways/{world.seed}")
    shares: list[list[Planned]] = [[] for _ in range(gateways.count)]
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
    workers = [Reported(backend, backend.load(), loop_time_s()) for backend in backends]
    dispatchers = [_dispatcher(gateways, workers, number) for number in range(gateways.count)]
    beats = [
        asyncio.create_task(_beat(worker, gateways.heartbeat_s, place / len(workers), dispatchers))
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
    worker: Reported, every_s: float, phase: float, dispatchers: Sequence[Dispatcher]
) -> None:
    """Report again and again; whoever waits at a gateway may go then."""
    clock = LoopClock()
    await clock.sleep_s(phase * every_s)
    while True:
        worker.report(clock.now_s())
        for dispatcher in dispatchers:
            dispatcher.queue.pump()
        await clock.sleep_s(every_s)


def _dispatcher(gateways: Gateways, workers: Sequence[Reported], number: int) -> Dispatcher:
    """Return a gateway's dispatcher."""
    rules, world = gateways.cluster.rules, gateways.cluster.world
    fleet, lifecycle = Fleet(_nothing_to_build, ()), Lifecycle()
    fleet.workers = tuple(Seen(f"w-{place}", worker) for place, worker in enumerate(workers))
    lifecycle.move_to(NodeState.READY)
    router = LeasingRouter(
        routing_policy(rules.routing), Random(f"routing/{world.seed}/{number}").random
    )
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
    leases = Leases(MemoryStore(loop_time_s))
    return Dispatcher(fleet, lifecycle, leases, placer, queue, admission, rules.most_resumes)


def _nothing_to_build() -> BackendFactory:
    raise AssertionError("a gateway of a simulation starts no worker")
