"""Discovery of other nodes' workers in the state store, and links to them.

The node reads the store once a second. Each new worker gets a peer link, and joins the fleet once
the link is up. The link then reports the load ten times a second, independently of the store. A
worker is removed when its link has ended and the store no longer lists it, or lists a later epoch.
A store that loses its memory therefore interrupts no stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from draftgate.backends.errors import BackendFailed, CheckpointError
from draftgate.backends.peer.backend import PeerBackend
from draftgate.backends.peer.tokenizer import files_digest
from draftgate.gateway.fleet import Fleet, FleetWorker, PeerWorker
from draftgate.gateway.logs import log
from draftgate.gateway.state.commands import ListWorkers
from draftgate.gateway.state.store import Store
from draftgate.gateway.state.values import STALE_S, Snapshot, WorkerReport, WorkerView

_READ_S: Final = 1.0
"""Interval of reading the store, which equals the interval of the workers' reports."""

WORKER_READ_S: Final = 1e-4
"""Least interval of reading the store, for each worker and for each node of the pool.

The server takes 10 to 15 us per worker for a snapshot on a busy machine. All nodes together thus
take at most a seventh of its time. The interval exceeds `_READ_S` in pools with more than 10,000
pairs of a worker and a node. With 1,000 workers and 64 nodes, it is 6.4 s. (`draftgate bench
scale`, AMD EPYC Zen 3, 2026-11-23.)"""

SETTLE_S: Final = 5.0
"""Seconds after its start for which a node of a pool may miss workers of other nodes.

After an outage of the store, workers report again within this time: they notice the end of the
outage within a second, and report once a second. (`make soak`, seed 1, 2026-11-27.)"""

_REFUSED_S: Final = 30.0
"""Time until the node tries again to link to a worker that rejected the link.

An operator may have corrected the configuration, such as the secret. (Chosen, not tuned.)"""

Reach = Callable[[WorkerReport], PeerBackend]
"""A function that returns the backend for a worker, in the epoch of its report."""


@dataclass(slots=True)
class _Model:
    """The model that the workers of a node serve.

    Attributes:
        digest: hash of the tokenizer's files, or an empty string while unknown.
    """

    model_id: str
    max_model_len: int
    digest: str = ""

    def mismatch(self, model_id: str, max_model_len: int) -> str | None:
        """Return why a worker of this model cannot join, or None if the worker can join."""
        if model_id != self.model_id:
            return f"the worker serves {model_id!r}, not {self.model_id!r}"
        if max_model_len < self.max_model_len:
            return f"the worker's context is {max_model_len} tokens, not {self.max_model_len}"
        return None


class _Member:
    """A worker of another node, in one epoch."""

    def __init__(self, report: WorkerReport, backend: PeerBackend) -> None:
        self.worker = PeerWorker(report.worker_id, backend, report.epoch)
        self.model_id = report.model_id
        self.backend = backend
        self.joining: asyncio.Task[None] | None = None
        self.refused_s: float | None = None  # when the worker rejected the link

    @property
    def is_over(self) -> bool:
        """Whether the link has ended and runs no sequence of this node."""
        busy = self.worker.usage.sequences
        return self.backend.failure is not None and not busy

    def is_replaced_by(self, epoch: str) -> bool:
        """Return whether the worker has begun another life, which the store lists.

        An earlier epoch may be an old report that a store has restored, or the epoch of a machine
        whose clock went back. The end of the link shows which.
        """
        return epoch > self.worker.epoch or (epoch != self.worker.epoch and self.is_over)


