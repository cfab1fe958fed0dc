"""An autoscaler for simulations, which starts and drains workers as the gateway advises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from draftgate.gateway.assembly import loop_time_s
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.scaling_advice import Scaling
from draftgate.gateway.telemetry.live import Recent

LOAD_S: Final = 30.0
"""Time in seconds from the start of a worker until it accepts requests. (Chosen: weights of 14 GB
from a disk with 0.5 GB/s.)"""

INTERVAL_S: Final = 1.0
"""Interval in which gateways update their advice."""


class Autoscaler:
    """Decides which workers of a fleet run. All others are drained.

    A worker costs from its start to the end of its last stream.

    Attributes:
        worker_s: cost so far, in seconds of a worker.
        changes: number of changes of the advice.
    """

    def __init__(self, workers: int) -> None:
        """Start with a number of workers."""
        self.worker_s = 0.0
        self.changes = 0
        self._first = workers
        self._ready_s: dict[FleetWorker, float] = {}  # when workers that load will be ready

    @asynccontextmanager
    async def beside(self, dispatcher: Dispatcher) -> AsyncIterator[None]:
        """Scale the fleet of a dispatcher until the block ends."""
        for worker in dispatcher.fleet.workers[self._first :]:
            worker.drained = True
        moves = dispatcher.moves.reschedules
        scaling = Scaling(dispatcher.fleet, dispatcher.queue, Recent(loop_time_s), moves=moves)
        task = asyncio.create_task(self._run(dispatcher, scaling))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _run(self, dispatcher: Dispatcher, scaling: Scaling) -> None:
        workers = dispatcher.fleet.workers
        while True:
            before = scaling.advice
            scaling.update()
            assert scaling.advice is not None  # no worker fails
            self.changes += before is not None and scaling.advice != before
            self._start_loaded(dispatcher)
            self._resize(workers, min(scaling.advice.workers, len(workers)))
            paid = [one for one in workers if not one.drained or one in self._ready_s or _busy(one)]
            self.worker_s += len(paid) * INTERVAL_S
            await asyncio.sleep(INTERVAL_S)

    def _start_loaded(self, dispatcher: Dispatcher) -> None:
        """Let workers that have loaded accept requests."""
        for worker in [one for one, at_s in self._ready_s.items() if at_s <= loop_time_s()]:
            del self._ready_s[worker]
            worker.drained = False
        dispatcher.queue.dispatch_waiting()

    def _resize(self, workers: tuple[FleetWorker, ...], wanted: int) -> None:
        """Start workers, or stop those that load and then drain the least busy ones."""
        serving = [one for one in workers if not one.drained]
        running = len(serving) + len(self._ready_s)
        idle = [one for one in workers if one.drained and one not in self._ready_s]
        for worker in sorted(idle, key=_sequences)[: max(wanted - running, 0)]:
            self._ready_s[worker] = loop_time_s() + LOAD_S
        excess = max(running - wanted, 0)
        for worker in list(reversed(self._ready_s))[:excess]:
            del self._ready_s[worker]
            excess -= 1
        for worker in sorted(serving, key=_sequences)[:excess]:
            worker.drained = True


def _sequences(worker: FleetWorker) -> int:
    return worker.usage.sequences


def _busy(worker: FleetWorker) -> bool:
    return worker.usage.sequences > 0
