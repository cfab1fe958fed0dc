"""Discovery: the workers of other nodes, found in the state store and linked to.

Once a second the store is asked who is there. A worker that is new gets a link; once that stands it
belongs to the fleet. From then on the link says how it is, ten times a second, whatever becomes of
the store. It is left when the store no longer knows it, or knows a later life of it, and the link
has ended, too: a store that loses its memory costs nobody a stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from draftgate.backends.errors import BackendFailed, CheckpointError
from draftgate.backends.peer.backend import PeerBackend
from draftgate.backends.peer.tokenizer import files_digest
from draftgate.gateway.fleet import Fleet, PeerWorker
from draftgate.gateway.state.store import STALE_S, Snapshot, Store, WorkerReport, WorkerView
from draftgate.gateway.telemetry.logs import log

LOOK_S: Final = 1.0
"""Between two looks: as often as workers report."""

REFUSED_S: Final = 30.0
"""After which a worker is tried again that would not be linked to: somebody may have mended what
was wrong, such as a secret. (Chosen.)"""

Reach = Callable[[WorkerReport], PeerBackend]
"""Returns the backend that reaches a worker, in the life that it reports."""


@dataclass(slots=True)
class _Model:
    """What the workers of a node's fleet serve.

    Attributes:
        digest: of its tokenizer's files; "" while that is not known.
    """

    model_id: str
    max_model_len: int
    digest: str = ""

    def mismatch(self, model_id: str, max_model_len: int) -> str | None:
        """Return why who serves this does not belong here; None if it does."""
        if model_id != self.model_id:
            return f"it serves {model_id!r}, not {self.model_id!r}"
        if max_model_len < self.max_model_len:
            return f"its context is {max_model_len} tokens, not {self.max_model_len}"
        return None


class _Member:
    """A worker of another node, in one of its lives."""

    def __init__(self, report: WorkerReport, backend: PeerBackend) -> None:
        self.worker = PeerWorker(report.worker_id, backend, report.epoch)
        self.backend = backend
        self.joining: asyncio.Task[None] | None = None
        self.refused_s: float | None = None  # when it would not be linked to

    @property
    def is_over(self) -> bool:
        """Whether it is lost, or says that it stops, with nothing of this node's left there."""
        busy = self.worker.usage.sequences
        return self.backend.failure is not None and not busy


class Members:
    """The workers of other nodes. Use on the event loop's thread."""

    def __init__(
        self, fleet: Fleet, store: Store, reach: Reach, changed: Callable[[], None]
    ) -> None:
        """Find none yet.

        Args:
            changed: is called when a worker has come, or has told its load.
        """
        self._fleet = fleet
        fleet.discovers = True
        self._store = store
        self._reach = reach
        self._changed = changed
        self._members: dict[str, _Member] = {}
        self._strangers: dict[
            str, str
        ] = {}  # workers that do not belong here: lives that were told
        self._serves: _Model | None = None  # what belongs here, for good
        self._came = asyncio.Event()
        self._leaving = set[asyncio.Task[None]]()

    async def first(self) -> None:
        """Return once there is a worker: for a node that has none of its own."""
        while not self._fleet.workers:
            self._came.clear()
            await self.look()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._came.wait()
            except TimeoutError:
                pass  # ask again who is there

    async def look(self) -> None:
        """Ask the store who is there; begin with those that are new, leave those that are gone."""
        snapshot = await self._store.snapshot()
        # Without the store nobody knows what other gateways send; with it, reservations settle it.
        self._fleet.rivals = snapshot.gateways - 1 if snapshot.degraded else 0
        there = self._theirs(snapshot)
        for worker_id, member in tuple(self._members.items()):
            view = there.get(worker_id)
            if view is None:
                gone = member.is_over
            else:
                gone = view.report.epoch > member.worker.epoch or self._is_to_be_retried(member)
            if gone:
                self._leave(member)
            member.worker.gateways = max(1, snapshot.gateways)
        self._strangers = {one: life for one, life in self._strangers.items() if one in there}
        for worker_id, view in there.items():
            if worker_id not in self._members and self._belongs(view):
                self._join(view.report)

    async def close(self) -> None:
        """Leave all."""
        for member in tuple(self._members.values()):
            self._leave(member)
        await asyncio.gather(*self._leaving)

    def _theirs(self, snapshot: Snapshot) -> dict[str, WorkerView]:
        """Return the workers that others offer."""
        own = {worker.worker_id for worker in self._fleet.own}
        return {
            view.worker_id: view
            for view in snapshot.workers
            if view.report.address and view.worker_id not in own
        }

    def _belongs(self, view: WorkerView) -> bool:
        """Return whether a worker that is new is to be linked to; why not is logged once."""
        report = view.report
        if view.age_s > STALE_S:
            return False
        why = self._mismatch(report)
        if why is None:
            return True
        if self._strangers.get(report.worker_id) != report.epoch:
            self._strangers[report.worker_id] = report.epoch
            log(logging.ERROR, "a worker of the pool is left out", worker=report.worker_id, why=why)
        return False

    def _mismatch(self, report: WorkerReport) -> str | None:
        """Return why a worker cannot take what this node's others take; None if it may."""
        serves = self._known()
        return None if serves is None else serves.mismatch(report.model_id, report.max_model_len)

    def _known(self) -> _Model | None:
        """Return what this node serves, as far as it is known."""
        if self._serves is None and self._fleet.own:
            card = self._fleet.card
            self._serves = _Model(card.model_id, card.max_model_len)
        return self._serves

    def _is_to_be_retried(self, member: _Member) -> bool:
        refused_s = member.refused_s
        return refused_s is not None and _now_s() - refused_s > REFUSED_S

    def _join(self, report: WorkerReport) -> None:
        backend = self._reach(report)
        member = self._members[report.worker_id] = _Member(report, backend)
        member.joining = asyncio.create_task(self._link(member), name="join a worker")

    async def _link(self, member: _Member) -> None:
        """Link to a worker, and let the fleet have it. Never raises."""
        worker, backend = member.worker, member.backend
        try:
            await backend.start()
            await self._check(backend)
        except (BackendFailed, CheckpointError) as error:
            member.refused_s = _now_s()
            log(
                logging.ERROR,
                "a worker is out of reach",
                worker=worker.worker_id,
                reason=str(error),
            )
            await backend.stop()
            return
        backend.on_report = self._changed
        self._fleet.add(worker)
        log(logging.INFO, "worker joined", worker=worker.worker_id, epoch=worker.epoch)
        self._came.set()
        self._changed()

    async def _check(self, backend: PeerBackend) -> None:
        """Return if a worker has the fleet's model, and token ids mean the same to it.

        The first one of a node that has none of its own settles what that is.

        Raises:
            BackendFailed: it has not, or they do not.
        """
        card, digest = backend.card, backend.tokenizer_digest
        serves = self._known()
        if serves is not None and not serves.digest:  # its own model's
            files = self._fleet.tokenizer.files
            serves.digest = await asyncio.to_thread(lambda: files_digest(files()))
        if self._serves is None:  # still: of several first ones, one is it
            self._serves = _Model(card.model_id, card.max_model_len, digest)
        why = self._serves.mismatch(card.model_id, card.max_model_len)
        if why is not None:
            raise BackendFailed(why)
        if self._serves.digest != digest:
            raise BackendFailed("its tokenizer is another one")

    def _leave(self, member: _Member) -> None:
        """Send to a worker no more; what still runs there ends."""
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


async def _stop(member: _Member) -> None:
    if member.joining is not None:
        await asyncio.wait({member.joining})
    await member.backend.stop()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
