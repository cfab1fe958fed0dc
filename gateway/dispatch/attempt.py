"""An attempt to run one prompt on one worker, with a lease, a plan and a watchdog."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import NamedTuple

from draftgate.backends.types import Delta, GenerationRequest, Pace
from draftgate.gateway.dispatch.admission import AdmissionController
from draftgate.gateway.dispatch.kv_fetch import KvFetcher
from draftgate.gateway.dispatch.leases import Leases, NoCapacity, lease_tokens
from draftgate.gateway.dispatch.placement import Placement, Placer, need_of
from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.dispatch.routing import Routed
from draftgate.gateway.dispatch.run import Run
from draftgate.gateway.dispatch.watchdog import Reading, Watchdog
from draftgate.gateway.state.store import Reservation
from draftgate.gateway.telemetry.span_attributes import (
    describe_decision,
    describe_reservation,
    record_route,
)
from draftgate.gateway.telemetry.worker_spans import WorkerSpans, dispatch_span
from draftgate.policies.routing.types import RouteView


class _Reserved(NamedTuple):
    """A prompt's worker after the reservation."""

    routed: Routed
    reservation: Reservation


class Attempt:
    """A prompt that runs on a worker.

    The reader of `deltas` calls `waits` before each delta and `observe` after it.

    Attributes:
        placed: the worker and the speculation plan.
        deltas: the output of the worker.
        waits: informs the watchdog that the reader waits for the next delta.
    """

    def __init__(
        self,
        run: Run,
        placed: Placement,
        deltas: AsyncGenerator[Delta, None],
        reading: Reading,
        spans: WorkerSpans | None,
        placer: Placer,
        on_first: Callable[[], None],
    ) -> None:
        self.placed = placed
        self.deltas = deltas
        self.waits = reading.waits
        self._reading = reading
        self._spans = spans
        self._entry = run.entry
        self._placer = placer
        self._on_first: Callable[[], None] | None = on_first

    def observe(self, delta: Delta) -> None:
        """Pass a delta to watchdog, queue, trace, account and acceptance history."""
        reading = self._reading
        reading.reader = None
        reading.deltas += 1
        if delta.phases is not None:
            reading.decodes = True
        if self._on_first is not None:
            self._on_first()
            self._on_first = None
        if self._spans is not None:
            self._spans.observe(delta)
        entry = self._entry
        entry.output_tokens += len(delta.token_ids)
        if delta.outcome is not None:
            entry.ended += 1
            self._placer.record_outcome(self.placed, delta.outcome)


class Attempts:
    """The attempts to run prompts on the workers of a fleet."""

    def __init__(
        self,
        queue: CentralQueue,
        admission: AdmissionController,
        placer: Placer,
        leases: Leases,
        watchdog: Watchdog,
        kv: KvFetcher,
    ) -> None:
        self._queue = queue
        self._admission = admission
        self._placer = placer
        self._leases = leases
        self._watchdog = watchdog
        self._kv = kv

    @asynccontextmanager
    async def start(
        self, routed: Routed, run: Run, index: int, request: GenerationRequest
    ) -> AsyncIterator[Attempt]:
        """Run a prompt on the worker that was reserved for it (`CentralQueue.turn`).

        The end of the block cancels the request and releases its capacity.

        Args:
            request: the request for the prompt, or for the rest of the prompt.

        Raises:
            NoCapacity: other gateways have filled the workers. The request was not sent.
            BackendFailed: the worker failed or stalled.
        """
        async with self._reserved(routed, run, index, request) as reserved:
            worker = reserved.routed.worker

            def first() -> None:
                worker.started(request.request_id)
                self._admission.answered(run.entry)
                self._queue.pump()

            placed = self._decide(reserved, run, index, request)
            if request.resumed:
                await self._kv.fetch(run, placed)
            with self._watchdog.watching(worker, run) as reading:
                async with self._sent(run, placed, reserved.reservation) as (deltas, spans):
                    if run.pace is not Pace.FULL:
                        worker.generating.set_pace(request.request_id, run.pace)
                    reading.waits()
                    yield Attempt(run, placed, deltas, reading, spans, self._placer, first)

    def route_view(self, run: Run, index: int, request: GenerationRequest) -> RouteView:
        """Return the routing policy's view of a prompt, or of the rest of a prompt."""
        return self._placer.route_view(run.job, index, request, run.entry.expected_tokens)

    @asynccontextmanager
    async def _reserved(
        self, routed: Routed, run: Run, index: int, request: GenerationRequest
    ) -> AsyncIterator[_Reserved]:
        """Hold a lease on a worker until the block ends.

        The reservation may choose another worker than the router did, if other gateways have leased
        the first choice in the meantime.

        Raises:
            NoCapacity: other gateways have filled the workers.
        """
        worker, request_id, waits = routed.worker, request.request_id, False
        try:
            record_route(run.span, routed)
            with run.span.child("reserve") as span:
                tokens = lease_tokens(request, run.entry.expected_tokens)
                found = await self._leases.reserve(request_id, tokens, routed)
                await self._queue.claims.end(request_id, leased=found.lease is not None)
                describe_reservation(span, found)
            chosen = found.lease and found.lease.worker_id
            if chosen not in {None, worker.worker_id}:
                worker.release(request_id)
                worker = next(one for one in routed.choices if one.worker_id == chosen)
                worker.reserve(request_id, need_of(request))
                view = partial(self.route_view, run, index, request)
                self._queue.router.moved(view, worker)
            yield _Reserved(routed._replace(worker=worker), found)
        except NoCapacity:
            waits = True
            raise
        finally:
            worker.release(request_id)
            if not (waits and request_id in self._queue.claims):  # a claim outlives the refusal
                await self._queue.claims.end(request_id, leased=True)
                await self._leases.release(request_id)
            self._queue.pump()

    def _decide(
        self, reserved: _Reserved, run: Run, index: int, request: GenerationRequest
    ) -> Placement:
        """Decide how far a prompt may speculate on its worker, and record the placement."""
        with run.span.child("decide") as span:
            placed = self._placer.place(
                run.job, index, request, reserved.routed, reserved.reservation
            )
            describe_decision(span, placed.view, placed.load)
        run.place(index, placed)
        return placed

    @asynccontextmanager
    async def _sent(
        self, run: Run, placed: Placement, reservation: Reservation
    ) -> AsyncIterator[tuple[AsyncGenerator[Delta, None], WorkerSpans | None]]:
        """Run a request on its worker until the block ends."""
        request, lease = placed.request, reservation.lease
        with dispatch_span(run.span, placed.worker.server) as spans:
            if spans is not None:
                request = spans.carried(request)
            number = 0 if lease is None else lease.number
            async with aclosing(placed.worker.run(request, number)) as deltas:
                yield deltas, spans
