"""The dispatcher, which sizes a job, admits it, and runs each of its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import TracebackType

from draftgate.backends.types import GenerationRequest
from draftgate.gateway.dispatch.admission import AdmissionController, AdmissionRequest, Entry
from draftgate.gateway.dispatch.flows import Flows, Hop
from draftgate.gateway.dispatch.hold import Parts
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.kv_fetch import KvFetcher
from draftgate.gateway.dispatch.kv_replication import Replicator
from draftgate.gateway.dispatch.leases import Leases
from draftgate.gateway.dispatch.moves import Moves
from draftgate.gateway.dispatch.placement import Placer, need_of
from draftgate.gateway.dispatch.prompt import Prompt
from draftgate.gateway.dispatch.prompts import merged
from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.dispatch.recovery import wait_for
from draftgate.gateway.dispatch.rescheduling import Rescheduler
from draftgate.gateway.dispatch.run import UNWATCHED, Run, Watch
from draftgate.gateway.dispatch.sharing import Sharing
from draftgate.gateway.dispatch.span_attributes import admission_attributes, flow_attributes
from draftgate.gateway.dispatch.suspects import Suspects
from draftgate.gateway.dispatch.watchdog import Watchdog
from draftgate.gateway.errors import TooMany
from draftgate.gateway.fleet import Fleet
from draftgate.gateway.lifecycle import Lifecycle
from draftgate.gateway.tracing import NO_SPAN, Span
from draftgate.policies.values import replace


class Counted:
    """A context manager that counts a client request as in flight until the block ends.

    It raises `Unavailable` if the node accepts no requests at present.
    """

    def __init__(self, fleet: Fleet, lifecycle: Lifecycle) -> None:
        self._fleet = fleet
        self._lifecycle = lifecycle

    def __enter__(self) -> None:
        self._lifecycle.note_failure(self._fleet.failure)
        self._lifecycle.require_ready()
        self._lifecycle.in_flight.add()

    def __exit__(self, *_: object) -> None:
        self._lifecycle.in_flight.remove()


class Dispatcher:
    """A dispatcher that runs jobs on the workers of a fleet and counts running requests.

    Attributes:
        fleet: the workers.
        flows: the flows of requests that name one.
        moves: moves running streams to other workers.
    """

    def __init__(  # noqa: PLR0913 - the parts of a dispatcher
        self,
        fleet: Fleet,
        lifecycle: Lifecycle,
        leases: Leases,
        placer: Placer,
        queue: CentralQueue,
        admission: AdmissionController,
        sharing: Sharing,
        flows: Flows,
        *,
        rescheduler: Rescheduler,
        most_resumes: int,
    ) -> None:
        """Serve a fleet, which may start later.

        Args:
            rescheduler: chooses moves of running prompts.
            most_resumes: maximum number of times that a prompt may resume on another worker.
        """
        self.fleet = fleet
        self.queue = queue
        self.admission = admission
        self.leases = leases
        self.sharing = sharing
        self.flows = flows
        kv = KvFetcher(fleet, queue.router.pulls)
        replicator = Replicator(fleet, queue.router, queue.now_s)
        suspects = Suspects(queue.now_s)
        self._parts = Parts(
            *(fleet, queue, admission, placer, leases, Watchdog(), kv, replicator),
            suspects=suspects,
            most_resumes=most_resumes,
        )
        self.moves = Moves(fleet, self._parts, rescheduler)
        self._counted = Counted(fleet, lifecycle)

    def counted(self) -> Counted:
        """Return a context that counts a client request as in flight until its block ends.

        Raises:
            Unavailable: the node accepts no requests at present. The context raises the error.
        """
        return self._counted

    def run(self, job: Job, span: Span = NO_SPAN, watch: Watch = UNWATCHED) -> RunningJob:
        """Return a context in which a job runs.

        Args:
            span: the parent of the spans of its stages.
            watch: an observer of the placements of its prompts.
        """
        return RunningJob(self._parts, self.moves, self.flows, job, span, watch)


class RunningJob:
    """A context that admits a job when it begins, and cancels its remaining work when it ends.

    Raises:
        InvalidRequest, RequestRejected: the job can never run on this node.
        Overloaded, QuotaExceeded: the job is rejected for now. The error has the retry time. The
            deltas of the run raise `QuotaExceeded`, too, before the job is sent to a worker.
        BackendFailed: no worker is left.
    """

    _run: Run

    def __init__(
        self,
        parts: Parts,
        moves: Moves,
        flows: Flows,
        job: Job,
        span: Span,
        watch: Watch,
    ) -> None:
        self._parts = parts
        self._moves = moves
        self._admission = parts.admission
        self._flows = flows
        self._job = job
        self._span = span
        self._watch = watch

    async def __aenter__(self) -> Run:
        job, fleet = self._job, self._parts.fleet
        with self._span.child("admit") as admit:
            if fleet.discovers and not fleet.serving:
                # Other gateways have the same workers, so clients would get no response there.
                await wait_for(fleet, lambda: bool(fleet.serving))
            requests = await self._parts.placer.size(job, admit)
            if job.flow is None:
                hop = None
                entry = await self._admission.admit(_admission_request(job, requests), leases=True)
            else:
                hop = await self._flows.begin(job.tenant, job.flow)
                job, requests, entry = await self._admit_hop(job, requests, hop)
            if admit.recording:
                admit.set(admission_attributes(entry))
        self._run = run = Run(job, requests, entry, self._span, self._watch)
        run.hop = hop
        prompt = partial(Prompt, self._parts, self._moves, run)
        run.deltas = prompt(0) if len(requests) == 1 else merged(run, prompt)
        return run

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._run.deltas.aclose()
        finally:
            await self._admission.settle(self._run.entry)
            await self._end_hop(error)

    async def _admit_hop(
        self, job: Job, requests: tuple[GenerationRequest, ...], hop: Hop | None
    ) -> tuple[Job, tuple[GenerationRequest, ...], Entry]:
        """Admit a job that names a flow, with the targets of its part of the remaining time.

        Args:
            hop: its place in the flow, or None for an ordinary request.
        """
        try:
            wanted = _admission_request(job, requests)
            if hop is not None:
                judged = self._flows.divide(hop, wanted, self._admission)
                job = replace(job, service=hop.service)
                requests = tuple([replace(request, service=hop.service) for request in requests])
                wanted = replace(
                    _admission_request(job, requests), judged=judged, continues=not hop.is_first
                )
            entry = await self._admission.admit(wanted, leases=True)
        except BaseException as error:
            if hop is not None:
                await self._flows.fail(hop, error)
            raise
        finally:
            if self._span.recording and job.flow is not None:
                self._span.set(flow_attributes(job.flow, hop))
        if hop is not None:
            self._flows.admitted(hop)
        return job, requests, entry

    async def _end_hop(self, error: BaseException | None) -> None:
        """Record the end of the job in its flow."""
        hop = self._run.hop
        if hop is None:
            return
        if error is None:
            await self._flows.end(hop, self._run.entry)
        elif isinstance(error, TooMany):
            await self._flows.fail(hop, error)


def _admission_request(job: Job, requests: Sequence[GenerationRequest]) -> AdmissionRequest:
    """Return the properties of a job that admission needs."""
    return AdmissionRequest(
        job.request_id,
        tuple([need_of(request) for request in requests]),
        max([request.sampling.max_tokens for request in requests]),
        job.service,
        job.tenant,
        job.share,
        job.fingerprint,
        job.retries,
    )
