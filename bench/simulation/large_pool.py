"""A large pool in virtual time: the gateways' production code in front of simulated workers.

Each gateway has its own dispatcher with admission, queue, routing, leases, moves and heartbeat, and
sees the workers as `PeerWorker`s. The workers are those of `batch_backend`. All gateways share a
store in memory, which counts its calls. Calls of the store and messages take no virtual time.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from random import Random
from statistics import fmean
from typing import Any, Final, NamedTuple, cast

from bench.simulation.batch_backend import BatchBackend
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.peer.backend import PeerBackend
from draftgate.backends.sim.profile import Profile, load_profile
from draftgate.backends.sim.virtual_time import run_virtual
from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.assembly import WaitingRules, build_dispatcher, loop_time_s
from draftgate.gateway.cli.simulate.cluster import ADMIT_ALL
from draftgate.gateway.cli.simulate.drawn import Drawn
from draftgate.gateway.cli.simulate.move_counts import MoveCounts
from draftgate.gateway.cluster.heartbeat import HEARTBEAT_S, Heartbeat, report_of
from draftgate.gateway.dispatch.decisions import Decisions
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.dispatch.placement import Placement
from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.fleet import Fleet, FleetWorker, PeerWorker
from draftgate.gateway.lifecycle import Lifecycle, NodeState
from draftgate.gateway.state.exchange import News, Update
from draftgate.gateway.state.memory import MemoryStore
from draftgate.gateway.state.store import Lease, LeaseCandidate, Reservation, WorkerReport
from draftgate.loadgen.types import PlannedRequest, Slo
from draftgate.policies.quotas import QuotaReservation
from draftgate.policies.registry import speculation_policy

_ADDRESS: Final = "http://worker"
_REST_S: Final = 5.0
"""Time from the last arrival to the end. The longest outputs take minutes, so requests that still
run at the end are counted with their tokens so far."""

_SAMPLE_S: Final = 1.0
"""Interval of samples of the workers' memory."""


@dataclass(frozen=True, slots=True)
class LargePool:
    """The workers and the gateways of a simulation.

    Attributes:
        profile: file or name of the profile of all workers.
        routing, rescheduling: names of policies.
        memory_tokens: tokens of KV memory of each worker, or None for that of the profile.
    """

    workers: int
    gateways: int
    profile: str
    routing: str = "least_cost"
    rescheduling: str = "off"
    seed: int = 0
    memory_tokens: int | None = None

    @property
    def device(self) -> Profile:
        """The profile of all workers."""
        profile = load_profile(self.profile)
        if self.memory_tokens is None:
            return profile
        return replace(profile, kv_bytes=self.memory_tokens * profile.kv_token_bytes)

    @property
    def rules(self) -> WaitingRules:
        """The rules of every dispatcher."""
        return replace(
            ADMIT_ALL,
            shared=self.gateways > 1,
            routing=self.routing,
            rescheduling=self.rescheduling,
        )


