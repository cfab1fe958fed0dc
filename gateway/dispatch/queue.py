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
from typing import Final

from draftgate.backends.errors import AdapterFailed, BackendFailed
from draftgate.gateway.dispatch.claims import Claims
from draftgate.gateway.dispatch.routing import Routed, Router, View
from draftgate.gateway.dispatch.search import WorkerSearch
from draftgate.gateway.dispatch.waiting import Waiting
from draftgate.gateway.errors import Overloaded, QueueTimeout
from draftgate.gateway.fleet import NO_ADAPTER, Fleet, FleetWorker
from draftgate.policies.admission.refusals import UNKNOWN_RETRY_S
from draftgate.policies.capacity import CapacityNeed, has_capacity
from draftgate.policies.protocols import OrderingPolicy

RECONSIDER_S: Final = 4.5
"""Wait in seconds after which admission decides again about a request.

The first heartbeat of a stream, after 5 s (`http/stream.py`), commits status 200. Half a second
covers a late timer and the time between the two starts. (Chosen, not tuned, 2026-11-23.)"""

BACKOFF_S: Final = 0.05
"""Interval of retries for capacity that other gateways hold.

A worker with 64 sequences of 200 tokens at 20 ms per token ends a sequence every 60 ms. (Chosen,
not tuned, 2026-11-22.)"""


