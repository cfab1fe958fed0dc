"""Requests for upstreams: admitted and queued as all others, and passed on as bytes.

Until an upstream has answered, another one may be tried. After the first byte of an answer an error
is final, since a server that takes text cannot resume another one's output.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from draftgate.backends.base import TokenUsage, UpstreamCall
from draftgate.backends.errors import BackendFailed, UpstreamFailed
from draftgate.gateway.dispatch.admission import AdmissionController, Ask, Entry
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
from draftgate.gateway.telemetry.tracing import NO_SPAN, Span
from draftgate.policies.capacity import CapacityNeed, WorkerUsage, has_capacity
from draftgate.policies.resilience.retry_budget import RetryBudget
from draftgate.policies.routing.types import RouteView
from draftgate.policies.types import RequestView

MOST_ATTEMPTS: Final = 3
"""Of one request. More would multiply the load on the remaining upstreams while some are out."""

MOST_CALLS: Final = 2
"""Of one request to one upstream: the first may have used a connection that was being closed."""

_UNAVAILABLE: Final = 503


@dataclass(frozen=True, slots=True)
class ForwardJob:
    """A client's request for an upstream; its sizes are estimates made without a tokenizer.

    Attributes:
        view: what a policy may know of it.
    """

    ask: Ask
    call: UpstreamCall
    view: RequestView

    @property
    def need(self) -> CapacityNeed:
        """What it takes of an upstream; there is one prompt."""
        (need,) = self.ask.needs
        return need

    @property
    def limits(self) -> TokenUsage:
        """Estimated tokens of the prompt, and most tokens of all choices."""
        return TokenUsage(self.need.prompt_tokens, 0, self.need.sequences * self.ask.max_tokens)

    def route_view(self, expected_tokens: float) -> RouteView:
        """Return what a routing policy may know of it."""
        need = self.need
        return RouteView(
            self.view, need.most_tokens, expected_tokens, need.sequences, self.ask.tenant
        )


class _Place:
    """The capacity that a request holds, on one upstream at a time.

    Attributes:
        pool: the decision about speculation; None where there was no choice.
    """

    def __init__(
        self, waiting: Waiting | None, view: View, pool: PoolDecision | None = None
    ) -> None:
        """Begin with no upstream; without `waiting` no capacity is needed."""
        self.worker: FleetWorker | None = None
        self.view = view
        self.pool = pool
        self.avoid = frozenset[str]() if waiting is None else waiting.avoid
        self._waiting = waiting

    def fits(self, usage: WorkerUsage) -> bool:
        """Return whether an upstream with this usage can take the request."""
        return self._waiting is None or has_capacity(usage, self._waiting.need)

    def move(self, worker: FleetWorker | None) -> None:
        """Give the capacity up, and reserve it on another upstream if there is one."""
        if self._waiting is not None:
            if self.worker is not None:
                self.worker.release(self._waiting.request_id)
            if worker is not None:
                worker.reserve(self._waiting.request_id, self._waiting.need)
        self.worker = worker


class Forwarder:
    """Runs requests on the upstreams of a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        queue: CentralQueue,
        admission: AdmissionController,
        pools: UpstreamPools,
        budget: RetryBudget,
        metrics: Metrics,
    ) -> None:
        """Use a fleet of upstreams; it need not have started yet.

        Args:
            budget: of all requests that are sent again.
        """
        self._fleet = fleet
        self._queue = queue
        self._admission = admission
        self._pools = pools
        self._budget = budget
        self._metrics = metrics

    @asynccontextmanager
    async def run(self, job: ForwardJob, span: Span = NO_SPAN) -> AsyncIterator[UpstreamAnswer]:
        """Admit a job, queue it and forward it; leaving the context early cancels it.

        Once it is sent its prompt is booked, whatever the outcome, unless the upstream refuses it
        or reports another count.

        Raises:
            Overloaded, QuotaExceeded: not now; the error says when.
            GatewayError: on entering: no upstream answers. The client has not been sent anything.
        """
        if not self._fleet.open:
            raise self._no_upstream()
        with span.child("admit"):
            entry = self._admission.admit(job.ask)
        try:
            async with self._turn(job, entry, span) as place:
                entry.prompt_tokens = job.limits.prompt
                async with self._answer(job.call, job.limits, place) as answer:
                    if not answer.is_error:
                        self._admission.answered(entry)
                    try:
                        yield answer
                    finally:
                        _book(entry, answer)
        except (UpstreamBusy, UpstreamUnavailable):  # a refusal computed nothing
            entry.prompt_tokens = 0
            raise
        finally:
            self._admission.settle(entry)

    @asynccontextmanager
    async def run_uncounted(self, call: UpstreamCall) -> AsyncIterator[UpstreamAnswer]:
        """Forward a call that generates nothing: no admission, no queue, no quota.

        Raises:
            GatewayError: on entering: no upstream answers.
        """
        place = _Place(None, lambda: RouteView(RequestView(0, 0, 0.0), 0, 0.0))
        candidates = self._candidates([], place, again=False)
        if not candidates:
            raise self._no_upstream()
        place.move(self._choose(candidates, place))
        async with self._answer(call, NO_TOKENS, place) as answer:
            yield answer

    @asynccontextmanager
    async def _turn(self, job: ForwardJob, entry: Entry, span: Span) -> AsyncIterator[_Place]:
        """Wait until an upstream has capacity, and hold it while the context lasts.

        Raises:
            UpstreamUnavailable: the last upstream went out.
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
            place.move(routed.worker)
            if pool is not None:
                self._pools.record(job.ask.request_id, routed.worker, pool, routed.route)
            yield place
        finally:
            place.move(None)
            self._queue.pump()

    def _choose_pool(self, job: ForwardJob) -> PoolDecision | None:
        """Decide about speculation; None where there is no choice."""
        if not job.ask.max_tokens:  # an embedding
            return None
        if len(self._queue):  # either pool may be the first with capacity when its turn comes
            return self._pools.choose(job.view, lambda _: False)
        return self._pools.choose(job.view, partial(has_capacity, need=job.need))

    @asynccontextmanager
    async def _answer(
        self, call: UpstreamCall, limits: TokenUsage, place: _Place
    ) -> AsyncIterator[UpstreamAnswer]:
        """Send a call to the upstream of its place, and to others if that one does not answer.

        Raises:
            GatewayError, UpstreamFailed: no upstream answers.
        """
        self._budget.count_request(_now_s())
        tried: list[str] = []
        refusal: UpstreamRefusal | None = None
        failure: UpstreamFailed | None = None
        while (worker := place.worker) is not None:
            tried.append(worker.worker_id)
            async with AsyncExitStack() as stack:
                try:
                    answer = await begin_answer(stack, worker, call, limits)
                    refusal = await read_refusal(worker, answer)
                except UpstreamFailed as error:
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
        """Return the upstream for the next attempt; None if there is none, or no budget."""
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
        """Return the upstreams that have capacity, with their usage.

        Args:
            tried: ids of upstreams that were called already, used only if no other is left.
            again: whether they may be used at all.
        """
        there = [(worker, worker.usage) for worker in self._fleet.open]
        there = [(worker, usage) for worker, usage in there if place.fits(usage)]
        fresh = [pair for pair in there if pair[0].worker_id not in tried]
        called = [pair for pair in there if tried.count(pair[0].worker_id) < MOST_CALLS]
        found = fresh or (called if again else [])
        return [pair for pair in found if pair[0].worker_id not in place.avoid] or found

    def _choose(
        self, candidates: list[tuple[FleetWorker, WorkerUsage]], place: _Place
    ) -> FleetWorker:
        alone = len(self._fleet.workers) == 1
        return self._queue.router.choose(place.view, candidates, alone=alone).worker

    def _no_upstream(self) -> GatewayError:
        """Return why no upstream may be called."""
        retry_after_s = self._retry_after_s()
        pauses = [worker.upstream.pause for worker in self._fleet.workers]
        if any(pause is not None and pause.status == _UNAVAILABLE for pause in pauses):
            return UpstreamUnavailable("no upstream serves now", retry_after_s=retry_after_s)
        return UpstreamBusy("every upstream is overloaded", retry_after_s=retry_after_s)

    def _retry_after_s(self) -> int:
        """Return the whole seconds until an upstream may be called again, 1 or more."""
        pauses = [worker.upstream.pause for worker in self._fleet.workers]
        return max(1, math.ceil(min(pause.remaining_s if pause else 0.0 for pause in pauses)))


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _with_pool(
    answer: UpstreamAnswer, pool: PoolDecision | None, worker: FleetWorker
) -> UpstreamAnswer:
    """Return an answer with the headers that show its client the decision about speculation."""
    if pool is None:
        return answer
    return replace(answer, headers={**answer.headers, **pool.headers(worker)}, plan=pool.plan)


def _book(entry: Entry, answer: UpstreamAnswer) -> None:
    usage = answer.usage()
    entry.prompt_tokens, entry.output_tokens = usage.prompt, usage.output
    if not answer.is_error and not answer.exchange.error_sent:
        entry.ended = sum(need.sequences for need in entry.ask.needs)