class Finished(NamedTuple):
    """A request at its end, with times in seconds.

    Attributes:
        first_s, end_s: times of its first and last token, or the end of the simulation without one.
        output: number of its output tokens.
        decided_s: CPU time from its arrival to its dispatch, or None if it waited.
        load_age_s: age of the load of its worker at the decision.
    """

    at_s: float
    first_s: float
    end_s: float
    output: int
    decided_s: float | None
    load_age_s: float

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.first_s - self.at_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds between two tokens, or None with one token."""
        return (self.end_s - self.first_s) / (self.output - 1) if self.output > 1 else None


@dataclass
class Measured:
    """The results of a simulation, from the end of the warm-up on.

    Attributes:
        finished: requests that arrived after the warm-up.
        placed_tokens: tokens of prompts and outputs of these requests, by worker.
        spreads: max / mean over the workers of the used memory, and of the running sequences, for
            each sample.
        calls: calls of the store after the warm-up, by method.
        leases: leases in all renewals after the warm-up.
        moves: number of moves, by reason and end.
        preemptions: number of preemptions.
        memory: used share of the memory of all workers, for each sample.
        updates: number of updates at gateways whose requests waited.
        updates_cpu_s: CPU time of the searches that these updates started.
        measured_s: seconds after the warm-up.
    """

    finished: list[Finished] = field(default_factory=list)
    placed_tokens: Counter[str] = field(default_factory=Counter)
    spreads: list[tuple[float, float]] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    leases: int = 0
    moves: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    memory: list[float] = field(default_factory=list)
    updates: int = 0
    updates_cpu_s: float = 0.0
    measured_s: float = 0.0

    def notify(self, queue: CentralQueue, worker: FleetWorker) -> None:
        """Report the update of a worker to a gateway, and measure the search that follows."""
        if not len(queue):
            queue.dispatch_waiting(worker)
            return
        begun_s = time.thread_time()
        queue.dispatch_waiting(worker)
        self.updates_cpu_s += time.thread_time() - begun_s
        self.updates += 1


class CountedStore(MemoryStore):
    """A store in memory that counts its calls, each of which is one command of Redis.

    Attributes:
        calls: number of calls by method.
        renewed: number of leases in all renewals.
    """

    def __init__(self) -> None:
        super().__init__(loop_time_s)
        self.calls = Counter[str]()
        self.renewed = 0

    async def publish(self, report: WorkerReport) -> bool:
        """Count a report."""
        self.calls["report"] += 1
        return await super().publish(report)

    async def reserve(
        self,
        request_id: str,
        tokens: int,
        offers: Sequence[LeaseCandidate],
        ttl_s: float,
        quota: QuotaReservation | None = None,
    ) -> Reservation:
        """Count a reservation, and whether every offer was refused."""
        self.calls["reserve"] += 1
        found = await super().reserve(request_id, tokens, offers, ttl_s, quota)
        self.calls["refused"] += found.lease is None
        return found

    async def renew(self, leases: Collection[Lease], ttl_s: float) -> frozenset[str]:
        """Count a renewal."""
        self.calls["renew"] += 1
        self.renewed += len(leases)
        return await super().renew(leases, ttl_s)

    async def release(self, request_ids: Collection[str]) -> None:
        """Count a release."""
        self.calls["release"] += 1
        await super().release(request_ids)

    async def begin_move(self, move_id: str, worker_ids: Sequence[str], ttl_s: float) -> bool:
        """Count the begin of a move."""
        self.calls["begin_move"] += 1
        return await super().begin_move(move_id, worker_ids, ttl_s)

    async def end_move(self, move_id: str, worker_ids: Sequence[str]) -> None:
        """Count the end of a move."""
        self.calls["end_move"] += 1
        await super().end_move(move_id, worker_ids)

    async def exchange(self, update: Update) -> News:
        """Count an exchange."""
        self.calls["exchange"] += 1
        return await super().exchange(update)


class _Placed(MoveCounts):
    """An observer that records the CPU time of the first placement of a request."""

    def __init__(self, ends: Counter[str]) -> None:
        super().__init__()
        self.ends = ends
        self._begun = loop_time_s(), time.thread_time()
        self.decided_s: float | None = None
        self.load_age_s = 0.0
        self.worker_id = ""

    def placed(self, placed: Placement) -> None:
        """Record a placement. A request that has waited has no CPU time of its own."""
        at_s, cpu_s = self._begun
        if at_s == loop_time_s():
            self.decided_s = time.thread_time() - cpu_s
        self.load_age_s = placed.worker.load_age_s
        self.worker_id = placed.worker.worker_id


def run_pool(pool: LargePool, drawn: Drawn, rate_rps: float, warm_up_s: float) -> Measured:
    """Send requests to random gateways, and return what was measured after the warm-up."""
    planned = drawn.planned(rate_rps, Slo())

    async def run() -> Measured:
        found = Measured()
        async with _running(pool, found) as (backends, dispatchers, store):
            parts = backends, dispatchers, store
            await _send(drawn, planned, warm_up_s, *parts, pool.seed, found)
        return found

    return run_virtual(run())


@asynccontextmanager
async def _running(
    pool: LargePool, found: Measured
) -> AsyncIterator[tuple[list[BatchBackend], list[Dispatcher], CountedStore]]:
    """Start the workers and the gateways, whose heartbeats are spread over a second."""
    tokenizer, store = Tokenizer(SHIPPED_MODEL), CountedStore()
    backends = [BatchBackend(pool.device, tokenizer) for _ in range(pool.workers)]
    owned = _fleet_of(backends, pool.gateways)
    dispatchers, beats = [], [_report(owned.workers, store)]
    for index in range(pool.gateways):
        fleet, lifecycle = _fleet_of(backends, pool.gateways), Lifecycle()
        lifecycle.move_to(NodeState.READY)
        dispatcher = build_dispatcher(
            *(fleet, store, lifecycle, Decisions(None, loop_time_s)),
            *(speculation_policy("off"), pool.rules),
            quotas={},
            draw=Random(f"scale/{pool.seed}/{index}").random,
        )
        dispatchers.append(dispatcher)
        heartbeat = Heartbeat(fleet, store, dispatcher)
        beats.append(_beat(heartbeat, HEARTBEAT_S * index / pool.gateways))
        for backend, worker in zip(backends, fleet.workers, strict=True):
            backend.on_update.append(partial(found.notify, dispatcher.queue, worker))
    with _background(beats):
        await asyncio.sleep(0.0)  # the workers report
        yield backends, dispatchers, store
    for backend in backends:
        await backend.stop()


def _fleet_of(backends: Sequence[BatchBackend], gateways: int) -> Fleet:
    """Return a gateway's fleet of workers of other nodes."""
    fleet = Fleet(lambda: lambda _config: cast(PeerBackend, backends[0]), ())
    found = []
    for index, backend in enumerate(backends):
        worker = PeerWorker(f"w-{index:04}", cast(PeerBackend, backend), "1")
        worker.gateways = gateways
        found.append(worker)
    fleet.workers = tuple(found)
    return fleet


