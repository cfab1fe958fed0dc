"""The forwarding of requests to upstreams, with the same admission and queue as other requests.

The gateway may try another upstream until one has responded. An error after the first byte of a
response is final, because a server that accepts text cannot resume the output of another server.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Final

from draftgate.backends.base import TokenUsage, UpstreamCall
from draftgate.backends.errors import BackendFailed, UpstreamFailed
from draftgate.gateway.dispatch.admission import AdmissionController, AdmissionRequest, Entry
from draftgate.gateway.dispatch.queue import CentralQueue, Waiting
from draftgate.gateway.dispatch.routing import View
from draftgate.gateway.dispatch.upstream_answer import (
    NO_TOKENS,
    UpstreamAnswer,
    UpstreamRefusal,
    begin_answer,
    read_refusal,
)
from draftgate.gateway.dispatch.upstream_pools import PoolDecision, UpstreamPools
from draftgate.gateway.errors import GatewayError, UpstreamBusy, UpstreamUnavailable
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.metrics import Metrics
from draftgate.gateway.telemetry.span_attributes import record_route
from draftgate.gateway.telemetry.tracing import NO_SPAN, Span
from draftgate.gateway.telemetry.worker_spans import open_dispatch
from draftgate.policies.capacity import CapacityNeed, WorkerUsage, has_capacity
from draftgate.policies.resilience.retry_budget import RetryBudget
from draftgate.policies.routing.types import RouteView
from draftgate.policies.types import RequestView
from draftgate.policies.values import immutable

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

    request: AdmissionRequest
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


class _Place:
    """The capacity that a request holds, on one upstream at a time.

    Attributes:
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
        metrics: Metrics,
    ) -> None:
        """Use a fleet of upstreams, which may start later.

        Args:
            budget: the budget of retries of all requests.
        """
        self._fleet = fleet
        self._queue = queue
        self._admission = admission
        self._pools = pools
        self._budget = budget
        self._metrics = metrics

    @asynccontextmanager
    async def run(self, job: ForwardJob, span: Span = NO_SPAN) -> AsyncIterator[UpstreamAnswer]:
        """Admit a job, queue it and forward it, and cancel it if the block ends early.

        A sent prompt is charged, whatever the outcome, unless the upstream rejects the request or
        reports another count.

        Raises:
            Overloaded, QuotaExceeded: the job is rejected for now. The error has the retry time.
            GatewayError: no upstream responds. The client has not received anything.
        """
        if not self._fleet.open:
            raise self._no_upstream()
        with span.child("admit"):
            entry = await self._admission.admit(job.request)
        try:
            async with self._turn(job, entry, span) as place:
                entry.prompt_tokens = job.limits.prompt
                async with self._answer(job.call, job.limits, place, span) as answer:
                    if not answer.is_error:
                        self._admission.answered(entry)
                    try:
                        yield answer
                    finally:
                        _record_usage(entry, answer)
        except (UpstreamBusy, UpstreamUnavailable):  # an upstream that refuses has computed nothing
            entry.prompt_tokens = 0
            raise
        finally:
            await self._admission.settle(entry)

    @asynccontextmanager
    async def run_uncounted(self, call: UpstreamCall) -> AsyncIterator[UpstreamAnswer]:
        """Forward a call that generates nothing, without admission, queue and quota.

        Raises:
            GatewayError: no upstream responds.
        """
        place = _Place(None, lambda: RouteView(RequestView(0, 0, 0.0), 0, 0.0))
        candidates = self._candidates([], place, again=False)
        if not candidates:
            raise self._no_upstream()
        place.move(self._choose(candidates, place))
        async with self._answer(call, NO_TOKENS, place, NO_SPAN) as answer:
            yield answer

    @asynccontextmanager
    async def _turn(self, job: ForwardJob, entry: Entry, span: Span) -> AsyncIterator[_Place]:
        """Wait until an upstream has capacity, and hold the capacity until the block ends.

        Raises:
            UpstreamUnavailable: the last upstream became unavailable.
        """
        waiting = self._admission.waiting(entry, 0)
        view = partial(job.route_view, entry.expected_tokens)
        pool = self._choose_pool(job)
        if pool is not None:
            waiting = replace(waiting, avoid=pool.avoid)
        place = _Place(waiting, view, pool)
        with span.child("queue"):
            try:
                routed = await self._queue.turn(waiting, view)
            except BackendFailed as error:
                raise self._no_upstream() from error
        try:
            record_route(span, routed)
            place.move(routed.worker)
            if pool is not None:
                self._pools.record(job.request, routed.worker, pool, routed.route)
            yield place
        finally:
            place.move(None)
            self._queue.pump()

    def _choose_pool(self, job: ForwardJob) -> PoolDecision | None:
        """Return the decision about speculation, or None without a choice."""
        if not job.request.max_tokens:  # embeddings have no drafts
            return None
        if len(self._queue):  # either pool may later be the first with capacity
            return self._pools.choose(job.view, lambda _: False)
        return self._pools.choose(job.view, partial(has_capacity, need=job.need))

    @asynccontextmanager
    async def _answer(
        self, call: UpstreamCall, limits: TokenUsage, place: _Place, span: Span
    ) -> AsyncIterator[UpstreamAnswer]:
        """Send a call to the reserved upstream, or to others if that upstream does not respond.

        Raises:
            GatewayError, UpstreamFailed: no upstream responds.
        """
        self._budget.count_request(_now_s())
        tried: list[str] = []
        refusal: UpstreamRefusal | None = None
        failure: UpstreamFailed | None = None
        while (worker := place.worker) is not None:
            tried.append(worker.worker_id)
            async with AsyncExitStack() as stack:
                dispatch = stack.enter_context(open_dispatch(span, worker.server))
                try:
                    answer = await begin_answer(stack, worker, _traced(call, dispatch), limits)
                    dispatch.set({"http.response.status_code": answer.status})
                    refusal = await read_refusal(worker, answer)
                except UpstreamFailed as error:
                    dispatch.fail(error)
                    failure, refusal = error, None
                else:
                    if refusal is None:
                        yield _with_pool(answer, place.pool, worker)
                        return
            place.move(None)
            place.move(self._next(tried, place, refused=refusal is not None))
        if refusal is None:
            raise failure or self._no_upstream()
        yield refusal.to_client(self._retry_after_s())

    def _next(self, tried: list[str], place: _Place, *, refused: bool) -> FleetWorker | None:
        """Return the upstream for the next attempt, or None without an upstream or budget."""
        if len(tried) >= MOST_ATTEMPTS:
            return None
        candidates = self._candidates(tried, place, again=not refused)
        if not candidates:
            return None
        allowed = self._budget.take_retry(_now_s())
        cause = "refused" if refused else "failed"
        self._metrics.add(metric.RETRIES, 1, cause, "allowed" if allowed else "denied")
        return self._choose(candidates, place) if allowed else None

    def _candidates(
        self, tried: list[str], place: _Place, *, again: bool
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
        self, candidates: list[tuple[FleetWorker, WorkerUsage]], place: _Place
    ) -> FleetWorker:
        alone = len(self._fleet.workers) == 1
        return self._queue.router.choose(place.view, candidates, alone=alone).worker

    def _no_upstream(self) -> GatewayError:
        """Return the error for a request without an available upstream."""
        retry_after_s = self._retry_after_s()
        pauses = [worker.upstream.pause for worker in self._fleet.workers]
        if any(pause is not None and pause.status == _UNAVAILABLE for pause in pauses):
            return UpstreamUnavailable("no upstream is available", retry_after_s=retry_after_s)
        return UpstreamBusy("every upstream is overloaded", retry_after_s=retry_after_s)

    def _retry_after_s(self) -> int:
        """Return the whole seconds until an upstream may be called again, at least 1."""
        pauses = [worker.upstream.pause for worker in self._fleet.workers]
        return max(1, math.ceil(min(pause.remaining_s if pause else 0.0 for pause in pauses)))


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _traced(call: UpstreamCall, span: Span) -> UpstreamCall:
    """Return a call that continues the trace below a span."""
    return call._replace(headers={**call.headers, **span.propagation()})


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
        entry.ended = sum(need.sequences for need in entry.request.needs)
