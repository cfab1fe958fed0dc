"""The heartbeat of a node: once a second it tells of its workers, and renews what it holds."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from gateway.dispatch.decisions import Decisions
from gateway.dispatch.leases import Leases
from gateway.dispatch.queue import CentralQueue
from gateway.fleet import Fleet, FleetWorker
from gateway.state.store import Store
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
        self._lost: set[str] = set()  # workers that broke, as far as was told

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
            await self._tell_of(worker)
        await self._leases.renew()

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
            await self._store.publish(worker_id, worker.backend.load())
        elif worker_id not in self._lost:
            self._lost.add(worker_id)
            where: dict[str, Any] = {}
            if worker.forwards:
                where["url"] = worker.backend.card.root
            log(logging.ERROR, "worker failed", worker=worker_id, reason=failure, **where)
            await self._store.withdraw(worker_id)
