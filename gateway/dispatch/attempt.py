"""An attempt to run one prompt on one worker, with a lease, a plan and a watchdog."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from types import TracebackType
from typing import NamedTuple

from draftgate.backends.errors import StreamMoved
from draftgate.backends.streams import Take, pass_directly
from draftgate.backends.types import Delta, GenerationRequest, Pace
from draftgate.gateway.dispatch.admission import AdmissionController
from draftgate.gateway.dispatch.kv_fetch import KvFetcher
from draftgate.gateway.dispatch.kv_replication import PrefixUse, Replicator
from draftgate.gateway.dispatch.leases import Leases, NoCapacity, lease_tokens
from draftgate.gateway.dispatch.partial_output import PartialOutput
from draftgate.gateway.dispatch.placement import Placement, Placer, need_of
from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.dispatch.routing import Routed, decode_id
from draftgate.gateway.dispatch.run import Run
from draftgate.gateway.dispatch.span_attributes import (
    describe_decision,
    describe_reservation,
    record_route,
)
from draftgate.gateway.dispatch.watchdog import Reading, Watchdog
from draftgate.gateway.dispatch.worker_spans import WorkerSpans, open_dispatch
from draftgate.gateway.state.store import Reservation
from draftgate.gateway.tracing import NO_SPAN, Attributes, Span
from draftgate.policies.routing.types import RouteView
from draftgate.policies.values import replace


class Parts(NamedTuple):
    """The parts of a dispatcher that all attempts use."""

    queue: CentralQueue
    admission: AdmissionController
    placer: Placer
    leases: Leases
    watchdog: Watchdog
    kv: KvFetcher
    replicator: Replicator

    def route_view(self, run: Run, index: int, request: GenerationRequest) -> RouteView:
        """Return the routing policy's view of a prompt, or of the rest of a prompt."""
        return self.placer.route_view(run.job, index, request, run.entry.expected_tokens)


