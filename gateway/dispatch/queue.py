"""The central queue, in which admitted requests wait until a worker has capacity.

Requests get their worker as late as possible. More urgent requests can overtake waiting requests.
The first worker with capacity, by its current load, gets the next request. A worker gets only as
many requests as its next steps can run (`policies/capacity.py`). The ordering policy chooses the
next request, and the routing policy chooses its worker.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from draftgate.backends.errors import BackendFailed
from draftgate.gateway.dispatch.routing import Routed, Router, View
from draftgate.gateway.errors import Overloaded, QueueTimeout
from draftgate.gateway.fleet import Fleet
from draftgate.policies.admission.refusals import UNKNOWN_RETRY_S
from draftgate.policies.admission.types import Refused
from draftgate.policies.capacity import CapacityNeed, has_capacity
from draftgate.policies.protocols import OrderingPolicy
from draftgate.policies.types import Ticket

RECONSIDER_S: Final = 4.5
"""Wait in seconds after which admission decides again about a request.

The first heartbeat of a stream, after 5 s (`http/stream.py`), commits status 200. Half a second
covers a late timer and the time between the two starts. (Chosen, not tuned, 2026-11-23.)"""

Reconsider = Callable[[Ticket, float], Refused | None]
"""A function that decides again about a request, from its ticket and the seconds that it has
waited."""


def _keep(ticket: Ticket, waited_s: float) -> None:
    """Keep a request, without a forecast."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A queued request.

    Attributes:
        avoid: ids of workers that run the request only if no other worker is available.
        since_s: start of the wait, for the timeout. None means the next call of `turn`.
        reconsider: decides again about the request while it waits.
    """

    request_id: str
    ticket: Ticket
    need: CapacityNeed
    avoid: frozenset[str] = frozenset()
    since_s: float | None = None
    reconsider: Reconsider = _keep

    def for_rest(self, request_id: str, need: CapacityNeed, avoid: frozenset[str]) -> Waiting:
        """Return the rest of the request, with the same place in the queue."""
        return Waiting(request_id, replace(self.ticket, returning=True), need, avoid)

    def retried(self, since_s: float) -> Waiting:
        """Return the request for another wait with the same place, because it was not sent.

        Args:
            since_s: time when the unsuccessful wait started.
        """
        begun_s = since_s if self.since_s is None else self.since_s
        return replace(self, ticket=replace(self.ticket, returning=True), since_s=begun_s)


@dataclass(slots=True)
class _Place:
    """A waiting request and the future of its worker."""

    waiting: Waiting
    view: View
    turn: asyncio.Future[Routed]


HELD_S: Final = 0.05
"""Interval of retries for capacity that other gateways hold.