class CentralQueue:
    """The queue of a node.

    Use the object only on the thread of the event loop.

    Attributes:
        places: the waiting requests, by the keys of their tickets.
        awaits_start: whether requests wait while no worker serves, because one may start.
        make_room: called with a request whose turn it is while no worker has capacity for it. The
            capacity that it frees later is the request's (`place_first`).
    """

    def __init__(
        self,
        fleet: Fleet,
        ordering: OrderingPolicy,
        router: Router,
        claims: Claims,
        now_s: Callable[[], float],
        timeout_s: float,
        *,
        binds_early: bool = False,
    ) -> None:
        """Start empty.

        Args:
            ordering: chooses the next request, for this queue only.
            router: chooses between the workers with capacity.
            claims: the claims of resumed requests.
            now_s: the clock of the tickets.
            timeout_s: the longest wait, in seconds.
            binds_early: whether workers without capacity get requests too, which queue there. This
                is the baseline of simulations.
        """
        self.ordering = ordering
        self._fleet = fleet
        self.router = router
        self.claims = claims
        self.now_s = now_s
        self._timeout_s = timeout_s
        self.places: dict[int, Waiting] = {}
        self.awaits_start = False
        self.make_room: Callable[[Waiting], None] = lambda _: None
        self._resumed: dict[int, Waiting] = {}  # those of resumed requests, in order of arrival
        self._adapted: dict[int, Waiting] = {}  # those that need a LoRA adapter
        self._passed: dict[int, Waiting] = {}  # those of them whose turn came while others pass
        self._backs_off = False
        self._search = WorkerSearch(fleet, router, binds_early=binds_early)
        self.prompt_tokens = 0

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self.places)

    def has_room(self, need: CapacityNeed) -> bool:
        """Return whether a new request would get a worker at once."""
        if self.places or self._backs_off:
            return False
        return self._search.has_room(need, self.claims.taken(""))

    async def turn(self, waiting: Waiting, view: View) -> Routed:
        """Wait for this request's turn and a worker with capacity, and reserve the capacity.

        The caller releases the capacity on the worker and then calls `dispatch_waiting`. A resumed
        request that waits claims a worker. After a refusal of the store, it keeps its claim and
        calls again.

        Args:
            view: a function that returns the routing policy's view of the request.

        Raises:
            BackendFailed: no worker is left, or none has the adapter (`AdapterFailed`).
            Overloaded: the request would wait too long, by a new forecast after `RECONSIDER_S`.
            QueueTimeout: the request waited too long.
        """
        routed = self.seat(waiting, view)
        return await self._wait(waiting) if routed is None else routed

    def seat(self, waiting: Waiting, view: View) -> Routed | None:
        """Reserve a worker as `turn` does, or return None if the request has to wait."""
        waiting.view = view
        waiting.backs_off = waiting.refused and waiting.claim_tokens > 0
        return None if self.places or waiting.backs_off else self._routed(waiting)

    def seat_new(
        self, request_id: str, need: CapacityNeed, view: View, avoid: frozenset[str]
    ) -> Routed | None:
        """Reserve a worker for a new request as `seat` does. Most requests need no `Waiting`."""
        if self.places or self._backs_off:
            return None
        return self._find(request_id, need, view, avoid)

    async def _wait(self, waiting: Waiting) -> Routed:
        """Wait for the turn of a request that found no worker with capacity, as `turn` does."""
        if self._lacks_adapter(waiting):
            raise AdapterFailed(NO_ADAPTER)
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[Routed] = loop.create_future()
        waiting.turn = turn
        self._push(waiting)
        self._dispatch()
        if waiting.claim_tokens and not turn.done():
            self.claims.begin(
                waiting.request_id,
                waiting.claim_tokens,
                waiting.need,
                waiting.avoid,
                changed=self._dispatch,
            )
        waited_s = self._waited_s(waiting)
        timer = loop.call_later(max(RECONSIDER_S - waited_s, 0.0), self._reconsider, waiting)
        try:
            async with asyncio.timeout(self._left_s(waiting, waited_s)):
                return await turn
        except TimeoutError:
            self._leave(waiting)
            self.claims.end(waiting.request_id)
            raise self._timed_out(waiting) from None
        except (asyncio.CancelledError, BackendFailed):
            self._leave(waiting)
            self.claims.end(waiting.request_id)
            raise
        finally:
            timer.cancel()

    @property
    def head(self) -> CapacityNeed | None:
        """The need of the next new request, or None if none waits."""
        ticket = self.ordering.choose(self.now_s())
        return None if ticket is None else self.places[ticket.key].need

    def reserve_on(self, worker: FleetWorker, request_id: str, need: CapacityNeed) -> Routed | None:
        """Reserve a worker for a request that needs no turn, or return None without capacity."""
        taken = worker.worker_id in self.claims.taken(request_id)
        is_open = bool(self._fleet.open_among([worker], need.offer))
        if taken or not is_open or not has_capacity(worker.usage, need):
            return None
        worker.reserve(request_id, need)
        return Routed(worker)

    def place_first(self, waiting: Waiting, worker: FleetWorker) -> None:
        """Give a request the capacity that `make_room` has freed on a worker, if it still waits."""
        self._search.mark(worker)
        if waiting.key not in self.places or not self._placed(waiting):
            return
        now_s = self.now_s()
        if self.ordering.choose(now_s) is waiting:
            self.ordering.take(now_s)  # which charges its tenant
        else:
            self.ordering.remove(waiting.key)
        self._forget(waiting)

    def dispatch_waiting(self, changed: FleetWorker | None = None) -> None:
        """Dispatch requests that now fit.

        Callers use this method whenever a worker may have capacity.

        Args:
            changed: the only worker that may have more capacity than before, or None if any may.
        """
        self._search.mark(changed)
        if self.places:
            self._dispatch()

    def _dispatch(self) -> None:
        """Dispatch requests that now fit, by what is known about changes of the workers."""
        if not self.places:
            return
        if not self._fleet.serves:
            if not self._may_start:
                self._fail_all()
            return
        for waiting in tuple(self._adapted.values()):
            if self._lacks_adapter(waiting):
                self._fail(waiting, AdapterFailed(NO_ADAPTER))
        if not self._dispatch_resumed():
            return
        # Read the clock once, because the order of requests depends on the time.
        now_s = self.now_s()
        for waiting in tuple(self._passed.values()):
            if self._placed(waiting):
                self._forget(waiting)
        while (ticket := self.ordering.choose(now_s)) is not None:
            waiting = self.places[ticket.key]
            placed = self._placed(waiting)
            if not placed and not self._may_be_passed(waiting):
                return
            self.ordering.take(now_s)
            if placed:
                self._forget(waiting)
            else:
                self._passed[ticket.key] = waiting

    def _may_be_passed(self, waiting: Waiting) -> bool:
        """Return whether later requests may use workers that lack the adapter of a request.

        Once its turn has come, such a request precedes all new requests on the other workers.
        """
        adapter = waiting.need.offer
        return bool(adapter) and not all(one.offers(adapter) for one in self._fleet.open)

    def _dispatch_resumed(self) -> bool:
        """Dispatch resumed requests that now fit.

        Returns:
            Whether each resumed request that still waits has claimed a worker, so that new requests
            may use the other workers.
        """
        for waiting in tuple(self._resumed.values()):
            if self._placed(waiting):
                self._forget(waiting)
            elif self.claims.worker_of(waiting.request_id) is None:
                return False
        return True

    def _placed(self, waiting: Waiting) -> bool:
        """Give a request its worker, and return whether the request has left the queue."""
        if waiting.turn.cancelled():  # cancelled, but its task has not run yet
            return True
        routed = None if waiting.backs_off else self._routed(waiting)
        if routed is None:
            self.make_room(waiting)
            return False
        waiting.turn.set_result(routed)
        return True

    def back_off(self) -> None:
        """Dispatch nothing for `BACKOFF_S`, after the store has refused a lease.

        The workers seem free, but other gateways have leased their capacity.
        """
        if not self._backs_off:
            self._backs_off = True
            asyncio.get_running_loop().call_later(BACKOFF_S, self._end_backoff)

    def _end_backoff(self) -> None:
        self._backs_off = False
        self._dispatch()

    def _routed(self, waiting: Waiting) -> Routed | None:
        """Reserve a worker with capacity and return it, or return None without such a worker."""
        # A resumed request backs off alone, and would otherwise wait while others back off.
        if self._backs_off and not waiting.claim_tokens:
            return None
        routed = self._find(
            waiting.request_id,
            waiting.need,
            waiting.view,
            waiting.avoid,
            has_blocks=waiting.has_blocks,
        )
        if routed is not None:
            del waiting.view  # ends a cycle of references
        return routed

    def _find(
        self,
        request_id: str,
        need: CapacityNeed,
        view: View,
        avoid: frozenset[str],
        *,
        has_blocks: bool = False,
    ) -> Routed | None:
        """Reserve the best worker for a request, or return None if the request has to wait."""
        found = self._search.find(need, view, avoid=avoid, taken=self.claims.taken(request_id))
        if found is None:
            return None
        usable, compared = found
        router, rivals = self.router, self._fleet.rivals
        routed: Routed | None
        if has_blocks or not router.separates:
            routed = router.choose(view, usable, compared, rivals=rivals, has_blocks=has_blocks)
        else:
            free = {worker for worker, _ in usable}
            open_ = self._fleet.open_among(compared, need.offer)
            full = [one for one in open_ if one not in free and one.worker_id not in avoid]
            routed = router.choose_phases(view, usable, full, compared, rivals=rivals)
        if routed is not None:
            routed.reserve(request_id, need)
        return routed

    def _waited_s(self, waiting: Waiting) -> float:
        """Return the seconds that a request has waited before this call of `turn`."""
        return 0.0 if waiting.since_s is None else self.now_s() - waiting.since_s

    def _left_s(self, waiting: Waiting, waited_s: float) -> float | None:
        """Return the remaining time to wait, or None without a limit."""
        limit_s = self._timeout_s if waiting.timeout_s is None else waiting.timeout_s
        return None if math.isinf(limit_s) else max(limit_s - waited_s, 0.0)

    def _reconsider(self, waiting: Waiting) -> None:
        """Refuse a request that would wait too long."""
        if waiting.key not in self.places or waiting.turn.done():
            return
        refused = waiting.reconsider(waiting, max(RECONSIDER_S, self._waited_s(waiting)))
        if refused is not None:
            error = Overloaded(refused.reason, refused.retry_after_s, refused.kind)
            self._fail(waiting, error)
            self._dispatch()  # the request may have blocked the requests after it

    def _timed_out(self, waiting: Waiting) -> QueueTimeout:
        """Return the error of a request that has waited for the maximum time."""
        limit_s = self._timeout_s if waiting.timeout_s is None else waiting.timeout_s
        refused = waiting.reconsider(waiting, limit_s)
        retry_s = UNKNOWN_RETRY_S if refused is None else refused.retry_after_s
        return QueueTimeout(f"no worker had capacity within {limit_s:g} s", retry_s)

    def _push(self, waiting: Waiting) -> None:
        self.places[waiting.key] = waiting
        if not waiting.need.offline:  # which does not delay other prompts
            self.prompt_tokens += waiting.need.prompt_tokens
        if waiting.need.offer:
            self._adapted[waiting.key] = waiting
        if not waiting.claim_tokens:
            self.ordering.push(waiting)
            return
        self._resumed[waiting.key] = waiting
        if waiting.backs_off:
            asyncio.get_running_loop().call_later(BACKOFF_S, self._end_refusal, waiting)

    def _end_refusal(self, waiting: Waiting) -> None:
        waiting.backs_off = False
        self._dispatch()

    def _forget(self, waiting: Waiting) -> None:
        del self.places[waiting.key]
        self._resumed.pop(waiting.key, None)
        self._adapted.pop(waiting.key, None)
        self._passed.pop(waiting.key, None)
        if not waiting.need.offline:
            self.prompt_tokens -= waiting.need.prompt_tokens

    def _leave(self, waiting: Waiting) -> None:
        """Remove a request that stops waiting, even if it gets a worker at the same time."""
        turn = waiting.turn
        if waiting.key in self.places:
            self.ordering.remove(waiting.key)
            self._forget(waiting)
        elif turn.done() and not turn.cancelled() and turn.exception() is None:
            turn.result().release(waiting.request_id)
            for worker in turn.result().reserved:
                self._search.mark(worker)
        self._dispatch()  # the request may have blocked the requests after it

    def _lacks_adapter(self, waiting: Waiting) -> bool:
        """Return whether no worker is left that has the adapter of a request."""
        adapter = waiting.need.offer
        return bool(adapter) and not self._fleet.serving_with(adapter) and not self._may_start

    @property
    def _may_start(self) -> bool:
        """Whether a worker may start, which is an upstream."""
        return self.awaits_start and not (self._fleet.token_ids or self._fleet.ending)

    def _fail_all(self) -> None:
        """Fail all waiting requests, because no worker is left."""
        for waiting in tuple(self.places.values()):
            self._fail(waiting, BackendFailed(self._fleet.outage))

    def _fail(self, waiting: Waiting, error: Exception) -> None:
        self.ordering.remove(waiting.key)
        self._forget(waiting)
        if not waiting.turn.done():  # a cancelled request leaves the queue when its task runs
            waiting.turn.set_exception(error)