class Attempt:
    """A context in which a prompt runs on the worker that was reserved for it.

    The context yields the deltas of the worker, except those that `Run.take` takes. The reader of
    the deltas sets `reading.waiting` before each delta and calls `observe` after it. The end of the
    context cancels the request and releases its capacity.

    Attributes:
        placed: the worker and the speculation plan.
        reading: the state of reading the deltas, for the watchdog.
        on_delta: a callback after each observed delta, or None.

    Raises:
        NoCapacity: other gateways have filled the workers. The request was not sent.
        InvalidRequest, QuotaExceeded: the request does not fit into its quota.
        BackendFailed: the worker failed or stalled.
        StreamMoved: the prompt moves to another worker.
    """

    placed: Placement
    reading: Reading
    on_delta: Callable[[Delta], None] | None = None

    def __init__(
        self,
        parts: Parts,
        run: Run,
        index: int,
        request: GenerationRequest,
        routed: Routed,
        output: PartialOutput,
    ) -> None:
        """Create an attempt.

        Args:
            request: the request for the prompt, or for the rest of the prompt.
            routed: the reserved worker (`CentralQueue.turn`).
            output: the output of the prompt, to which `observe` adds.
        """
        self._parts = parts
        self._run = run
        self._index = index
        self._request = request
        self._routed = routed
        self._worker = routed.worker
        self._output = output
        self._entry = run.entry
        self._reservation: Reservation | None = None  # once prepared
        self._deltas: AsyncGenerator[Delta, None] | None = None  # once sent
        self._joined: AsyncGenerator[Delta, None] | None = None  # if sent before the context
        self._span: Span = NO_SPAN
        self._spans: WorkerSpans | None = None  # if recorded
        self._begun = False
        self._prefix: PrefixUse | None = None  # of a sent request, if workers had it cached

    async def __aenter__(self) -> AsyncGenerator[Delta, None]:
        try:
            if self._joined is not None:
                self._take_over()
                return self._joined
            if self._reservation is None:
                await self._prepare()
                if self._request.resumed:
                    await self._parts.kv.fetch_resumed(self._run, self.placed)
                elif self._routed.cached_blocks:
                    cached_blocks = self._routed.cached_blocks
                    await self._parts.kv.fetch_new(self._run, self.placed, cached_blocks)
            self._run.place(self._index, self.placed)
            deltas = self._send()
            if self._run.take is not None and len(self._run.requests) == 1:
                pass_directly(deltas, partial(self._take, self._run.take))
            return deltas
        except BaseException as error:
            await self._end(error)
            raise

    async def prepare(self) -> None:
        """Lease the worker and decide about speculation, before the context is entered.

        The caller fetches KV blocks itself. It must later enter the context or call `abandon`.
        """
        try:
            await self._prepare()
        except BaseException as error:
            await self._end(error)
            raise
        self._worker.await_blocks(self._request.request_id)

    @property
    def routed(self) -> Routed:
        """The reserved workers."""
        return self._routed

    def take_decode(self) -> tuple[str, Routed | None]:
        """Return the reserved worker that continues the request, and the id of the rest.

        The caller must release the capacity of the worker. Later calls return None as the worker.
        """
        decode, self._routed = self._routed.decode, self._routed._replace(decode=None)
        return decode_id(self._request.request_id), decode

    async def abandon(self) -> None:
        """Release a prepared attempt whose context is not entered."""
        await self._end(None)

    @property
    def rest(self) -> GenerationRequest:
        """The request for the rest of the present output."""
        return self._output.rest(self._request.request_id)

    def extend(self) -> None:
        """Continue a prepared attempt from the present output, unless it has begun already."""
        if self._deltas is None:
            self._replace_request(self.rest)

    def begin(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Send a request for the rest of an earlier output, while the prompt runs on its source.

        The current task reads the deltas, until the context is entered with `continue_with`.

        Args:
            request: an earlier value of `rest`, which may contain the tokens after that output.
        """
        self._replace_request(request)
        return self._send()

    def _replace_request(self, request: GenerationRequest) -> None:
        self._request = request
        planned = request.planned(self.placed.request.speculation)
        self.placed = replace(self.placed, request=planned)

    def continue_with(self, deltas: AsyncGenerator[Delta, None]) -> None:
        """Set the deltas of the context, if the request has begun before the context."""
        self._joined = deltas

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        interruption = None
        if isinstance(error, asyncio.CancelledError):
            interruption = self.reading.interruption()
        moved = isinstance(interruption or error, StreamMoved)
        await self._end(None if moved else error)
        if interruption is not None:
            raise interruption from None

    def set_pace(self, pace: Pace, tpot_s: float = 0.0) -> None:
        """Set the pace of the request on its worker, which the job's own pace replaces."""
        self._worker.generating.set_pace(self._request.request_id, pace, tpot_s)

    def observe(self, delta: Delta) -> None:
        """Pass a delta to output, watchdog, queue, trace and acceptance history."""
        self._output.add(delta)
        self.reading.waiting = False
        self.reading.deltas += 1
        if delta.phases is not None:
            self.reading.decodes = True
        if not self._begun:
            self._begin()
        if self._spans is not None:
            self._spans.observe(delta)
        if delta.outcome is not None:
            self._entry.ended += 1
            self._parts.placer.record_outcome(self.placed, delta.outcome)
        if self.on_delta is not None:
            self.on_delta(delta)

    def _take(self, take: Take, delta: Delta) -> bool:
        """Pass a delta of tokens and text on, unless it has further consequences."""
        reading = self.reading
        # The first delta, and deltas during a move, have further consequences.
        if not (self._begun and reading.waiting and self.on_delta is None and take(delta)):
            return False
        self._output.add(delta)
        reading.deltas += 1
        return True

    async def _prepare(self) -> None:
        self._reservation = await self._reserve()
        self.placed = self._place(self._reservation)

    def _begin(self) -> None:
        """Report the first delta to worker, admission and queue."""
        self._begun = True
        self._worker.started(self._request.request_id)
        self._parts.admission.answered(self._entry)
        self._parts.queue.dispatch_waiting(self._worker)

    async def _reserve(self) -> Reservation:
        """Lease capacity of a worker, and reserve the quota of the request if that is still due.

        The reservation may choose another worker than the router did, if other gateways have leased
        the first choice in the meantime.

        Raises:
            NoCapacity: other gateways have filled the workers.
            InvalidRequest, QuotaExceeded: the request does not fit into its quota.
        """
        parts, entry = self._parts, self._entry
        request_id, claims = self._request.request_id, self._parts.queue.claims
        record_route(self._run.span, self._routed)
        with self._run.span.child("reserve") as span:
            tokens = lease_tokens(self._request, entry.expected_tokens)
            # A refusal says nothing about claimed workers and about quotas.
            is_new = entry.quota is None and request_id not in claims
            reserve = parts.leases.reserve_new if is_new else parts.leases.reserve
            found = await reserve(request_id, tokens, self._routed, entry.quota)
            parts.admission.record_quota(entry, found.shortage)
            if parts.leases.must_wait(found):
                raise NoCapacity
            if request_id in claims:
                await claims.end(request_id, leased=found.lease is not None)
            describe_reservation(span, found)
        if found.lease is not None and found.lease.worker_id != self._worker.worker_id:
            self._move_to(found.lease.worker_id)
        return found

    def _move_to(self, worker_id: str) -> None:
        """Reserve another worker that the router offered."""
        request = self._request
        self._worker.release(request.request_id)
        self._worker = next(one for one in self._routed.choices if one.worker_id == worker_id)
        self._worker.reserve(request.request_id, need_of(request))
        self._routed = self._routed._replace(worker=self._worker)
        view = partial(self._parts.route_view, self._run, self._index, request)
        self._parts.queue.router.moved(view, self._worker)

    def _place(self, reservation: Reservation) -> Placement:
        """Decide how far the prompt may speculate on its worker."""
        run = self._run
        with run.span.child("decide") as span:
            placed = self._parts.placer.place(
                run.job, self._index, self._request, self._routed, reservation
            )
            describe_decision(span, placed.view, placed.load)
        return placed

    def _send(self) -> AsyncGenerator[Delta, None]:
        """Send the request to its worker, and return its deltas."""
        run, worker, request = self._run, self._worker, self.placed.request
        placed: Attributes = {
            "draftgate.prompt": self._index,
            "draftgate.prompt_tokens": len(request.prompt_ids),
        }
        self._span = open_dispatch(run.span, worker.worker_id, worker.server, placed)
        if self._span.recording:
            self._spans = WorkerSpans(self._span)
            request = self._spans.carried(request)
        if self._routed.cached_blocks:
            cached_blocks = self._routed.cached_blocks
            self._prefix = self._parts.replicator.begin(run, self.placed, cached_blocks)
        lease = None if self._reservation is None else self._reservation.lease
        self._deltas = deltas = worker.run(request, 0 if lease is None else lease.number)
        if run.pace is not Pace.FULL:
            worker.generating.set_pace(request.request_id, run.pace, run.tpot_s)
        self.reading = self._parts.watchdog.watch(worker, run)
        return deltas

    def _take_over(self) -> None:
        """Let the current task read a request that has begun before the context."""
        run, worker = self._run, self._worker
        self._parts.watchdog.unwatch(self.reading)
        self.reading = self._parts.watchdog.watch(worker, run)
        run.place(self._index, self.placed)
        if run.pace is not Pace.FULL:
            self.set_pace(run.pace, run.tpot_s)

    async def _end(self, error: BaseException | None) -> None:
        """End the stream, the spans and the lease, and dispatch the next request."""
        try:
            if self._joined is not None:
                await self._joined.aclose()
            if self._deltas is not None:
                self._parts.watchdog.unwatch(self.reading)
                await self._deltas.aclose()
        finally:
            if self._begun and not self._output.is_complete:
                # The worker reports no outcome of a choice that is cancelled, lost or moved.
                self._parts.placer.record_unfinished(self.placed, self._output.unfinished)
            if self._spans is not None:
                self._spans.end()
            if error is not None:
                self._span.fail(error)
            self._span.end()
            await self._release(error)

    async def _release(self, error: BaseException | None) -> None:
        """Release the capacity of the worker, and dispatch the next request."""
        request_id, claims = self._request.request_id, self._parts.queue.claims
        self._worker.release(request_id)
        rest_id, decode = self.take_decode()
        if decode is not None:
            decode.worker.release(rest_id)
        if self._prefix is not None:
            self._parts.replicator.end(self._prefix)
        if not isinstance(error, NoCapacity):  # a refused request has no lease, and keeps its claim
            if request_id in claims:
                await claims.end(request_id, leased=True)
            await self._parts.leases.release(request_id)
        self._parts.queue.dispatch_waiting(self._worker if decode is None else None)
