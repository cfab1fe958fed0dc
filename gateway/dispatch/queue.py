"""The central queue: requests that were admitted wait here until a worker has room for them.

They are bound late. As long as they wait here a more urgent one can overtake them, and they go to
whichever worker has room first, by its load at that moment; each worker has no more before it than
its next steps take (`policies/capacity.py`). The ordering policy says who is next, and where
it goes the routing policy, where several have room.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from draftgate.backends.errors import BackendFailed
from draftgate.gateway.dispatch.routing import Routed, Router, View
from draftgate.gateway.errors import QueueTimeout
from draftgate.gateway.fleet import Fleet
from draftgate.policies.capacity import CapacityNeed, has_capacity
from draftgate.policies.protocols import OrderingPolicy
from draftgate.policies.types import Ticket


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request on its way to a worker.

    Attributes:
        avoid: ids of workers that it goes to only if there is no other.
        since_s: from when on its longest wait counts; None begins with the next turn.
    """

    request_id: str
    ticket: Ticket
    need: CapacityNeed
    avoid: frozenset[str] = frozenset()
    since_s: float | None = None

    def again(self, request_id: str, need: CapacityNeed, avoid: frozenset[str]) -> Waiting:
        """Return what is left of the request, with the place that it had."""
        return Waiting(request_id, replace(self.ticket, returning=True), need, avoid)

    def on(self, since_s: float) -> Waiting:
        """Return the request as it waits on, with the place that it had: it was not sent.

        Args:
            since_s: when it took its place for the turn that came to nothing.
        """
        begun_s = since_s if self.since_s is None else self.since_s
        return replace(self, ticket=replace(self.ticket, returning=True), since_s=begun_s)


@dataclass(slots=True)
class _Place:
    """A place in the queue."""

    waiting: Waiting
    view: View
    turn: asyncio.Future[Routed]


HELD_S: Final = 0.05
"""Between two looks at whether other gateways have left room. A worker that serves 64 sequences of
200 tokens at 20 ms a token ends one every 60 ms. (Chosen, 2026-11-22.)"""

RETRY_TIMEOUT_S: Final = 5.0
"""After a wait that was in vain: the forecast was wrong, and nobody knows better yet."""


class CentralQueue:
    """Use on the event loop's thread."""

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
            ordering: who is next; the queue's own.
            router: chooses among the workers with room.
            now_s: the clock of the tickets.
            timeout_s: longest wait.
        """
        self.ordering = ordering
        self._fleet = fleet
        self.router = router
        self.now_s = now_s
        self._timeout_s = None if math.isinf(timeout_s) else timeout_s
        self._places: dict[int, _Place] = {}  # by ticket
        self._held = False
        self.prompt_tokens = 0

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._places)

    async def turn(self, waiting: Waiting, view: View) -> Routed:
        """Wait until a worker has room and it is this request's turn; it is reserved there then.

        The caller releases it there, and calls `pump` when it has.

        Args:
            view: of the request, for whoever chooses its worker.

        Raises:
            BackendFailed: no worker is left.
            QueueTimeout: it waited too long.
        """
        routed = None if self._places else self._routed(waiting, view)
        if routed is not None:
            return routed
        place = _Place(waiting, view, asyncio.get_running_loop().create_future())
        self._push(place)
        self.pump()
        try:
            async with asyncio.timeout(self._left_s(waiting)):
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
        now_s = self.now_s()  # once: at another instant somebody else may be next
        while (ticket := self.ordering.choose(now_s)) is not None:
            place = self._places[ticket.key]
            gone = place.turn.cancelled()  # and has not been able to leave by itself yet
            routed = None if gone else self._routed(place.waiting, place.view)
            if routed is None and not gone:
                return
            self.ordering.take(now_s)
            self._forget(place)
            if routed is not None:
                place.turn.set_result(routed)

    def hold(self) -> None:
        """Let nobody go for `HELD_S`: by loads there is room, by others' leases none."""
        if not self._held:
            self._held = True
            asyncio.get_running_loop().call_later(HELD_S, self._go_on)

    def _go_on(self) -> None:
        self._held = False
        self.pump()

    def _routed(self, waiting: Waiting, view: View) -> Routed | None:
        """Reserve a worker for a request and return it, if one takes it now."""
        if self._held:
            return None
        need, open_ = waiting.need, self._fleet.open
        if waiting.avoid:
            open_ = [w for w in open_ if w.worker_id not in waiting.avoid] or open_
        there = [(worker, worker.usage) for worker in open_]
        there = [(worker, at) for worker, at in there if has_capacity(at, need)]
        if not there:
            return None
        routed = self.router.choose(
            view, there, alone=len(self._fleet.workers) == 1, rivals=self._fleet.rivals
        )
        routed.worker.reserve(waiting.request_id, need)
        return routed

    def _left_s(self, waiting: Waiting) -> float | None:
        """Return how long it may still wait; None is for ever."""
        if self._timeout_s is None or waiting.since_s is None:
            return self._timeout_s
        return max(0.0, waiting.since_s + self._timeout_s - self.now_s())

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
            turn.result().worker.release(place.waiting.request_id)
        self.pump()  # it may have kept others waiting

    def _fail_all(self) -> None:
        """Tell all who wait that nobody is left to serve them."""
        for place in tuple(self._places.values()):
            self.ordering.remove(place.waiting.ticket.key)
            self._forget(place)
            place.turn.set_exception(BackendFailed(self._fleet.outage))
