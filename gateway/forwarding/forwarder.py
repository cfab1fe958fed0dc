"""Forwarding: choose an upstream, pass a request on, try another one while nothing was answered."""

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
from draftgate.gateway.accounts import Account
from draftgate.gateway.dispatch.admission import AdmissionController, Ask, Entry
from draftgate.gateway.dispatch.queue import CentralQueue, Waiting
from draftgate.gateway.dispatch.routing import View
from draftgate.gateway.errors import GatewayError, UpstreamBusy, UpstreamUnavailable
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.forwarding.answer import (
    ERRORS,
    NO_TOKENS,
    Forwarded,
    Refusal,
    begin,
    refused,
)
from draftgate.gateway.forwarding.pools import Pooled, Pools
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.metrics import Metrics
from draftgate.gateway.telemetry.tracing import NO_SPAN, Span
from draftgate.policies.capacity import CapacityNeed, WorkerUsage, has_capacity
from draftgate.policies.retry_budget import RetryBudget
from draftgate.policies.routing import RouteView
from draftgate.policies.types import RequestView, ServiceLevel, SpeculationMode

MOST_ATTEMPTS: Final = 3
"""Of one request. More would multiply the load on those that are left when some are out."""

MOST_CALLS: Final = 2
"""Of one request to one upstream: the first may have met a connection that was being closed."""

_UNAVAILABLE: Final = 503


@dataclass(frozen=True, slots=True)
class ForwardJob:
    """A client's request for an upstream, and what is known of it without a tokenizer.

    Attributes:
        ask: what it takes, by an estimate.
        temperature: 1 where it says nothing.
        mode, max_draft_tokens: its wishes about speculation.
    """

    ask: Ask
    call: UpstreamCall
    temperature: float = 1.0
    mode: SpeculationMode = SpeculationMode.AUTO
    max_draft_tokens: int | None = None

    @property
    def most(self) -> TokenUsage:
        """The tokens of its prompt, by an estimate, and the most that its choices may have."""
        prompt = sum(need.prompt_tokens for need in self.ask.needs)
        choices = sum(need.sequences for need in self.ask.needs)
        return TokenUsage(prompt, 0, choices * self.ask.max_tokens)

    @property
    def view(self) -> RequestView:
        """What a policy may know of it."""
        (need,) = self.ask.needs
        return RequestView(
            need.prompt_tokens,
            self.ask.max_tokens,
            self.temperature,
            self.mode,
            self.max_draft_tokens,
            self.ask.service,
        )


def forward_ask(
    request_id: str,
    prompt_tokens: int,
    max_tokens: int,
    n: int,
    service: ServiceLevel,
    account: Account,
) -> Ask:
    """Return what a request takes; `max_tokens` is per choice."""
    capped = account.capped(service)
    need = CapacityNeed(n, prompt_tokens, (prompt_tokens + max_tokens) * n, capped.tpot_s)
    return Ask(request_id, (need,), max_tokens, capped, account.name, account.share)


def _route_view(job: ForwardJob, expected_tokens: float) -> RouteView:
    """Return what a routing policy may know of a request that nobody has tokenised."""
    (need,) = job.ask.needs
    return RouteView(job.view, need.most_tokens, expected_tokens, need.sequences, job.ask.tenant)


def _nothing_to_run() -> RouteView:
    """Return what takes none of a worker's time."""
    return RouteView(RequestView(0, 0, 0.0), 0, 0.0)


class _Seat:
    """Where a request has its place: with one upstream at a time.

    Attributes:
        view: of the request, for whoever chooses its upstream.
        pooled: what was decided about speculation; None where there was nothing to decide.
    """

    def __init__(
        self,
        waiting: Waiting | None = None,
        view: View = _nothing_to_run,
        pooled: Pooled | None = None,
    ) -> None:
        """Begin nowhere; without `waiting` nothing is reserved."""
        self.worker: FleetWorker | None = None
        self.view = view
        self.pooled = pooled
        self._waiting = waiting

    @property
    def avoid(self) -> frozenset[str]:
        """Ids of upstreams that it goes to only if no other is there."""
        return frozenset() if self._waiting is None else self._waiting.avoid

    def fits(self, at: WorkerUsage) -> bool:
        """Return whether an upstream has room."""
        return self._waiting is None or has_capacity(at, self._waiting.need)

    def move(self, worker: FleetWorker) -> FleetWorker:
        """Reserve the place with another upstream, and return that."""
        self.leave()
        if self._waiting is not None:
            worker.reserve(self._waiting.request_id, self._waiting.need)
        self.worker = worker
        return worker

    def leave(self) -> None:
        """Give the place up. Idempotent."""
        if self.worker is not None and self._waiting is not None:
            self.worker.release(self._waiting.request_id)


