"""The forwarding of requests to upstreams, with the same admission and queue as other requests.

The gateway may try another upstream until one has responded. An error after the first byte of a
response is final, because a server that accepts text cannot resume the output of another server.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Final

from draftgate.backends.base import TokenUsage, UpstreamCall
from draftgate.backends.errors import BackendFailed, UpstreamFailed
from draftgate.gateway.dispatch.admission import AdmissionController, Entry
from draftgate.gateway.dispatch.queue import CentralQueue, Waiting
from draftgate.gateway.dispatch.routing import View
from draftgate.gateway.dispatch.span_attributes import record_route
from draftgate.gateway.dispatch.upstreams.answer import (
    NO_TOKENS,
    Calling,
    UpstreamAnswer,
    UpstreamRefusal,
)
from draftgate.gateway.dispatch.upstreams.pools import PoolDecision, UpstreamPools
from draftgate.gateway.errors import GatewayError, UpstreamBusy, UpstreamUnavailable
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.tracing import NO_SPAN, Span
from draftgate.policies.capacity import CapacityNeed, WorkerUsage, has_capacity
from draftgate.policies.resilience.retry_budget import RetryBudget
from draftgate.policies.routing.types import Route, RouteView
from draftgate.policies.types import RequestView
from draftgate.policies.values import immutable, replace

MOST_ATTEMPTS: Final = 3
"""Maximum attempts of one request. More would multiply the load on the remaining upstreams during
an outage."""

MOST_CALLS: Final = 2
"""Maximum calls of one request to one upstream. The first call may have used a closing
connection."""

_UNAVAILABLE: Final = 503


@immutable
class ForwardJob:
    """A client's request for an upstream.

    The sizes are estimates made without a tokenizer.

    Attributes:
        view: the speculation policy's view of the request.
    """

    request: Entry
    call: UpstreamCall
    view: RequestView

    @property
    def need(self) -> CapacityNeed:
        """The capacity that the request needs on an upstream, with one prompt."""
        (need,) = self.request.needs
        return need

    @property
    def limits(self) -> TokenUsage:
        """Estimated tokens of the prompt, and maximum tokens of all choices."""
        return TokenUsage(self.need.prompt_tokens, 0, self.need.sequences * self.request.max_tokens)

    def route_view(self, expected_tokens: float) -> RouteView:
        """Return the routing policy's view of the request."""
        need = self.need
        return RouteView(
            self.view, need.most_tokens, expected_tokens, need.sequences, self.request.tenant
        )


class Place:
    """The capacity that a request holds, on one upstream at a time.

    Attributes:
        worker: the upstream, or None without one.
        route: the first routing decision, or None without a choice.
        pool: the decision about speculation, or None without a choice.
    """

    def __init__(
        self, waiting: Waiting | None, view: View, pool: PoolDecision | None = None
    ) -> None:
        """Start without an upstream.

        Args:
            waiting: the queued request, or None for a request that needs no capacity.
        """
        self.worker: FleetWorker | None = None
        self.route: Route | None = None
        self.view = view
        self.pool = pool
        self.avoid = frozenset[str]() if waiting is None else waiting.avoid
        self._waiting = waiting

    def fits(self, usage: WorkerUsage) -> bool:
        """Return whether an upstream with this usage can take the request."""
        return self._waiting is None or has_capacity(usage, self._waiting.need)

    def move(self, worker: FleetWorker | None) -> None:
        """Release the capacity, and reserve it on another upstream if one is given."""
        if self._waiting is not None:
            if self.worker is not None:
                self.worker.release(self._waiting.request_id)
            if worker is not None:
                worker.reserve(self._waiting.request_id, self._waiting.need)
        self.worker = worker


