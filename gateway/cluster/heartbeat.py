"""The heartbeat of a model on a node, which runs once a second.

The heartbeat reports the node's workers, renews its leases and quota reservations, shares what the
node has learned, and finds workers of other nodes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Final

from draftgate.backends.peer.channel import WORKER_PATH
from draftgate.gateway.cluster.members import Members
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.json_lines import JsonLinesFile
from draftgate.gateway.logs import log
from draftgate.gateway.state.commands import PublishReport, WithdrawWorker
from draftgate.gateway.state.store import Store
from draftgate.gateway.state.values import WorkerReport

HEARTBEAT_S: Final = 1.0


class Heartbeat:
    """The heartbeat that publishes worker loads, renews leases, and writes files.

    Attributes:
        url: the URL at which other nodes reach this node, or an empty string without access.
    """

    def __init__(
        self,
        fleet: Fleet,
        store: Store,
        dispatcher: Dispatcher,
        files: Sequence[JsonLinesFile] = (),
        members: Members | None = None,
        first_worker: int = 0,
    ) -> None:
        """Serve a fleet, which may start later.

        Args:
            files: files of records, which the heartbeat writes.
            members: discovery of other nodes' workers, or None without a pool.
            first_worker: number of the fleet's first own worker among those of the node.
        """
        self._fleet = fleet
        self._store = store
        self._dispatcher = dispatcher
        self._files = files
        self._members = members
        self._first_worker = first_worker
        self.url = ""
        self._numbers = count()  # sequence numbers of reports
        self._left = False
        self._lost: set[str] = set()  # failed workers that have been logged
        self._fenced: set[str] = set()  # fenced workers that have been logged

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Run the heartbeat until the block ends."""
        beats = asyncio.create_task(self.run())
        try:
            yield
        finally:
            beats.cancel()
            await asyncio.wait({beats})

    async def run(self) -> None:
        """Run until cancelled.

        Errors are logged.
        """
        writing = asyncio.create_task(self._write_files_repeatedly(), name="write files")
        try:
            while True:
                try:
                    await self.beat()
                    await self._dispatcher.sharing.pause(HEARTBEAT_S)
                except Exception as error:  # noqa: BLE001 - a stopped heartbeat would look like a dead node
                    log(logging.ERROR, "heartbeat failed", error=error)
                    await asyncio.sleep(HEARTBEAT_S)
        finally:
            writing.cancel()

    async def beat(self) -> None:
        """Report workers, renew leases and reservations, and dispatch requests that now fit."""
        # Memory may become free without an event on this node.
        self._dispatcher.queue.dispatch_waiting()
        for number, worker in enumerate(self._fleet.own, self._first_worker):
            if not self._left:
                await self._report(worker, number)
        await self._dispatcher.leases.renew()
        await self._dispatcher.admission.quotas.renew()
        await self._dispatcher.sharing.exchange()
        if self._members is not None:
            await self._members.refresh()

    async def leave(self) -> None:
        """Withdraw the workers from the pool.

        Later heartbeats only renew leases of running requests.
        """
        self._left = True
        for worker in self._fleet.own:
            await self._withdraw(worker)

    async def write_files(self) -> None:
        """Write the records of decisions and of the audit log, if files are configured."""
        for file in self._files:
            await file.flush()

    async def _write_files_repeatedly(self) -> None:
        """Write the files beside the heartbeat, which a disk that hangs must not stop."""
        while self._files:
            try:
                await self.write_files()
            except Exception as error:  # noqa: BLE001 - later records may be written
                log(logging.ERROR, "cannot write records", error=error)
            await asyncio.sleep(HEARTBEAT_S)

    async def _report(self, worker: FleetWorker, number: int) -> None:
        worker_id, failure = worker.worker_id, worker.backend.failure
        if failure is None:
            if worker_id in self._lost:  # an upstream that recovered
                self._lost.discard(worker_id)
                log(logging.INFO, "worker recovered", worker=worker_id)
            await self._publish(worker, number)
        elif worker_id not in self._lost:
            self._lost.add(worker_id)
            where: dict[str, Any] = {} if worker.server is None else {"url": worker.server}
            log(logging.ERROR, "worker failed", worker=worker_id, reason=failure, **where)
            await self._withdraw(worker)

    async def _publish(self, worker: FleetWorker, number: int) -> None:
        reachable = self.url and worker.server is None
        address = f"{self.url}{WORKER_PATH}{number}" if reachable else ""
        report = report_of(worker, next(self._numbers), address)
        counts = await self._store.call(PublishReport(report))
        if counts:
            self._fenced.discard(worker.worker_id)
        elif worker.worker_id not in self._fenced:
            self._fenced.add(worker.worker_id)
            log(logging.ERROR, "a newer epoch of the worker exists", worker=worker.worker_id)

    async def _withdraw(self, worker: FleetWorker) -> None:
        withdraw = WithdrawWorker(worker.worker_id, worker.epoch, next(self._numbers))
        await self._store.call(withdraw)


def report_of(worker: FleetWorker, seq: int, address: str) -> WorkerReport:
    """Return the current report of a worker."""
    card, load = worker.backend.card, worker.backend.load()
    return WorkerReport(
        worker.worker_id,
        worker.epoch,
        seq,
        capacity_tokens=load.kv_total_tokens,
        watermark=worker.watermark,
        address=address,
        model_id=card.model_id,
        max_model_len=card.max_model_len,
    )
