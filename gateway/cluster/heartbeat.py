"""The heartbeat of a node: once a second it tells of its workers, and looks for those of others.

It renews the leases that the node holds, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Final

from draftgate.backends.peer.channel import WORKER_PATH
from draftgate.gateway.cluster.members import Members
from draftgate.gateway.dispatch.decisions import Decisions
from draftgate.gateway.dispatch.leases import Leases
from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.state.store import Store, WorkerReport
from draftgate.gateway.telemetry.logs import log

HEARTBEAT_S: Final = 1.0


class Heartbeat:
    """Publishes the loads of a node's own workers, renews leases, writes decisions.

    Attributes:
        url: of the node, where others reach it; "" if none may.
    """

    def __init__(
        self,
        fleet: Fleet,
        store: Store,
        queue: CentralQueue,
        leases: Leases,
        decisions: Decisions,
        members: Members | None = None,
    ) -> None:
        """Beat for a fleet; it need not have started yet.

        Args:
            members: looks for others' workers; None where nobody does.
        """
        self._fleet = fleet
        self._store = store
        self._queue = queue
        self._leases = leases
        self._decisions = decisions
        self._members = members
        self.url = ""
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
        for number, worker in enumerate(self._fleet.own):
            if not self._left:
                await self._tell_of(worker, number)
        await self._leases.renew()
        if self._members is not None:
            await self._members.look()

    async def leave(self) -> None:
        """Take the workers out of the pool; further beats renew leases of what still runs."""
        self._left = True
        for worker in self._fleet.own:
            await self._withdraw(worker)

    async def write_decisions(self) -> None:
        """Write what was decided to the file, if there is one. Survives errors."""
        if not self._decisions.unwritten:
            return
        try:
            await asyncio.to_thread(self._decisions.write)
        except OSError as error:
            log(logging.ERROR, "decisions cannot be written", error=error)

    async def _tell_of(self, worker: FleetWorker, number: int) -> None:
        worker_id, failure = worker.worker_id, worker.backend.failure
        if failure is None:
            if worker_id in self._lost:  # an upstream
                self._lost.discard(worker_id)
                log(logging.INFO, "worker is back", worker=worker_id)
            await self._publish(worker, number)
        elif worker_id not in self._lost:
            self._lost.add(worker_id)
            where: dict[str, Any] = {}
            if worker.forwards:
                where["url"] = worker.backend.card.root
            log(logging.ERROR, "worker failed", worker=worker_id, reason=failure, **where)
            await self._withdraw(worker)

    async def _publish(self, worker: FleetWorker, number: int) -> None:
        reachable = self.url and not worker.forwards
        address = f"{self.url}{WORKER_PATH}{number}" if reachable else ""
        report = report_of(worker, next(self._numbers), address)
        counts = await self._store.publish(report)
        if counts:
            self._fenced.discard(worker.worker_id)
        elif worker.worker_id not in self._fenced:
            self._fenced.add(worker.worker_id)
            log(logging.ERROR, "another life of the worker has begun", worker=worker.worker_id)

    async def _withdraw(self, worker: FleetWorker) -> None:
        await self._store.withdraw(worker.worker_id, worker.epoch, next(self._numbers))


def report_of(worker: FleetWorker, seq: int, address: str) -> WorkerReport:
    """Return what there is to tell of a worker now."""
    card, load = worker.backend.card, worker.backend.load()
    return WorkerReport(
        worker.worker_id,
        worker.epoch,
        seq,
        load,
        capacity_tokens=load.kv_blocks_total * load.kv_block_tokens,
        watermark=worker.watermark,
        address=address,
        model_id=card.model_id,
        numerics_class=card.numerics_class,
        max_model_len=card.max_model_len,
    )
