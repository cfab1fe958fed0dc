"""Dispatch: the path of a job from its admission to its last delta.

Size it, admit it (quotas, deadline), let each prompt wait its turn, decide there how far it may
speculate, lease capacity, run, release.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace

from backends.types import Delta, GenerationRequest
from gateway.dispatch.admission import AdmissionController, Ask
from gateway.dispatch.job import Job
from gateway.dispatch.leases import Leases
from gateway.dispatch.placement import Placement, Placer
from gateway.dispatch.prompts import merged
from gateway.dispatch.queue import CentralQueue
from gateway.dispatch.run import Run
from gateway.fleet import Fleet, FleetWorker
from gateway.lifecycle import Lifecycle
from gateway.telemetry.hops import dispatched
from gateway.telemetry.outcomes import (
    admission_attributes,
    describe_decision,
    describe_route,
)
from gateway.telemetry.tracing import NO_SPAN, Span
from policies.room import Need


class Dispatcher:
    """Runs jobs on this node's workers and knows how many are in flight."""

    def __init__(
        self,
        fleet: Fleet,
        lifecycle: Lifecycle,
        leases: Leases,
        placer: Placer,
        queue: CentralQueue,
        admission: AdmissionController,
    ) -> None:
        """Serve a fleet; it need not have started yet."""
        self.queue = queue
        self.admission = admission
        self._fleet = fleet
        self._placer = placer
        self.leases = leases
        self._lifecycle = lifecycle
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Client requests that came and have not ended."""
        return self._in_flight

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a client request as in flight, from its arrival to its last byte.

        Raises:
            Unavailable: the node takes none now.
        """
        self._lifecycle.note_failure(self._fleet.failure)
        self._lifecycle.require_ready()
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def drained(self) -> None:
        """Return once nothing is in flight."""
        await self._idle.wait()

    @asynccontextmanager
    async def run(
        self,
        job: Job,
        span: Span = NO_SPAN,
        on_placed: Callable[[Placement], None] = lambda _placed: None,
    ) -> AsyncIterator[Run]:
        """Admit a job on entering; leaving the context cancels what still runs of it.

        Args:
            span: whose children its stages become.
            on_placed: is told where each prompt goes, once it has had its turn.

        Raises:
            InvalidRequest, RequestRejected: it can never run here.
            Overloaded, QuotaExceeded: not now; the error says when.
            BackendFailed: no worker is left.
        """
        with span.child("admit") as admit:
            requests = await self._placer.size(job)
            entry = self.admission.admit(_ask(job, requests))
            if admit.recording:
                admit.set(admission_attributes(entry))
        try:
            run = Run(job, requests, entry, span, on_placed)
            run.deltas = self._one(run, 0) if len(requests) == 1 else merged(run, self._one)
            async with aclosing(run.deltas):
                yield run
        finally:
            self.admission.settle(entry)

    async def _one(self, run: Run, index: int) -> AsyncGenerator[Delta, None]:
        """Let a prompt have its turn, decide about it, run it, and learn from what comes."""
        entry = run.entry
        waiting = self.admission.waiting(entry, index)
        with run.span.child("queue"):
            worker = await self.queue.turn(waiting)
        try:
            with run.span.child("route") as route:
                describe_route(route, worker, self._fleet.serving)
            entry.prompt_tokens += waiting.need.prompt_tokens
            placed = self._decide(run, index, worker)
            unstarted = True
            with dispatched(run.span) as hops:
                if hops is not None:
                    placed = replace(placed, request=hops.carried(placed.request))
                async with self._leased(placed) as deltas:
                    async for delta in deltas:
                        if unstarted:
                            unstarted = False
                            worker.started(waiting.request_id)
                            self.admission.answered(entry)
                            self.queue.pump()
                        if hops is not None:
                            hops.observe(delta)
                        entry.output_tokens += len(delta.token_ids)
                        if delta.outcome is not None:
                            entry.ended += 1
                            self._placer.learn(placed, delta.outcome)
                        yield delta
        finally:
            worker.release(waiting.request_id)
            self.queue.pump()

    def _decide(self, run: Run, index: int, worker: FleetWorker) -> Placement:
        """Decide how far a prompt may speculate on the worker that has room for it."""
        with run.span.child("decide") as span:
            placed = self._placer.place(run.job, index, run.requests[index], worker)
            describe_decision(span, placed.view, placed.load)
        run.place(index, placed)
        return placed

    @asynccontextmanager
    async def _leased(self, placed: Placement) -> AsyncIterator[AsyncGenerator[Delta, None]]:
        """Run a request under a lease on its worker's capacity."""
        request, worker = placed.request, placed.worker
        try:
            await self.leases.take(worker.worker_id, request.request_id, request.most_tokens)
            async with aclosing(worker.generating.generate(request)) as deltas:
                yield deltas
        finally:
            await self.leases.give_back(request.request_id)


def _ask(job: Job, requests: Sequence[GenerationRequest]) -> Ask:
    """Return a job as admission and queue look at it."""
    tpot_s = job.service.tpot_s
    needs = tuple(
        Need(request.n, len(request.prompt_ids), request.most_tokens, tpot_s)
        for request in requests
    )
    return Ask(
        job.request_id,
        needs,
        max(request.sampling.max_tokens for request in requests),
        job.service,
        job.tenant,
        job.share,
        job.fingerprint,
        job.retries,
    )
