"""Two gateways that share simulated workers and one store, on any clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from random import Random

from msgspec import structs

from draftgate.backends.base import Backend
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.assembly import WaitingRules, build_dispatcher, loop_time_s
from draftgate.gateway.cluster.heartbeat import HEARTBEAT_S, report_of
from draftgate.gateway.dispatch.admission import Bounds
from draftgate.gateway.dispatch.decisions import Decisions
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.lifecycle import Lifecycle, NodeState
from draftgate.gateway.state.commands import ListWorkers, PublishReport, WithdrawWorker
from draftgate.gateway.state.store import Store
from draftgate.policies.capacity import WorkerUsage, with_other_gateways
from draftgate.policies.registry import speculation_policy

GATEWAYS = 2


class SharedWorker(FleetWorker):
    """A worker of another node, without the delay of a link."""

    own = False

    @property
    def usage(self) -> WorkerUsage:
        return with_other_gateways(super().usage, GATEWAYS)


@dataclass
class Gateway:
    """A gateway whose heartbeat renews its leases until `kill`."""

    dispatcher: Dispatcher
    fleet: Fleet
    store: Store
    beats: asyncio.Task[None]


@dataclass
class Pool:
    """Three parts of a pool: the gateways, the workers and the tasks that report the workers."""

    gateways: list[Gateway]
    workers: list[FleetWorker]
    reports: dict[str, asyncio.Task[None]]

    async def withdraw(self, worker_id: str) -> None:
        """Remove a worker from the pool, which ends its streams."""
        self.reports.pop(worker_id).cancel()
        (worker,) = (one for one in self.workers if one.worker_id == worker_id)
        await self.gateways[0].store.call(WithdrawWorker(worker_id, worker.epoch, 1 << 40))
        await worker.backend.stop()


@asynccontextmanager
async def pool_of(
    factory: Callable[[WorkerConfig], Backend],
    workers: int,
    stores: tuple[Store, Store],
    config: WorkerConfig,
    *,
    timeout_s: float = 60.0,
) -> AsyncIterator[Pool]:
    """Run two gateways for these workers, each with its own view of the store."""
    configs = [structs.replace(config, device_index=index) for index in range(workers)]
    owner = Fleet(lambda: factory, configs)
    await owner.start_with(factory, "w", "1")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(owner.stop)
        reports = {one.worker_id: _start(stack, _report(one, stores[0])) for one in owner.workers}
        await asyncio.sleep(0.0)
        gateways = [_gateway(stack, owner, store, config, timeout_s) for store in stores]
        yield Pool(gateways, list(owner.workers), reports)


def _gateway(
    stack: AsyncExitStack, owner: Fleet, store: Store, config: WorkerConfig, timeout_s: float
) -> Gateway:
    fleet, lifecycle = Fleet(lambda: owner.any.backend, ()), Lifecycle()
    fleet.workers = tuple(SharedWorker(w.worker_id, w.backend, w.epoch) for w in owner.workers)
    lifecycle.move_to(NodeState.READY)
    rules = WaitingRules(admission="none", bounds=Bounds(timeout_s=timeout_s), shared=True)
    dispatcher = build_dispatcher(
        *(fleet, store, lifecycle, Decisions(None, loop_time_s)),
        *(speculation_policy(config.speculation), rules),
        quotas={},
        draw=Random(0).random,
    )
    beats = _start(stack, _beat(dispatcher, store))
    return Gateway(dispatcher, fleet, store, beats)


def _start(stack: AsyncExitStack, work) -> asyncio.Task[None]:
    task = asyncio.create_task(work)
    stack.callback(task.cancel)
    return task


async def _report(worker: FleetWorker, store: Store) -> None:
    for seq in range(1 << 30):
        await store.call(PublishReport(report_of(worker, seq, "http://worker")))
        await asyncio.sleep(HEARTBEAT_S)


async def _beat(dispatcher: Dispatcher, store: Store) -> None:
    while True:
        dispatcher.queue.dispatch_waiting()
        await dispatcher.leases.renew()
        await dispatcher.sharing.exchange()
        await store.call(ListWorkers())
        await asyncio.sleep(HEARTBEAT_S)