class Forwarder:
    """A forwarder of requests to the upstreams of a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        queue: CentralQueue,
        admission: AdmissionController,
        pools: UpstreamPools,
        budget: RetryBudget,
        on_retry: Callable[[str, bool], None],
    ) -> None:
        """Use a fleet of upstreams, which may start later.

        Args:
            budget: the budget of retries of all requests.
            on_retry: a callback for each retry, with its cause and whether the budget allows it.
        """
        self._fleet = fleet
        self.queue = queue
        self.admission = admission
        self._pools = pools
        self._budget = budget
        self._on_retry = on_retry

    def run(self, job: ForwardJob, span: Span = NO_SPAN) -> RunningForward:
        """Return a context in which an upstream answers a job."""
        return RunningForward(self, job, span)

    def run_uncounted(self, call: UpstreamCall) -> Calls:
        """Return a context for a call that generates nothing, without admission, queue and quota.

        Raises:
            GatewayError: no upstream responds.
        """
        place = Place(None, lambda: RouteView(RequestView(0, 0, 0.0), 0, 0.0))
        candidates = self._candidates([], place, again=False)
        if not candidates:
            raise self.no_upstream()
        place.move(self._choose(candidates, place))
        return Calls(self, call, NO_TOKENS, place, NO_SPAN)

    async def admit(self, job: ForwardJob, span: Span) -> Entry:
        """Admit a job. `settle` of its admission must follow.

        Raises:
            Overloaded, QuotaExceeded: the job is rejected for now. The error has the retry time.
            GatewayError: no upstream is available.
        """
        if not self._fleet.open:
            raise self.no_upstream()
        with span.child("admit"):
            await self.admission.admit(job.request)
        return job.request

    async def turn(self, job: ForwardJob, entry: Entry, span: Span) -> Place:
        """Wait until an upstream has capacity, and return the capacity, which the caller releases.

        Raises:
            UpstreamUnavailable: the last upstream became unavailable.
        """
        waiting = self.admission.waiting(entry, 0)
        view = partial(job.route_view, entry.expected_tokens)
        pool = self._choose_pool(job)
        if pool is not None:
            waiting.avoid = pool.avoid
        place = Place(waiting, view, pool)
        with span.child("queue"):
            try:
                routed = await self.queue.turn(waiting, view)
            except BackendFailed as error:
                raise self.no_upstream() from error
        record_route(span, routed)
        place.worker, place.route = routed.worker, routed.route
        return place

    def record_pool(self, job: ForwardJob, place: Place) -> None:
        """Record the decision about speculation, if any, before the job is sent."""
        if place.pool is not None and place.worker is not None:
            self._pools.record(job.request, place.worker, place.pool, place.route)

    def count_request(self) -> None:
        """Count a request in the budget of retries."""
        self._budget.count_request(_now_s())

    def next_worker(self, tried: list[str], place: Place, *, refused: bool) -> FleetWorker | None:
        """Return the upstream for the next attempt, or None without an upstream or budget."""
        if len(tried) >= MOST_ATTEMPTS:
            return None
        candidates = self._candidates(tried, place, again=not refused)
        if not candidates:
            return None
        allowed = self._budget.take_retry(_now_s())
        self._on_retry("refused" if refused else "failed", allowed)
        return self._choose(candidates, place) if allowed else None

    def _choose_pool(self, job: ForwardJob) -> PoolDecision | None:
        """Return the decision about speculation, or None without a choice."""
        if not job.request.max_tokens:  # embeddings have no drafts
            return None
        if len(self.queue):  # either pool may later be the first with capacity
            return self._pools.choose(job.view, lambda _: False)
        return self._pools.choose(job.view, partial(has_capacity, need=job.need))

    def _candidates(
        self, tried: list[str], place: Place, *, again: bool
    ) -> list[tuple[FleetWorker, WorkerUsage]]:
        """Return the upstreams with capacity, and their usage.

        Args:
            tried: ids of upstreams that were already called, used only if no other is left.
            again: whether upstreams that were already called may be used.
        """
        usable = [(worker, worker.usage) for worker in self._fleet.open]
        usable = [(worker, usage) for worker, usage in usable if place.fits(usage)]
        fresh = [pair for pair in usable if pair[0].worker_id not in tried]
        called = [pair for pair in usable if tried.count(pair[0].worker_id) < MOST_CALLS]
        found = fresh or (called if again else [])
        return [pair for pair in found if pair[0].worker_id not in place.avoid] or found

    def _choose(
        self, candidates: list[tuple[FleetWorker, WorkerUsage]], place: Place
    ) -> FleetWorker:
        return self.queue.router.choose(place.view, candidates, self._fleet.workers).worker

    def no_upstream(self) -> GatewayError:
        """Return the error for a request without an available upstream."""
        retry_after_s = self.retry_after_s()
        pauses = [worker.upstream.pause for worker in self._fleet.workers]
        if any(pause is not None and pause.status == _UNAVAILABLE for pause in pauses):
            return UpstreamUnavailable("no upstream is available", retry_after_s=retry_after_s)
        return UpstreamBusy("every upstream is overloaded", retry_after_s=retry_after_s)

    def retry_after_s(self) -> int:
        """Return the whole seconds until an upstream may be called again, at least 1."""
        pauses = [worker.upstream.pause for worker in self._fleet.workers]
        return max(1, math.ceil(min(pause.remaining_s if pause else 0.0 for pause in pauses)))


class RunningForward:
    """A context that admits a job, queues it and forwards it, and cancels it if it ends early.

    A sent prompt is charged, whatever the outcome, unless the upstream rejects the request or
    reports another count.

    Raises:
        Overloaded, QuotaExceeded: the job is rejected for now. The error has the retry time.
        GatewayError: no upstream responds. The client has not received anything.
    """

    _entry: Entry
    _answer: UpstreamAnswer

    def __init__(self, forwarder: Forwarder, job: ForwardJob, span: Span) -> None:
        self._forwarder = forwarder
        self._job = job
        self._span = span
        self._place: Place | None = None
        self._calls: Calls | None = None

    async def __aenter__(self) -> UpstreamAnswer:
        forwarder, job = self._forwarder, self._job
        self._entry = entry = await forwarder.admit(job, self._span)
        try:
            self._place = place = await forwarder.turn(job, entry, self._span)
            forwarder.record_pool(job, place)
            entry.prompt_tokens = job.limits.prompt
            calls = Calls(forwarder, job.call, job.limits, place, self._span)
            self._answer = answer = await calls.__aenter__()
            self._calls = calls
        except BaseException as error:
            await self._end(error)
            raise
        # The first bytes of a whole response arrive with its last token, not with its first.
        if not answer.is_error and (answer.exchange.streaming or not job.limits.output):
            forwarder.admission.answered(entry)
        return answer

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _record_usage(self._entry, self._answer)
        await self._end(error)

    async def _end(self, error: BaseException | None) -> None:
        forwarder = self._forwarder
        try:
            if self._calls is not None:
                await self._calls.end(error)
        finally:
            if self._place is not None:
                self._place.move(None)
                forwarder.queue.dispatch_waiting()
            # An upstream that refuses has computed nothing.
            if isinstance(error, UpstreamBusy | UpstreamUnavailable):
                self._entry.prompt_tokens = 0
            await forwarder.admission.settle(self._entry)


class Calls:
    """A context with the response to a call of the reserved upstream.

    If that upstream does not respond, the context calls others.

    Raises:
        GatewayError, UpstreamFailed: no upstream responds.
    """

    def __init__(
        self,
        forwarder: Forwarder,
        call: UpstreamCall,
        limits: TokenUsage,
        place: Place,
        span: Span,
    ) -> None:
        """Prepare a call.

        Args:
            place: the capacity on an upstream, which moves to another upstream for another call.
        """
        self._forwarder = forwarder
        self._call = call
        self._limits = limits
        self._place = place
        self._span = span
        self._calling: Calling | None = None

    async def __aenter__(self) -> UpstreamAnswer:
        forwarder, place = self._forwarder, self._place
        forwarder.count_request()
        tried: list[str] = []
        refusal: UpstreamRefusal | None = None
        failure: UpstreamFailed | None = None
        while (worker := place.worker) is not None:
            tried.append(worker.worker_id)
            calling = Calling(worker, self._call, self._limits, self._span)
            try:
                found = await calling.begin()
            except UpstreamFailed as error:
                await calling.end(error)
                failure, refusal = error, None
            except BaseException as error:
                await calling.end(error)
                raise
            else:
                if isinstance(found, UpstreamAnswer):
                    self._calling = calling
                    return _with_pool(found, place.pool, worker)
                await calling.end(None)
                refusal = found
            place.move(None)
            place.move(forwarder.next_worker(tried, place, refused=refusal is not None))
        if refusal is None:
            raise failure or forwarder.no_upstream()
        return refusal.to_client(forwarder.retry_after_s())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.end(error)

    async def end(self, error: BaseException | None) -> None:
        """End the call."""
        if self._calling is not None:
            await self._calling.end(error)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _with_pool(
    answer: UpstreamAnswer, pool: PoolDecision | None, worker: FleetWorker
) -> UpstreamAnswer:
    """Return a response with headers that show the decision about speculation."""
    if pool is None:
        return answer
    return replace(answer, headers={**answer.headers, **pool.headers(worker)}, plan=pool.plan)


def _record_usage(entry: Entry, answer: UpstreamAnswer) -> None:
    usage = answer.usage()
    entry.prompt_tokens, entry.output_tokens = usage.prompt, usage.output
    if not answer.is_error and not answer.exchange.error_sent:
        entry.ended = entry.sequences
