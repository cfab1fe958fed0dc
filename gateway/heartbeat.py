"""The heartbeat of a node: once a second it tells of its workers, and renews what it holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Final

from gateway.dispatch.decisions import Decisions
from gateway.dispatch.leases import Leases
from gateway.dispatch.queue import CentralQueue
from gateway.fleet import Fleet, FleetWorker
from gateway.state.store import Store, WorkerReport
from gateway.telemetry.logs import log

HEARTBEAT_S: Final = 1.0


class Heartbeat:
    """Publishes the workers' loads, renews leases, writes decisions."""

    def __init__(
        self,
        fleet: Fleet,
        store: Store,
        queue: CentralQueue,
        leases: Leases,
        decisions: Decisions,
    ) -> None:
        """Beat for a fleet; it need not have started yet."""
        self._fleet = fleet
        self._store = store
        self._queue = queue
        self._leases = leases
        self._decisions = decisions
        self._numbers = count()  # of reports
        self._left = False
        self._lost: set[str] = set()  # workers that broke, as far as was told
        self._fenced: set[str] = set()  # those whose reports count for nothing, likewise

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Beat as long as this context lasts."""
        beats = asyncio.create_task(self.run())
        try:
            yield
        finally:
            beats.cancel()
            await asyncio.wait({beats})

    async def run(self) -> None:
        """Beat until cancelled. Survives errors."""
        while True:
            try:
                await self.beat()
                await self.write_decisions()
            except Exception as error:  # noqa: BLE001 - a heartbeat that stops looks like death
                log(logging.ERROR, "heartbeat failed", error=error)
            await asyncio.sleep(HEARTBEAT_S)

    async def beat(self) -> None:
        """Tell the store of the workers and leases; send on who can go."""
        self._queue.pump()  # memory becomes free without an end that this node sees
        for worker in self._fleet.workers:
            if not self._left:
                await self._tell_of(worker)
        await self._leases.renew()

    async def leave(self) -> None:
        """Take the workers out of the pool; further beats renew leases of what still runs."""
        self._left = True
        for worker in self._fleet.workers:
            await self._withdraw(worker)

    async def write_decisions(self) -> None:
        """Write what was decided to the file, if there is one. Survives errors."""
        if not self._decisions.unwritten:
            return
        try:
            await asyncio.to_thread(self._decisions.write)
        except OSError as error:
            log(logging.ERROR, "decisions cannot be written", error=error)

    async def _tell_of(self, worker: FleetWorker) -> None:
        worker_id, failure = worker.worker_id, worker.backend.failure
        if failure is None:
            if worker_id in self._lost:  # an upstream
                self._lost.discard(worker_id)
                log(logging.INFO, "worker is back", worker=worker_id)
            await self._publish(worker)
        elif worker_id not in self._lost:
            self._lost.add(worker_id)
            where: dict[str, Any] = {}
            if worker.forwards:
                where["url"] = worker.backend.card.root
            log(logging.ERROR, "worker failed", worker=worker_id, reason=failure, **where)
            await self._withdraw(worker)

    async def _publish(self, worker: FleetWorker) -> None:
        counts = await self._store.publish(report_of(worker, next(self._numbers)))
        if counts:
            self._fenced.discard(worker.worker_id)
        elif worker.worker_id not in self._fenced:
            self._fenced.add(worker.worker_id)
            log(logging.ERROR, "another life of the worker has begun", worker=worker.worker_id)

    async def _withdraw(self, worker: FleetWorker) -> None:
        await self._store.withdraw(worker.worker_id, worker.epoch, next(self._numbers))


def report_of(worker: FleetWorker, seq: int) -> WorkerReport:
    """Return what there is to tell of a worker now."""
    card, load = worker.backend.card, worker.backend.load()
    return WorkerReport(
        worker.worker_id,
        worker.epoch,
        seq,
        load,
        capacity_tokens=load.kv_blocks_total * load.kv_block_tokens,
        watermark=worker.watermark,
        model_id=card.model_id,
        numerics_class=card.numerics_class,
        max_model_len=card.max_model_len,
    )
