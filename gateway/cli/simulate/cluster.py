"""One simulation: a load through dispatcher and workers, in virtual time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

from msgspec import structs

from draftgate.backends.errors import RequestRejected
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.sim.clock import LoopClock, run_virtual
from draftgate.backends.sim.simulated import World, simulation_policy
from draftgate.backends.sim.worker import Deliveries
from draftgate.backends.types import Delta
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.assembly import WaitingRules, build_dispatcher
from draftgate.gateway.cli.simulate.prompts import job_of
from draftgate.gateway.cli.simulate.records import record_of, refusal_of
from draftgate.gateway.cluster.heartbeat import Heartbeat
from draftgate.gateway.dispatch.admission import Bounds
from draftgate.gateway.dispatch.decisions import Decisions
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.errors import TooMany
from draftgate.gateway.fleet import BackendFactory, Fleet
from draftgate.gateway.lifecycle import Lifecycle, NodeState
from draftgate.gateway.state.memory import MemoryStore
from draftgate.loadgen.types import PlannedRequest, Record

EVERYBODY_WAITS: Final = WaitingRules(admission="none", bounds=Bounds(timeout_s=math.inf))
"""What a simulation compares is not who is refused, unless it says so."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What is simulated.

    Attributes:
        config: of every worker; the policy is `config.speculation`.
        workers: how many there are.
        world: what is true; its ledger must be this cluster's own.
        rules: who may wait, who is next, and where it goes.
        profiles: of the workers in turn, in place of `config.profile`; empty keeps that.
    """

    config: WorkerConfig
    workers: int
    world: World
    rules: WaitingRules = EVERYBODY_WAITS
    profiles: tuple[str, ...] = ()

    @property
    def configs(self) -> list[WorkerConfig]:
        """The workers' configurations."""
        profiles = self.profiles or (self.config.profile,)
        return [
            structs.replace(
                self.config, device_index=index, profile=profiles[index % len(profiles)]
            )
            for index in range(self.workers)
        ]


def simulate(
    cluster: Cluster,
    requests: Iterable[PlannedRequest],
    on_record: Callable[[Record], None] = lambda _record: None,
    to_job: Callable[[PlannedRequest], Job] = job_of,
) -> list[Record]:
    """Return what became of the requests, in order of the plan. Each has an instant `at_s`.

    Raises:
        ValueError: a setting is wrong.
    """
    records = run_virtual(_simulate(cluster, requests, on_record, to_job))
    return sorted(records, key=lambda record: record.planned.index)


async def _simulate(
    cluster: Cluster,
    requests: Iterable[PlannedRequest],
    on_record: Callable[[Record], None],
    to_job: Callable[[PlannedRequest], Job],
) -> list[Record]:
    factory = partial(SimBackend, build=cluster.world.parts)
    take = cluster.world.ledger.take
    seed = cluster.world.seed
    async with started(factory, cluster.configs, cluster.rules, seed) as dispatcher:
        return await send(dispatcher, requests, to_job, on_record, take)


@asynccontextmanager
async def started(
    factory: BackendFactory,
    configs: Sequence[WorkerConfig],
    rules: WaitingRules = EVERYBODY_WAITS,
    seed: int = 0,
) -> AsyncIterator[Dispatcher]:
    """Start the workers of a node, as a gateway does; stop them at the end.

    Args:
        configs: of each worker; they have one policy.
        seed: of what is drawn to choose workers.
    """
    fleet, lifecycle = Fleet(lambda: factory, configs), Lifecycle()
    await fleet.start_with(factory, "w")
    lifecycle.move_to(NodeState.READY)
    now_s = asyncio.get_running_loop().time
    store, decisions = MemoryStore(now_s), Decisions(None, now_s)
    dispatcher = build_dispatcher(
        fleet,
        store,
        lifecycle,
        decisions,
        simulation_policy(configs[0].speculation),
        rules,
        quotas={},
        draw=Random(f"routing/{seed}").random,
    )
    heartbeat = Heartbeat(fleet, store, dispatcher.queue, dispatcher.leases, decisions)
    try:
        async with heartbeat.beating():
            yield dispatcher
    finally:
        await fleet.stop()


async def send(
    dispatcher: Dispatcher,
    requests: Iterable[PlannedRequest],
    to_job: Callable[[PlannedRequest], Job],
    on_record: Callable[[Record], None] = lambda _record: None,
    take: Callable[[str], Deliveries] | None = None,
) -> list[Record]:
    """Send requests at their instants, from now on, and return what became of them.

    Args:
        take: returns what came for a request, where workers keep that; else deltas are timed here.
    """
    clock, records = LoopClock(), list[Record]()
    start_s = clock.now_s()

    def over(task: asyncio.Task[Record]) -> None:
        if not task.cancelled() and task.exception() is None:
            open_requests.discard(task)  # what failed is raised at the end
            records.append(task.result())
            on_record(task.result())

    open_requests = set[asyncio.Task[Record]]()
    for planned in requests:
        assert planned.at_s is not None
        job = to_job(planned)
        await clock.sleep_s(start_s + planned.at_s - clock.now_s())
        task = asyncio.create_task(_ask(dispatcher, planned, job, start_s, take))
        open_requests.add(task)
        task.add_done_callback(over)
    await asyncio.gather(*open_requests)
    return records


async def _ask(
    dispatcher: Dispatcher,
    planned: PlannedRequest,
    job: Job,
    start_s: float,
    take: Callable[[str], Deliveries] | None,
) -> Record:
    """Send a request and wait for its end.

    Raises:
        BackendFailed: a worker broke.
    """
    last: Delta | None = None
    came, now_s = Deliveries(), asyncio.get_running_loop().time
    with dispatcher.counted():
        try:
            async with dispatcher.run(job) as run:
                async for delta in run.deltas:
                    last = delta
                    if take is None and delta.token_ids:
                        came.at_s.append(now_s() - start_s)
                        came.tokens.append(len(delta.token_ids))
        except RequestRejected as error:
            return refusal_of(planned, 400, str(error))
        except TooMany as error:
            return refusal_of(planned, error.status, str(error))
    assert last is not None
    (placed,) = run.placed
    if take is not None:
        came = take(placed.request.request_id)
    return record_of(planned, placed, last, came)