class Forwarder:
    """Runs jobs on the upstreams of a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        queue: CentralQueue,
        admission: AdmissionController,
        pools: Pools,
        budget: RetryBudget,
        metrics: Metrics,
    ) -> None:
        """Use a fleet of upstreams; it need not have started yet.

        Args:
            pools: decides about speculation.
            budget: of all requests that are sent once more.
        """
        self._fleet = fleet
        self._queue = queue
        self._admission = admission
        self._pools = pools
        self._budget = budget
        self._metrics = metrics

    @asynccontextmanager
    async def run(self, job: ForwardJob, span: Span = NO_SPAN) -> AsyncIterator[Forwarded]:
        """Admit a job, let it wait its turn, pass it on; leaving the context early cancels it.

        Its prompt is booked once it is sent, whatever becomes of it, unless the upstream refuses
        it or counts otherwise.

        Raises:
            Overloaded, QuotaExceeded: not now; the error says when.
            GatewayError: on entering: no upstream answers it. Nothing was sent to the client yet.
        """
        if not self._fleet.open:
            raise self._nobody()
        with span.child("admit"):
            entry = self._admission.admit(job.ask)
        try:
            async with self._turn(job, entry, span) as seat:
                entry.prompt_tokens = job.most.prompt
                async with self._passed(job.call, job.most, seat) as answer:
                    if answer.status < ERRORS:
                        self._admission.answered(entry)
                    try:
                        yield answer
                    finally:
                        _book(entry, answer)
        except (UpstreamBusy, UpstreamUnavailable):  # who refuses has computed nothing
            entry.prompt_tokens = 0
            raise
        finally:
            self._admission.settle(entry)

    @asynccontextmanager
    async def straight(self, call: UpstreamCall) -> AsyncIterator[Forwarded]:
        """Pass on what takes none of an upstream's seats: no admission, no queue, no quota.

        Raises:
            GatewayError: on entering: no upstream answers it.
        """
        seat = _Seat()
        candidates = self._candidates([], seat, again=False)
        if not candidates:
            raise self._nobody()
        seat.move(self._choose(candidates, seat))
        async with self._passed(call, NO_TOKENS, seat) as answer:
            yield answer

    @asynccontextmanager
    async def _turn(self, job: ForwardJob, entry: Entry, span: Span) -> AsyncIterator[_Seat]:
        """Wait until an upstream has room; the place is given up when the context is left.

        Raises:
            UpstreamUnavailable: the last upstream went out.
        """
        waiting = self._admission.waiting(entry, 0)
        view = partial(_route_view, job, entry.expected_tokens)
        pooled = self._pooled(job, waiting.need)
        if pooled is not None:
            waiting = replace(waiting, avoid=pooled.avoid)
        seat = _Seat(waiting, view, pooled)
        with span.child("queue"):
            try:
                routed = await self._queue.turn(waiting, view)
            except BackendFailed as error:
                raise self._nobody() from error
        try:
            seat.move(routed.worker)
            if pooled is not None:
                self._pools.record(job.ask.request_id, routed.worker, pooled, routed.route)
            yield seat
        finally:
            seat.leave()
            self._queue.pump()

    def _pooled(self, job: ForwardJob, need: CapacityNeed) -> Pooled | None:
        """Return what is decided about speculation; None if there is nothing to decide."""
        if not job.ask.max_tokens:  # it is to be embedded
            return None
        if len(self._queue):  # by its turn room may be anywhere, and others wait behind it
            return self._pools.choose(job.view, _nowhere)
        return self._pools.choose(job.view, partial(has_capacity, need=need))

    @asynccontextmanager
    async def _passed(
        self, call: UpstreamCall, most: TokenUsage, seat: _Seat
    ) -> AsyncIterator[Forwarded]:
        """Pass a call on to an upstream, and to others if that one does not answer it.

        Args:
            most: what is believed where the answer does not say.
            seat: has its place with the first of them, and moves along.

        Raises:
            GatewayError: no one answers it.
        """
        self._budget.requested(_now_s())
        tried: list[str] = []
        refusal: Refusal | None = None
        failure: UpstreamFailed | None = None
        worker = seat.worker
        while worker is not None:
            tried.append(worker.worker_id)
            async with AsyncExitStack() as stack:
                try:
                    answer = await begin(stack, worker, call, most)
                    refusal = await refused(worker, answer)
                except UpstreamFailed as error:
                    failure, refusal = error, None
                else:
                    if refusal is None:
                        yield answer.chosen(seat.pooled, worker)
                        return
            seat.leave()
            worker = self._next(tried, seat, refused=refusal is not None)
            if worker is not None:
                seat.move(worker)
        yield self._last_word(refusal, failure)

    def _next(self, tried: list[str], seat: _Seat, *, refused: bool) -> FleetWorker | None:
        """Return the upstream that is asked next, within the budget; None if none may be."""
        if len(tried) >= MOST_ATTEMPTS:
            return None
        candidates = self._candidates(tried, seat, again=not refused)
        if not candidates:
            return None
        allowed = self._budget.take(_now_s())
        cause = "refused" if refused else "failed"
        self._metrics.add(metric.RETRIES, 1, cause, "allowed" if allowed else "denied")
        return self._choose(candidates, seat) if allowed else None

    def _candidates(
        self, tried: list[str], seat: _Seat, *, again: bool
    ) -> list[tuple[FleetWorker, WorkerUsage]]:
        """Return the upstreams that may be asked, with what they have on their hands.

        Args:
            tried: ids of those that were asked already: they come last.
            seat: there must be room for it.
            again: whether one of these may be asked again.
        """
        there = [(worker, worker.usage) for worker in self._fleet.open]
        there = [(worker, at) for worker, at in there if seat.fits(at)]
        fresh = [pair for pair in there if pair[0].worker_id not in tried]
        asked = [pair for pair in there if tried.count(pair[0].worker_id) < MOST_CALLS]
        found = fresh or (asked if again else [])
        return [pair for pair in found if pair[0].worker_id not in seat.avoid] or found

    def _choose(
        self, candidates: list[tuple[FleetWorker, WorkerUsage]], seat: _Seat
    ) -> FleetWorker:
        """Return the upstream that the routing policy takes of these."""
        alone = len(self._fleet.workers) == 1
        return self._queue.router.choose(seat.view, candidates, alone=alone).worker

    def _last_word(self, refusal: Refusal | None, failure: UpstreamFailed | None) -> Forwarded:
        """Return the last refusal if it says how to go on.

        Raises:
            GatewayError, UpstreamFailed: otherwise, the reason why nobody answered.
        """
        if refusal is not None:
            return refusal.told(self._retry_after_s())
        raise failure or self._nobody()

    def _nobody(self) -> GatewayError:
        """Return why no upstream may be asked."""
        retry_after_s = self._retry_after_s()
        rests = [worker.upstream.rest for worker in self._fleet.workers]
        if any(rest is not None and rest.status == _UNAVAILABLE for rest in rests):
            return UpstreamUnavailable("no upstream serves now", retry_after_s=retry_after_s)
        return UpstreamBusy("every upstream has too much to do", retry_after_s=retry_after_s)

    def _retry_after_s(self) -> int:
        """Return the whole seconds until an upstream may be called again, 1 or more."""
        rests = [worker.upstream.rest for worker in self._fleet.workers]
        return max(1, math.ceil(min(rest.remaining_s if rest else 0.0 for rest in rests)))


def _nowhere(_at: WorkerUsage) -> bool:
    return False


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _book(entry: Entry, answer: Forwarded) -> None:
    """Book what an answer took."""
    usage = answer.usage()
    entry.prompt_tokens, entry.output_tokens = usage.prompt, usage.output
    if answer.status < ERRORS and not answer.exchange.error_sent:
        entry.ended = sum(need.sequences for need in entry.ask.needs)
