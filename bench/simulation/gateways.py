"""Gateways that share simulated workers and a store, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import count
from random import Random
from typing import Final

from draftgate.backends.base import Backend
from draftgate.backends.sim.assembly import simulation_policy
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.assembly import WaitingRules, build_dispatcher, loop_time_s
from draftgate.gateway.cli.simulate.cluster import running_dispatcher
from draftgate.gateway.cluster.heartbeat import HEARTBEAT_S, Heartbeat, report_of
from draftgate.gateway.dispatch.decisions import Decisions
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.fleet import BackendFactory, Fleet, FleetWorker
from draftgate.gateway.lifecycle import Lifecycle, NodeState
from draftgate.gateway.state.memory import MemoryStore
from draftgate.policies.capacity import WorkerUsage, with_other_gateways

_ADDRESS: Final = "http://worker"


class SharedWorker(FleetWorker):
    """A worker of another node. Its load arrives without the delay of a link."""

    own = False

    def __init__(self, worker_id: str, backend: Backend, epoch: str, gateways: int) -> None:
        """Start without requests.

        Args:
            gateways: number of gateways that send requests to the worker.
        """
        super().__init__(worker_id, backend, epoch)
        self._gateways = gateways

    @property
    def usage(self) -> WorkerUsage:
        """The worker's load together with the requests of this and other gateways."""
        return with_other_gateways(super().usage, self._gateways)


@asynccontextmanager
async def running_gateways(
    factory: BackendFactory,
    configs: Sequence[WorkerConfig],
    rules: WaitingRules,
    gateways: int,
    seed: int = 0,
) -> AsyncIterator[list[Dispatcher]]:
    """Start workers and the dispatchers of their gateways, and stop them at the end.

    The heartbeats of the gateways are evenly spread over a second.

    Args:
        configs: one configuration per worker, all with the same policy.
        seed: seed of the random choices between workers.
    """
    if gateways == 1:
        async with running_dispatcher(factory, configs, rules, seed) as dispatcher:
            yield [dispatcher]
        return
    owner, store = Fleet(lambda: factory, configs), MemoryStore(loop_time_s)
    rules = replace(rules, shared=True)
    await owner.start_with(factory, "w", "1")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(owner.stop)
        stack.enter_context(_running(_report(owner, store)))
        dispatchers = []
        for index in range(gateways):
            fleet, lifecycle = Fleet(lambda: factory, ()), Lifecycle()
            fleet.workers = tuple(
                SharedWorker(one.worker_id, one.generating, one.epoch, gateways)
                for one in owner.workers
            )
            lifecycle.move_to(NodeState.READY)
            dispatcher = build_dispatcher(
                *(fleet, store, lifecycle, Decisions(None, loop_time_s)),
                *(simulation_policy(configs[0].speculation), rules),
                quotas={},
                draw=Random(f"routing/{seed}/{index}").random,
            )
            heartbeat = Heartbeat(fleet, store, dispatcher)
            stack.enter_context(_running(_beat(heartbeat, HEARTBEAT_S * index / gateways)))
            dispatchers.append(dispatcher)
        await asyncio.sleep(0.0)  # the workers report
        yield dispatchers


@contextmanager
def _running(work: Coroutine[None, None, None]) -> Iterator[None]:
    """Run a coroutine in the background until the block ends."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()


async def _report(owner: Fleet, store: MemoryStore) -> None:
    """Report the workers as their node does."""
    for seq in count():
        for worker in owner.workers:
            await store.publish(report_of(worker, seq, _ADDRESS))
        await asyncio.sleep(HEARTBEAT_S)


async def _beat(heartbeat: Heartbeat, first_s: float) -> None:
    """Run the heartbeat of a gateway, the first after some seconds."""
    await asyncio.sleep(first_s)
    await heartbeat.run()
