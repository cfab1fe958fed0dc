"""Preemption: a waiting request takes the place of one of a lower class at an upstream.

If no upstream of its model has capacity, a request whose turn it is may abort one request of a
strictly lower class that runs. Only an upstream that allows it loses requests. The victim must lose
nothing, so it is one of

- a request of whose response the client has nothing, which is sent again, and
- a stream of which another request can ask for the rest (`kept_stream`).

It is of the lowest class, and the youngest of this class, of which least is computed again. It
waits with its first place in the queue, so ahead of later requests of its class, and for as long as
its client does.

No request starves. One that has been preempted `most` times, or has waited for `STARVATION_S` in
total, keeps its place. A waiting request takes one place at most. So `w` waiting requests cause at
most `w` requests to be sent again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from contextvars import Context

from draftgate.backends.base import Upstream, UpstreamCall
from draftgate.gateway.dispatch.admission import AdmissionController, Entry
from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.dispatch.run import Preempted, Watch
from draftgate.gateway.dispatch.upstreams.kept_stream import KeptStream
from draftgate.gateway.dispatch.waiting import Waiting
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.logs import log
from draftgate.policies.capacity import has_capacity, without_request
from draftgate.policies.ordering.fair import STARVATION_S


class PreemptibleRequest:
    """A request that may lose its place at an upstream.

    Attributes:
        waiting: its place in the queue, with which it waits again.
        kept: its stream, once it has begun and if it is kept.
        preemptions: number of places that it has lost.
    """

    __slots__ = (
        "_can_abort", "_is_continuable", "_limit", "_shared", "_since_s", "_taker", "_waited_s",
        "_watch", "kept", "preemptions", "waiting", "worker",
    )  # fmt: skip

    def __init__(self, shared: Preemption, waiting: Waiting, watch: Watch) -> None:
        self.waiting = waiting
        self.kept: KeptStream | None = None
        self.preemptions = 0
        self.worker: FleetWorker | None = None
        self._shared = shared
        self._watch = watch
        self._since_s: float | None = waiting.arrived_s  # while it waits
        self._waited_s = 0.0
        self._limit: asyncio.Timeout | None = None  # until the first bytes of a response
        self._taker: Waiting | None = None
        self._can_abort = False
        self._is_continuable = True  # as far as is known

    async def run(
        self, worker: FleetWorker, call: UpstreamCall, sending: Coroutine[None, None, None]
    ) -> bool:
        """Wait for the first bytes of a response, and return False if the place is lost meanwhile.

        The caller then releases the worker, and calls `hand_over`.

        Args:
            sending: sends the call to the worker, and returns with these bytes.
        """
        self._begin(worker, call)
        try:
            async with asyncio.timeout(None) as limit:
                self._limit = limit
                self._shared.add(self, worker)
                await sending
        except TimeoutError:
            if not limit.expired():
                raise
            return False
        finally:
            self._limit = None
        if self._taker is not None:  # the bytes have arrived before the call was aborted
            self._taker.has_preempted, self._taker = False, None
        return True

    def _begin(self, worker: FleetWorker, call: UpstreamCall) -> None:
        """Note that a worker gets the request now."""
        upstream: Upstream = worker.backend  # type: ignore[assignment]
        self._can_abort, self._is_continuable = upstream.may_abort(call), True
        self._taker = None  # of a call that has failed meanwhile
        if self._since_s is not None:
            self._waited_s += self._shared.queue.now_s() - self._since_s
            self._since_s = None

    @property
    def may_leave(self) -> bool:
        """Whether the request may be aborted now, as far as is known."""
        if self._taker is not None or not self._can_abort:
            return False
        if self.preemptions >= self._shared.most or self._waited_s > STARVATION_S:
            return False
        if self._limit is not None:
            return True
        return self._is_continuable and self.kept is not None and self.kept.has_begun

    async def can_leave(self) -> bool:
        """Return whether the client loses nothing if the request is aborted now."""
        if self.may_leave and self._limit is None and self.kept is not None:
            self._is_continuable = await self.kept.is_continuable()
        return self.may_leave

    def preempt(self, taker: Waiting) -> None:
        """Abort the request, and give its place to a waiting one."""
        self._taker = taker
        taker.has_preempted = True
        if self._limit is not None:
            self._limit.reschedule(0.0)
            return
        assert self.kept is not None and self.worker is not None  # noqa: PT018
        self.kept.preempt(self.waiting)
        self.worker.release(self.waiting.request_id)
        self.hand_over(self.worker)

    def hand_over(self, worker: FleetWorker) -> None:
        """Let the waiting request have the place, which is free now, and wait for another one."""
        shared, waiting, taker = self._shared, self.waiting, self._taker
        assert taker is not None
        self._taker = None
        self.leave()
        self.preemptions += 1
        self._since_s = shared.queue.now_s()
        waiting.wait_preempted()
        continues = self.kept is not None
        self._watch(Preempted(worker.worker_id, continues=continues))
        log(
            logging.INFO,
            "preempted",
            id=waiting.request_id,
            worker=worker.worker_id,
            priority=waiting.priority,
            by=taker.request_id,
            by_priority=taker.priority,
            continues=continues,
        )
        shared.queue.place_first(taker, worker)
        shared.queue.dispatch_waiting(worker)

    def leave(self) -> None:
        """Note that the request has left its worker."""
        self._shared.remove(self)
        self.worker = None


class Preemption:
    """The running requests of a fleet of upstreams, and the choice of the one to abort.

    Use the object only on the thread of the event loop.

    Attributes:
        most: maximum number of places that one request loses.
    """

    def __init__(
        self, fleet: Fleet, queue: CentralQueue, admission: AdmissionController, most: int
    ) -> None:
        """Make room for the requests of a queue."""
        self.queue = queue
        self.most = most
        self._fleet = fleet
        self._admission = admission
        self._running: dict[int, dict[PreemptibleRequest, None]] = {}  # by class, oldest first
        self._searches: dict[int, asyncio.Task[None]] = {}  # by the key of the waiting request
        queue.make_room = self.make_room

    def place(self, entry: Entry, watch: Watch) -> PreemptibleRequest:
        """Return the place of an admitted request, which has the time of its arrival."""
        waiting = self._admission.waiting(entry, 0)
        waiting.request_id = entry.request_id
        return PreemptibleRequest(self, waiting, watch)

    def add(self, request: PreemptibleRequest, worker: FleetWorker) -> None:
        """Add a request that runs on a worker from now on."""
        self.remove(request)
        request.worker = worker
        self._running.setdefault(request.waiting.priority, {})[request] = None

    def remove(self, request: PreemptibleRequest) -> None:
        """Forget a request. The method is idempotent."""
        priority = request.waiting.priority
        found = self._running.get(priority, {})
        if request in found:
            del found[request]
            if not found:
                del self._running[priority]

    def make_room(self, waiting: Waiting) -> None:
        """Look for a request that can give its place to a waiting one, unless one has."""
        if waiting.has_preempted or waiting.key in self._searches:
            return
        if next(self._victims(waiting), None) is None:
            return
        # An empty context keeps the id of the present request out of the log lines.
        search = asyncio.get_running_loop().create_task(self._search(waiting), context=Context())
        self._searches[waiting.key] = search
        search.add_done_callback(lambda _: self._searches.pop(waiting.key))

    async def _search(self, waiting: Waiting) -> None:
        """Preempt the first request that loses nothing by it, while the other one waits."""
        for victim in list(self._victims(waiting)):
            if await victim.can_leave() and self._fits(waiting, victim):
                if waiting.key in self.queue.places and not waiting.turn.done():
                    victim.preempt(waiting)
                return

    def _victims(self, waiting: Waiting) -> Iterator[PreemptibleRequest]:
        """Return the requests of lower classes whose place would suffice, best first."""
        for priority in sorted(self._running, reverse=True):
            if priority <= waiting.priority:
                return
            for request in reversed(self._running[priority]):
                if request.may_leave and self._fits(waiting, request):
                    yield request

    def _fits(self, waiting: Waiting, request: PreemptibleRequest) -> bool:
        """Return whether a waiting request may have the place of a running one."""
        worker, need = request.worker, waiting.need
        if worker is None or not self._fleet.open_among([worker], need.offer):
            return False
        if worker.worker_id in waiting.avoid:
            able = self._fleet.open_among(self._fleet.workers, need.offer)
            if any(one.worker_id not in waiting.avoid for one in able):
                return False
        return has_capacity(without_request(worker.usage, request.waiting.need), need)
