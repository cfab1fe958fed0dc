"""One simulation of a load on a dispatcher and its workers, in virtual time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from random import Random
from typing import Final

from msgspec import structs

from draftgate.backends.errors import RequestRejected
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.sim.kv_link import LOCAL_LINK, KvLink
from draftgate.backends.types import Delta
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.assembly import WaitingRules, build_dispatcher, loop_time_s
from draftgate.gateway.cluster.heartbeat import Heartbeat
from draftgate.gateway.dispatch.admission import Bounds
from draftgate.gateway.dispatch.decisions import Decisions
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.run import Watch, ignore
from draftgate.gateway.errors import TooMany
from draftgate.gateway.fleet import BackendFactory, Fleet
from draftgate.gateway.lifecycle import Lifecycle, NodeState
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.lab.sim.environment import SimEnvironment, simulation_policy
from draftgate.lab.sim.textless_worker import Deliveries
from draftgate.lab.sim.virtual_time import run_virtual, skip_time
from draftgate.lab.simulate.conversion import job_of, record_of, rejection_of
from draftgate.loadgen.types import PlannedRequest, Record
from draftgate.policies.types import Role

ADMIT_ALL: Final = WaitingRules(admission="none", bounds=Bounds(timeout_s=math.inf))
"""The default rules. A simulation compares latencies, so it rejects no request."""


def never() -> bool:
    """Return False, so that a simulation ends with its last request."""
    return False


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """The workers of a simulation and the rules of their dispatcher.

    Attributes:
        config: the configuration of every worker, including its policy `speculation`.
        workers: number of workers.
        environment: the simulated devices and their log, which clusters must not share.
        rules: the dispatcher's policies.
        profiles: device profiles that the workers use in turn; empty means `config.profile`.
        roles: roles of the workers in order; workers without one have the role `any`.
        link: link over which workers pull KV blocks from each other.
        policies: speculation policies of the workers in order; the others have that of `config`,
            which is also the policy of the dispatcher.
    """

    config: WorkerConfig
    workers: int
    environment: SimEnvironment
    rules: WaitingRules = ADMIT_ALL
    profiles: tuple[str, ...] = ()
    roles: tuple[Role, ...] = ()
    link: KvLink = LOCAL_LINK
    policies: tuple[str, ...] = ()

    @property
    def configs(self) -> list[WorkerConfig]:
        """The configuration of each worker."""
        profiles = self.profiles or (self.config.profile,)
        roles = chain(self.roles, repeat(Role.ANY))
        policies = chain(self.policies, repeat(self.config.speculation))
        return [
            structs.replace(
                self.config,
                device_index=index,
                profile=profiles[index % len(profiles)],
                role=role.value,
                speculation=policy,
            )
            for index, role, policy in zip(range(self.workers), roles, policies, strict=False)
        ]


def simulate_requests(
    cluster: SimulatedCluster,
    requests: Iterable[PlannedRequest],
    on_record: Callable[[Record], None] = lambda _record: None,
    to_job: Callable[[PlannedRequest], Job] = job_of,
    watch: Watch = ignore,
    is_over: Callable[[], bool] = never,
) -> list[Record]:
    """Return the records of the requests in the order of the plan.

    Args:
        requests: the plan, with an arrival time `at_s` for each request.
        on_record: a callback that receives each record when its request ends.
        to_job: a function that converts a planned request to a job.
        watch: takes the events of all requests.
        is_over: as for `send_jobs`.

    Raises:
        ValueError: a setting is wrong.
    """
    environment = cluster.environment

    async def run() -> list[Record]:
        factory = partial(
            SimBackend, build=environment.build_worker, link=cluster.link, skip_time=skip_time
        )
        async with running_dispatcher(
            factory,
            cluster.configs,
            cluster.rules,
            environment.seed,
            cluster.config.speculation,
        ) as dispatcher:
            pop = None if environment.delivers_tokens else environment.log.pop
            return await send_jobs(dispatcher, requests, to_job, on_record, pop, watch, is_over)

    return sorted(run_virtual(run()), key=lambda record: record.planned.index)


@asynccontextmanager
async def running_dispatcher(
    factory: BackendFactory,
    configs: Sequence[WorkerConfig],
    rules: WaitingRules = ADMIT_ALL,
    seed: int = 0,
    policy: str | None = None,
) -> AsyncIterator[Dispatcher]:
    """Start the workers of a node as a gateway does, and stop them at the end.

    Args:
        configs: one configuration per worker.
        seed: seed of the random choices between workers.
        policy: speculation policy of the dispatcher, or None for that of the first worker.
    """
    fleet, lifecycle = Fleet(lambda: factory, configs), Lifecycle()
    await fleet.start_with(factory, "w")
    lifecycle.move_to(NodeState.READY)
    store, decisions = MemoryStore(loop_time_s), Decisions(None, loop_time_s)
    dispatcher = build_dispatcher(
        fleet,
        store,
        lifecycle,
        decisions,
        simulation_policy(policy or configs[0].speculation),
        rules,
        quotas={},
        draw=Random(f"routing/{seed}").random,
    )
    heartbeat = Heartbeat(fleet, store, dispatcher)
    try:
        async with heartbeat.beating():
            yield dispatcher
    finally:
        await fleet.stop()


async def send_jobs(
    dispatcher: Dispatcher,
    requests: Iterable[PlannedRequest],
    to_job: Callable[[PlannedRequest], Job],
    on_record: Callable[[Record], None] = lambda _record: None,
    pop_deliveries: Callable[[str], Deliveries] | None = None,
    watch: Watch = ignore,
    is_over: Callable[[], bool] = never,
) -> list[Record]:
    """Send each request at its time `at_s`, counted from now, and return the records.

    Args:
        pop_deliveries: a function that returns the logged deliveries of a request. If it is None,
            `send_jobs` times the deltas itself.
        watch: takes the events of all requests.
        is_over: asked after each record. The requests that are then open are cancelled, and have
            no record.
    """
    records, start_s = list[Record](), loop_time_s()
    open_requests = set[asyncio.Task[Record]]()
    over = asyncio.Event()

    def done(task: asyncio.Task[Record]) -> None:
        if not task.cancelled() and task.exception() is None:
            open_requests.discard(task)  # failed tasks stay in the set and raise in `gather`
            records.append(task.result())
            on_record(task.result())
            if is_over():
                over.set()

    for planned in requests:
        if over.is_set():
            break
        assert planned.at_s is not None
        job = to_job(planned)
        await asyncio.sleep(start_s + planned.at_s - loop_time_s())
        one = _run(dispatcher, planned, job, start_s, pop_deliveries, watch)
        task = asyncio.create_task(one)
        open_requests.add(task)
        task.add_done_callback(done)
    ended = asyncio.gather(*open_requests)
    enough = asyncio.create_task(over.wait())
    await asyncio.wait((ended, enough), return_when=asyncio.FIRST_COMPLETED)
    enough.cancel()
    if over.is_set():
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)
    else:
        await ended
    return records


async def _run(
    dispatcher: Dispatcher,
    planned: PlannedRequest,
    job: Job,
    start_s: float,
    pop_deliveries: Callable[[str], Deliveries] | None,
    watch: Watch,
) -> Record:
    """Run a request and return its record.

    Raises:
        BackendFailed: a worker failed.
    """
    last: Delta | None = None
    deliveries, now_s = Deliveries(), asyncio.get_running_loop().time

    def record(delta: Delta) -> None:
        nonlocal last
        last = delta
        if delta.phases is not None and deliveries.scheduled_s is None:
            deliveries.scheduled_s = delta.phases.scheduled_s
        if pop_deliveries is None and delta.token_ids:
            deliveries.at_s.append(now_s() - start_s)
            deliveries.tokens.append(len(delta.token_ids))

    with dispatcher.counted():
        try:
            async with dispatcher.run(job, watch=watch) as run:
                run.sink = record
                await run.finished()
        except RequestRejected as error:
            return rejection_of(planned, 400, str(error))
        except TooMany as error:
            return rejection_of(planned, error.status, str(error))
    assert last is not None
    hold = run.holds[0]
    if pop_deliveries is not None:
        deliveries = pop_deliveries(hold.request.request_id)
    return record_of(planned, hold, last, deliveries)
