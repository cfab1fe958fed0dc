"""The central queue: requests that were admitted wait here until a worker has room for them.

They are bound late. As long as they wait here a more urgent one can overtake them, and they go to
whichever worker has room first, by its load at that moment; each worker has no more before it than
its next steps take (`policies/room.py`). Who is next is the ordering policy's business.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from backends.errors import BackendFailed
from gateway.errors import QueueTimeout
from gateway.fleet import Choose, Fleet, FleetWorker
from policies.ordering.ticket import Ticket
from policies.protocols import OrderingPolicy
from policies.room import Need, has_room


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request on its way to a worker.

    Attributes:
        avoid: ids of workers that it goes to only if there is no other.
    """

    request_id: str
    ticket: Ticket
    need: Need
    avoid: frozenset[str] = frozenset()

    def again(self, request_id: str, need: Need, avoid: frozenset[str]) -> Waiting:
        """Return what is left of the request, with the place that it had."""
        return Waiting(request_id, replace(self.ticket, returning=True), need, avoid)


@dataclass(slots=True)
class _Place:
    """A place in the queue."""

    waiting: Waiting
    turn: asyncio.Future[FleetWorker]


RETRY_TIMEOUT_S: Final = 5.0
"""After a wait that was in vain: the forecast was wrong, and nobody knows better yet."""


class CentralQueue:
    """Use on the event loop's thread."""

    def __init__(
        self,
        fleet: Fleet,
        ordering: OrderingPolicy,
        choose: Choose,
        now_s: Callable[[], float],
        timeout_s: float,
    ) -> None:
        """Start empty.

        Args:
            ordering: who is next; the queue's own.
            choose: which of the workers with room.
            now_s: the clock of the tickets.
            timeout_s: longest wait.
        """
        self.ordering = ordering
        self._fleet = fleet
        self._choose = choose
        self._now_s = now_s
        self._timeout_s = None if math.isinf(timeout_s) else timeout_s
        self._places: dict[int, _Place] = {}  # by ticket
        self.prompt_tokens = 0

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._places)

    async def turn(self, waiting: Waiting) -> FleetWorker:
        """Wait until a worker has room and it is this request's turn; it is reserved there then.

        The caller releases it there, and calls `pump` when it has.

        Raises:
            BackendFailed: no worker is left.
            QueueTimeout: it waited too long.
        """
        worker = None if self._places else self._with_room(waiting)
        if worker is not None:
            worker.reserve(waiting.request_id, waiting.need)
            return worker
        place = _Place(waiting, asyncio.get_running_loop().create_future())
        self._push(place)
        self.pump()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await place.turn
        except TimeoutError:
            self._leave(place)
            raise QueueTimeout(
                f"no worker had room within {self._timeout_s:g} s", retry_after_s=RETRY_TIMEOUT_S
            ) from None
        except asyncio.CancelledError:
            self._leave(place)
            raise

    def pump(self) -> None:
        """Send on who can go: call it whenever a worker may have room."""
        if not self._places:
            return
        if not self._fleet.serving:
            self._fail_all()
            return
        now_s = self._now_s()  # once: at another instant somebody else may be next
        while (ticket := self.ordering.choose(now_s)) is not None:
            place = self._places[ticket.key]
            gone = place.turn.cancelled()  # and has not been able to leave by itself yet
            worker = None if gone else self._with_room(place.waiting)
            if worker is None and not gone:
                return
            self.ordering.take(now_s)
            self._forget(place)
            if worker is not None:
                worker.reserve(place.waiting.request_id, place.waiting.need)
                place.turn.set_result(worker)

    def _with_room(self, waiting: Waiting) -> FleetWorker | None:
        """Return the worker that takes a request now, if one does."""
        there = self._fleet.open
        if waiting.avoid:
            there = [w for w in there if w.worker_id not in waiting.avoid] or there
        open_ = [worker for worker in there if has_room(worker.occupancy, waiting.need)]
        if not open_:
            return None
        return open_[self._choose([worker.reserved_tokens for worker in open_])]

    def _push(self, place: _Place) -> None:
        self._places[place.waiting.ticket.key] = place
        self.prompt_tokens += place.waiting.need.prompt_tokens
        self.ordering.push(place.waiting.ticket)

    def _forget(self, place: _Place) -> None:
        del self._places[place.waiting.ticket.key]
        self.prompt_tokens -= place.waiting.need.prompt_tokens

    def _leave(self, place: _Place) -> None:
        """Clean up behind one who stops waiting, perhaps at the very moment of its turn."""
        ticket, turn = place.waiting.ticket, place.turn
        if ticket.key in self._places:
            self.ordering.remove(ticket.key)
            self._forget(place)
        elif turn.done() and not turn.cancelled() and turn.exception() is None:
            turn.result().release(place.waiting.request_id)
        self.pump()  # it may have kept others waiting

    def _fail_all(self) -> None:
        """Tell all who wait that nobody is left to serve them."""
        for place in tuple(self._places.values()):
            self.ordering.remove(place.waiting.ticket.key)
            self._forget(place)
            place.turn.set_exception(BackendFailed(self._fleet.outage or "there is no worker"))