class Members:
    """The workers of other nodes that have one model.

    Use the object only on the thread of the event loop.

    Attributes:
        on_other_model: a callback for the name of another model in the pool, at each reading.
    """

    def __init__(
        self,
        fleet: Fleet,
        store: Store,
        reach: Reach,
        changed: Callable[[FleetWorker], None],
        model_id: str | None = None,
    ) -> None:
        """Start without members.

        Args:
            reach: a function that returns the backend for a worker.
            changed: a callback for a worker that has joined or reported its load.
            model_id: name of the model in the pool, or None if the first worker determines it.
        """
        self.on_other_model: Callable[[str], None] = lambda _model_id: None
        self._fleet = fleet
        fleet.discovers = True
        self._store = store
        self._reach = reach
        self._changed = changed
        self._members: dict[str, _Member] = {}
        self._rejected: dict[str, str] = {}  # rejected workers, with the logged epoch
        # the model of the workers, once known
        self._served = None if model_id is None else _Model(model_id, 0)
        self._arrived = asyncio.Event()
        self._leaving = set[asyncio.Task[None]]()
        self._next_read_s = 0.0
        self._settled_s = 0.0  # before it has begun to search

    @property
    def may_miss(self) -> bool:
        """Whether the pool may have workers that this node has not found since its start."""
        return self._settled_s > 0.0 and _now_s() < self._settled_s

    def settle(self) -> None:
        """Note that the node has just started, so that it may miss workers for a while."""
        self._settled_s = _now_s() + SETTLE_S

    async def first(self) -> None:
        """Wait for the first worker.

        Nodes without workers of their own call this method.
        """
        while not self._fleet.workers:
            self._arrived.clear()
            await self.refresh()
            try:
                async with asyncio.timeout(_READ_S):
                    await self._arrived.wait()
            except TimeoutError:
                pass  # read the store again

    async def refresh(self) -> None:
        """Read the store, link to new workers, and remove lost workers.

        Gateways of a large pool do not read the store with each call, unless it does not respond.
        """
        if self._store.outage is None and not self._fleet.rivals and _now_s() < self._next_read_s:
            return
        snapshot = await self._store.call(ListWorkers())
        self._next_read_s = _now_s() + read_pause_s(len(snapshot.workers), snapshot.nodes)
        if snapshot.degraded and self.may_miss:
            self.settle()  # workers report again only after the outage
        # Reservations include other gateways. Without the store, count the gateways instead.
        self._fleet.rivals = snapshot.gateways - 1 if snapshot.degraded else 0
        leased = {view.worker_id: view.leased_tokens for view in snapshot.workers}
        for worker in self._fleet.workers:
            worker.leased_tokens = leased.get(worker.worker_id, 0)
        listed = self._remote_workers(snapshot)
        for worker_id, member in tuple(self._members.items()):
            view = listed.get(worker_id)
            if view is None:
                gone = member.is_over
            else:
                gone = member.is_replaced_by(view.report.epoch) or self._is_to_be_retried(member)
            if gone:
                self._leave(member)
            member.worker.gateways = max(1, snapshot.gateways)
        self._rejected = {one: life for one, life in self._rejected.items() if one in listed}
        for worker_id, view in listed.items():
            if worker_id not in self._members and self._may_join(view):
                self._join(view.report)

    async def close(self) -> None:
        """Remove all members."""
        for member in tuple(self._members.values()):
            self._leave(member)
        await asyncio.gather(*self._leaving)

    def _remote_workers(self, snapshot: Snapshot) -> dict[str, WorkerView]:
        """Return the workers of other nodes."""
        own = {worker.worker_id for worker in self._fleet.own}
        return {
            view.worker_id: view
            for view in snapshot.workers
            if view.report.address and view.worker_id not in own
        }

    def _may_join(self, view: WorkerView) -> bool:
        """Return whether a new worker may join, and log the reason once if not."""
        report = view.report
        expected = self._expected_model()
        if expected is not None and report.model_id != expected:
            if self._own_model() is not None:
                self.on_other_model(report.model_id)
            return False
        if view.age_s > STALE_S:
            return False
        why = self._mismatch(report)
        if why is None:
            return True
        if self._rejected.get(report.worker_id) != report.epoch:
            self._rejected[report.worker_id] = report.epoch
            log(logging.ERROR, "ignoring a worker of the pool", worker=report.worker_id, why=why)
        return False

    def _mismatch(self, report: WorkerReport) -> str | None:
        """Return why a worker cannot serve this node's requests, or None if the worker can."""
        serves = self._own_model()
        return None if serves is None else serves.mismatch(report.model_id, report.max_model_len)

    def _expected_model(self) -> str | None:
        """Return the model of the workers, or None if a worker of any model may join.

        While the model is unknown, the node links to workers of one model at a time. The first
        link determines the model.
        """
        serves = self._own_model()
        if serves is not None:
            return serves.model_id
        joining = (one for one in self._members.values() if one.refused_s is None)
        return next((one.model_id for one in joining), None)

    def _own_model(self) -> _Model | None:
        """Return the model of this node, or None while it is unknown."""
        if self._served is None and self._fleet.own:
            card = self._fleet.card
            self._served = _Model(card.model_id, card.max_model_len)
        return self._served

    def _is_to_be_retried(self, member: _Member) -> bool:
        refused_s = member.refused_s
        return refused_s is not None and _now_s() - refused_s > _REFUSED_S

    def _join(self, report: WorkerReport) -> None:
        backend = self._reach(report)
        member = self._members[report.worker_id] = _Member(report, backend)
        member.joining = asyncio.create_task(self._link(member), name="join a worker")

    async def _link(self, member: _Member) -> None:
        """Link to a worker and add it to the fleet.

        Errors are logged.
        """
        worker, backend = member.worker, member.backend
        try:
            await backend.start()
            await self._check(backend)
        except (BackendFailed, CheckpointError) as error:
            member.refused_s = _now_s()
            log(
                logging.ERROR,
                "cannot link to a worker",
                worker=worker.worker_id,
                reason=str(error),
            )
            await backend.stop()
            return
        backend.on_report = partial(self._changed, worker)
        self._fleet.add(worker)
        log(logging.INFO, "worker joined", worker=worker.worker_id, epoch=worker.epoch)
        self._arrived.set()
        self._changed(worker)

    async def _check(self, backend: PeerBackend) -> None:
        """Check that a worker has the fleet's model and tokenizer.

        On a node without its own workers, the first worker determines both, and again after all
        workers have left.

        Raises:
            BackendFailed: the worker has another model or tokenizer.
        """
        card, digest = backend.card, backend.tokenizer_digest
        serves = self._own_model()
        if serves is not None and not serves.digest and self._fleet.own:
            files = self._fleet.tokenizer.files
            serves.digest = await asyncio.to_thread(lambda: files_digest(files()))
        serves = self._served  # several workers may link concurrently, and the first wins
        if serves is None or not self._fleet.workers:
            model_id = card.model_id if serves is None else serves.model_id
            serves = self._served = _Model(model_id, card.max_model_len, digest)
        why = serves.mismatch(card.model_id, card.max_model_len)
        if why is not None:
            raise BackendFailed(why)
        if serves.digest != digest:
            raise BackendFailed("the worker has another tokenizer")

    def _leave(self, member: _Member) -> None:
        """Remove a worker from the fleet and close its link."""
        worker = member.worker
        if member.joining is not None:
            member.joining.cancel()
        del self._members[worker.worker_id]
        if member.refused_s is None:
            log(logging.INFO, "worker left", worker=worker.worker_id, epoch=worker.epoch)
        self._fleet.remove(worker)
        task = asyncio.create_task(_stop(member), name="leave a worker")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


def read_pause_s(workers: int, nodes: int) -> float:
    """Return the time in which a node does not read the store again, or 0 in a small pool."""
    pause_s = WORKER_READ_S * workers * nodes
    return pause_s if pause_s > _READ_S else 0.0


async def _stop(member: _Member) -> None:
    if member.joining is not None:
        await asyncio.wait({member.joining})
    await member.backend.stop()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