@contextmanager
def _background(work: Sequence[Coroutine[None, None, None]]) -> Iterator[None]:
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def _report(workers: Sequence[Any], store: MemoryStore) -> None:
    """Report the workers as their nodes do."""
    for seq in count():
        for worker in workers:
            await store.publish(report_of(worker, seq, _ADDRESS))
        await asyncio.sleep(HEARTBEAT_S)


async def _beat(heartbeat: Heartbeat, first_s: float) -> None:
    await asyncio.sleep(first_s)
    await heartbeat.run()


async def _send(
    drawn: Drawn,
    requests: Sequence[PlannedRequest],
    warm_up_s: float,
    backends: Sequence[BatchBackend],
    dispatchers: Sequence[Dispatcher],
    store: CountedStore,
    seed: int,
    found: Measured,
) -> None:
    """Send each request at its time to a random gateway."""
    chosen, start_s = Random(f"gateways/{seed}"), loop_time_s()
    last_s = requests[-1].at_s or 0.0
    found.measured_s = last_s - warm_up_s
    begun = asyncio.create_task(_begin_counting(store, warm_up_s))
    sampled = asyncio.create_task(_sample(backends, warm_up_s, last_s, found))
    tasks = set[asyncio.Task[None]]()
    for planned in requests:
        assert planned.at_s is not None
        await asyncio.sleep(start_s + planned.at_s - loop_time_s())
        one = _run(chosen.choice(dispatchers), drawn, planned, warm_up_s, start_s, found)
        task = asyncio.create_task(one)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(begun, sampled)
    found.calls, found.leases = Counter(store.calls), store.renewed
    await asyncio.sleep(_REST_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    found.preemptions = sum(backend.preemptions for backend in backends)


async def _begin_counting(store: CountedStore, warm_up_s: float) -> None:
    await asyncio.sleep(warm_up_s)
    store.calls.clear()
    store.renewed = 0


async def _sample(
    backends: Sequence[BatchBackend], warm_up_s: float, last_s: float, found: Measured
) -> None:
    """Sample the imbalance of the workers until the last arrival."""
    await asyncio.sleep(warm_up_s)
    while loop_time_s() < last_s:
        loads = [backend.load() for backend in backends]
        used = [load.kv_blocks_total - load.kv_blocks_free for load in loads]
        found.spreads.append((spread(used), spread([load.running for load in loads])))
        found.memory.append(sum(used) / sum([load.kv_blocks_total for load in loads]))
        await asyncio.sleep(_SAMPLE_S)


def spread(values: Collection[float]) -> float:
    """Return max / mean, or 1 if all values are 0."""
    mean = fmean(values)
    return max(values) / mean if mean else 1.0


async def _run(
    dispatcher: Dispatcher,
    drawn: Drawn,
    planned: PlannedRequest,
    warm_up_s: float,
    start_s: float,
    found: Measured,
) -> None:
    """Run a request, and record it."""
    job, first_s, output = drawn.job(planned), 0.0, 0
    watch = _Placed(found.moves)
    at_s, last_s = start_s + (planned.at_s or 0.0), 0.0
    try:
        with dispatcher.counted():
            async with dispatcher.run(job, watch=watch) as run:
                async for delta in run.deltas:
                    first_s, last_s = first_s or loop_time_s(), loop_time_s()
                    output += len(delta.token_ids)
    finally:
        if at_s >= start_s + warm_up_s:
            found.placed_tokens[watch.worker_id] += len(job.prompts[0]) + output
            first_s, last_s = first_s or loop_time_s(), last_s or loop_time_s()
            one = Finished(at_s, first_s, last_s, output, watch.decided_s, watch.load_age_s)
            found.finished.append(one)