A worker with 64 sequences of 200 tokens at 20 ms per token ends a sequence every 60 ms. (Chosen,
not tuned, 2026-11-22.)"""


class CentralQueue:
    """The queue of a node.

    Use the object only on the thread of the event loop.
    """

    def __init__(
        self,
        fleet: Fleet,
        ordering: OrderingPolicy,
        router: Router,
        now_s: Callable[[], float],
        timeout_s: float,
    ) -> None:
        """Start empty.

        Args:
            ordering: chooses the next request, for this queue only.
            router: chooses between the workers with capacity.
            now_s: the clock of the tickets.
            timeout_s: the longest wait, in seconds.
        """
        self.ordering = ordering
        self._fleet = fleet
        self.router = router
        self.now_s = now_s
        self._timeout_s = None if math.isinf(timeout_s) else timeout_s
        self._places: dict[int, _Place] = {}  # by the key of the ticket
        self._held = False
        self.prompt_tokens = 0

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._places)

    async def turn(self, waiting: Waiting, view: View) -> Routed:
        """Wait for this request's turn and a worker with capacity, and reserve the capacity.

        The caller releases the capacity on the worker and then calls `pump`.

        Args:
            view: a function that returns the routing policy's view of the request.

        Raises:
            BackendFailed: no worker is left.
            Overloaded: the request would wait too long, by a new forecast after `RECONSIDER_S`.
            QueueTimeout: the request waited too long.
        """
        routed = None if self._places else self._routed(waiting, view)
        if routed is not None:
            return routed
        loop = asyncio.get_running_loop()
        place = _Place(waiting, view, loop.create_future())
        self._push(place)
        self.pump()
        waited_s = self._waited_s(waiting)
        timer = loop.call_later(max(RECONSIDER_S - waited_s, 0.0), self._reconsider, place)
        try:
            async with asyncio.timeout(self._left_s(waited_s)):
                return await place.turn
        except TimeoutError:
            self._leave(place)
            raise self._timed_out(waiting) from None
        except asyncio.CancelledError:
            self._leave(place)
            raise
        finally:
            timer.cancel()

    def pump(self) -> None:
        """Dispatch requests that now fit.

        Callers use this method whenever a worker may have capacity.
        """
        if not self._places:
            return
        if not self._fleet.serving:
            self._fail_all()
            return
        now_s = (
            self.now_s()
        )  # read the clock once, because the order of requests depends on the time
        while (ticket := self.ordering.choose(now_s)) is not None:
            place = self._places[ticket.key]
            gone = place.turn.cancelled()  # cancelled, but its task has not run yet
            routed = None if gone else self._routed(place.waiting, place.view)
            if routed is None and not gone:
                return
            self.ordering.take(now_s)
            self._forget(place)
            if routed is not None:
                place.turn.set_result(routed)

    def hold(self) -> None:
        """Dispatch nothing for `HELD_S`.

        Workers then seem free, but other gateways hold their leases.
        """
        if not self._held:
            self._held = True
            asyncio.get_running_loop().call_later(HELD_S, self._end_hold)

    def _end_hold(self) -> None:
        self._held = False
        self.pump()

    def _routed(self, waiting: Waiting, view: View) -> Routed | None:
        """Reserve a worker with capacity and return it, or return None without such a worker."""
        if self._held:
            return None
        need, open_ = waiting.need, self._fleet.open
        if waiting.avoid:
            open_ = [w for w in open_ if w.worker_id not in waiting.avoid] or open_
        usable = [(worker, worker.usage) for worker in open_]
        usable = [(worker, at) for worker, at in usable if has_capacity(at, need)]
        if not usable:
            return None
        routed = self.router.choose(
            view, usable, alone=len(self._fleet.workers) == 1, rivals=self._fleet.rivals
        )
        routed.worker.reserve(waiting.request_id, need)
        return routed

    def _waited_s(self, waiting: Waiting) -> float:
        """Return the seconds that a request has waited before this call of `turn`."""
        return 0.0 if waiting.since_s is None else self.now_s() - waiting.since_s

    def _left_s(self, waited_s: float) -> float | None:
        """Return the remaining time to wait, or None without a limit."""
        return None if self._timeout_s is None else max(self._timeout_s - waited_s, 0.0)

    def _reconsider(self, place: _Place) -> None:
        """Refuse a request that would wait too long."""
        waiting = place.waiting
        if waiting.ticket.key not in self._places or place.turn.done():
            return
        refused = waiting.reconsider(waiting.ticket, max(RECONSIDER_S, self._waited_s(waiting)))
        if refused is not None:
            error = Overloaded(refused.reason, refused.retry_after_s, refused.kind)
            self._fail(place, error)
            self.pump()  # the request may have blocked the requests after it

    def _timed_out(self, waiting: Waiting) -> QueueTimeout:
        """Return the error of a request that has waited for the longest time."""
        assert self._timeout_s is not None  # no request times out without a limit
        refused = waiting.reconsider(waiting.ticket, self._timeout_s)
        retry_s = UNKNOWN_RETRY_S if refused is None else refused.retry_after_s
        return QueueTimeout(f"no worker had capacity within {self._timeout_s:g} s", retry_s)

    def _push(self, place: _Place) -> None:
        self._places[place.waiting.ticket.key] = place
        self.prompt_tokens += place.waiting.need.prompt_tokens
        self.ordering.push(place.waiting.ticket)

    def _forget(self, place: _Place) -> None:
        del self._places[place.waiting.ticket.key]
        self.prompt_tokens -= place.waiting.need.prompt_tokens

    def _leave(self, place: _Place) -> None:
        """Remove a request that stops waiting, perhaps when it also gets a worker."""
        ticket, turn = place.waiting.ticket, place.turn
        if ticket.key in self._places:
            self.ordering.remove(ticket.key)
            self._forget(place)
        elif turn.done() and not turn.cancelled() and turn.exception() is None:
            turn.result().worker.release(place.waiting.request_id)
        self.pump()  # the request may have blocked the requests after it

    def _fail_all(self) -> None:
        """Fail all waiting requests, because no worker is left."""
        for place in tuple(self._places.values()):
            self._fail(place, BackendFailed(self._fleet.outage))

    def _fail(self, place: _Place, error: Exception) -> None:
        self.ordering.remove(place.waiting.ticket.key)
        self._forget(place)
        if not place.turn.done():  # a cancelled request leaves the queue when its task runs
            place.turn.set_exception(error)
