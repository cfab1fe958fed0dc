"""The dispatcher, which sizes a job, admits it, and runs each of its prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager

from draftgate.backends.types import GenerationRequest
from draftgate.gateway.dispatch.admission import AdmissionController, AdmissionRequest
from draftgate.gateway.dispatch.attempt import Attempts
from draftgate.gateway.dispatch.failover import Failover
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.kv_fetch import KvFetcher
from draftgate.gateway.dispatch.leases import Leases
from draftgate.gateway.dispatch.placement import Placer, need_of
from draftgate.gateway.dispatch.prompts import merged
from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.dispatch.run import UNWATCHED, Run, Watch
from draftgate.gateway.dispatch.watchdog import Watchdog
from draftgate.gateway.fleet import Fleet
from draftgate.gateway.lifecycle import Lifecycle
from draftgate.gateway.telemetry.span_attributes import admission_attributes
from draftgate.gateway.telemetry.tracing import NO_SPAN, Span


class Dispatcher:
    """A dispatcher that runs jobs on the workers of a fleet and counts running requests."""

    def __init__(
        self,
        fleet: Fleet,
        lifecycle: Lifecycle,
        leases: Leases,
        placer: Placer,
        queue: CentralQueue,
        admission: AdmissionController,
        most_resumes: int,
    ) -> None:
        """Serve a fleet, which may start later.

        Args:
            most_resumes: maximum number of times that a prompt may resume on another worker.
        """
        self.queue = queue
        self.admission = admission
        self.leases = leases
        self._fleet = fleet
        self._placer = placer
        kv = KvFetcher(fleet, queue.now_s)
        attempts = Attempts(queue, admission, placer, leases, Watchdog(), kv)
        self._failover = Failover(fleet, queue, admission, attempts, most_resumes)
        self._lifecycle = lifecycle
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Number of client requests that have arrived and not ended."""
        return self._in_flight

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a client request as in flight until the block ends.

        Raises:
            Unavailable: the node accepts no requests at present.
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
        """Wait until no request is in flight."""
        await self._idle.wait()

    @asynccontextmanager
    async def run(
        self, job: Job, span: Span = NO_SPAN, watch: Watch = UNWATCHED
    ) -> AsyncIterator[Run]:
        """Admit a job when the block begins, and cancel its remaining work when the block ends.

        Args:
            span: the parent of the spans of its stages.
            watch: an observer of the placements of its prompts.

        Raises:
            InvalidRequest, RequestRejected: the job can never run on this node.
            Overloaded, QuotaExceeded: the job is rejected for now. The error has the retry time.
            BackendFailed: no worker is left.
        """
        with span.child("admit") as admit:
            requests = await self._placer.size(job)
            entry = await self.admission.admit(_admission_request(job, requests))
            if admit.recording:
                admit.set(admission_attributes(entry))
        try:
            run, prompt = Run(job, requests, entry, span, watch), self._failover.deltas
            run.deltas = prompt(run, 0) if len(requests) == 1 else merged(run, prompt)
            async with aclosing(run.deltas):
                yield run
        finally:
            await self.admission.settle(entry)


def _admission_request(job: Job, requests: Sequence[GenerationRequest]) -> AdmissionRequest:
    """Return the properties of a job that admission needs."""
    return AdmissionRequest(
        job.request_id,
        tuple(map(need_of, requests)),
        max(request.sampling.max_tokens for request in requests),
        job.service,
        job.tenant,
        job.share,
        job.fingerprint,
        job.retries,
    )
