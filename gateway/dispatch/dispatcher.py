"""The dispatcher, which sizes a job, admits it, and runs each of its prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from draftgate.backends.streams import UnreadDeltas
from draftgate.backends.types import Delta, GenerationRequest, Pace
from draftgate.gateway.dispatch.admission import AdmissionController
from draftgate.gateway.dispatch.flows import Flows, Hop
from draftgate.gateway.dispatch.hold import Hold, Parts
from draftgate.gateway.dispatch.job import FlowTag, Job
from draftgate.gateway.dispatch.kv_fetch import KvFetcher
from draftgate.gateway.dispatch.kv_replication import Replicator
from draftgate.gateway.dispatch.leases import Leases
from draftgate.gateway.dispatch.moves import Moves
from draftgate.gateway.dispatch.placement import Placer, need_of
from draftgate.gateway.dispatch.prompt import Prompt
from draftgate.gateway.dispatch.prompts import PROMPTS_AT_ONCE, Prompts
from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.dispatch.recovery import wait_for
from draftgate.gateway.dispatch.rescheduling import Rescheduler
from draftgate.gateway.dispatch.run import Run, Watch, ignore
from draftgate.gateway.dispatch.sharing import Sharing
from draftgate.gateway.dispatch.span_attributes import admission_attributes, flow_attributes
from draftgate.gateway.dispatch.suspects import Suspects
from draftgate.gateway.dispatch.watchdog import Watchdog
from draftgate.gateway.errors import TooMany
from draftgate.gateway.fleet import Fleet
from draftgate.gateway.lifecycle import Lifecycle, NodeState
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
        lifecycle, failure = self._lifecycle, self._fleet.failure
        if failure is not None:
            lifecycle.note_failure(failure)
        if lifecycle.state is not NodeState.READY:
            lifecycle.require_ready()
        lifecycle.in_flight.add()

    def __exit__(self, *_: object) -> None:
        self._lifecycle.in_flight.remove()


class Dispatcher:
    """A dispatcher that runs jobs on the workers of a fleet and counts running requests.

    Attributes:
        fleet: the workers.
        flows: the flows of requests that name one.
        moves: moves running streams to other workers.
        watchdog: watches the streams of all workers.
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
        self.watchdog = Watchdog()
        self._parts = Parts(
            fleet,
            queue,
            admission,
            placer,
            leases,
            self.watchdog,
            kv,
            replicator,
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

    def run(self, job: Job, span: Span = NO_SPAN, watch: Watch = ignore) -> RunningJob:
        """Return a context in which a job runs.

        Args:
            span: the parent of the spans of its stages.
            watch: takes the events of its prompts.
        """
        return RunningJob(self._parts, self.moves, self.flows, job, span, watch)


class RunningJob(Run):
    """A run and its context, which admits the job and finally cancels its remaining work.

    Attributes:
        holds: the latest hold of each prompt whose request was sent, by its index.
        path_reason: why its pace or its chunks follow the path to the client, or empty.
        unread: the deltas that the sink keeps for a slow client.

    Raises:
        InvalidRequest, RequestRejected: the job can never run on this node.
        Overloaded, QuotaExceeded: the job is rejected for now. The error has the retry time. The
            deltas of the run raise `QuotaExceeded`, too, before the job is sent to a worker.
        BackendFailed: no worker is left.
    """

    path_reason = ""
    unread: UnreadDeltas | None = None
    _running: Prompt | Prompts
    _reader: AsyncGenerator[Delta, None] | None = None

    def __init__(
        self, parts: Parts, moves: Moves, flows: Flows, job: Job, span: Span, watch: Watch
    ) -> None:
        super().__init__(job, span, watch)
        self.holds: dict[int, Hold] = {}
        self._parts = parts
        self._moves = moves
        self._flows = flows

    async def __aenter__(self) -> Self:
        job, parts = self.job, self._parts
        with self.span.child("admit") if self.span.recording else NO_SPAN as admit:
            fleet = parts.fleet
            if fleet.discovers and not fleet.serving:
                # Other gateways have the same workers, so clients would get no response there.
                await wait_for(fleet, lambda: bool(fleet.serving))
            requests = parts.placer.size(job)
            if requests is None:
                requests = await parts.placer.size_in_thread(job, admit)
            self._use(requests)
            if job.flow is not None:
                await self._admit_hop(job, job.flow)
            elif not parts.admission.admit_now(self):
                await parts.admission.admit(self)
            if admit.recording:
                admit.set(admission_attributes(self))
        prompt = partial(Prompt, parts, self._moves, self, holds=self.holds)
        count = len(self.requests)
        at_once = 1 if job.service.is_offline else PROMPTS_AT_ONCE
        self._running = prompt(0) if count == 1 else Prompts(prompt, count, at_once)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._running.aclose()
        finally:
            # These end cycles of references, which only a collection would free.
            del self._running
            self._reader, self.sink = None, ignore
            self._parts.admission.settle(self)
            if self.hop is not None:
                await self._end_hop(self.hop, error)

    def wake(self) -> None:
        """Let `wait` return, because the sink keeps deltas."""
        self._running.wake()

    async def wait(self) -> bool:
        """Run until all choices have ended, or until `wake` is called.

        Returns:
            Whether choices may be left.

        Raises:
            QueueTimeout: a prompt waited too long for its first worker.
            BackendFailed: a prompt has no worker and cannot continue.
            OutputCut: the grammar of a prompt allows no continuation of an incomplete output.
            Exception: the sink has raised this error.
        """
        return await self._running.wait()

    async def finished(self) -> None:
        """Run until all choices have ended. The errors are those of `wait`."""
        while await self._running.wait():
            pass

    @property
    def deltas(self) -> AsyncGenerator[Delta, None]:
        """The deltas for a reader that may be slow, which needs no `sink`.

        They end when all choices have ended, or with an error of `wait`.
        """
        if self._reader is None:
            self._reader = self._read()
        return self._reader

    async def _read(self) -> AsyncGenerator[Delta, None]:
        unread = self.unread = UnreadDeltas()

        def keep(delta: Delta) -> None:
            unread.put(delta)
            self.wake()

        self.sink, more = keep, True
        while more:
            more = await self.wait()
            while unread:
                yield unread.pop()

    @property
    def unread_tokens(self) -> int:
        """Number of generated tokens that wait for the client."""
        return 0 if self.unread is None else self.unread.tokens

    def set_pace(self, pace: Pace, tpot_s: float = 0.0) -> None:
        """Set the pace of all sequences of the job, as `Backend.set_pace`."""
        self.pace, self.tpot_s = pace, tpot_s
        for hold in self.holds.values():
            hold.set_pace(pace, tpot_s)

    @property
    def full_tps(self) -> float:
        """Tokens per second that its workers generate for it at full pace, or 0 if unknown."""
        tpots_s = [hold.worker.backend.load().speed.tpot_s for hold in self.holds.values()]
        return sum([self.job.n / tpot_s for tpot_s in tpots_s if tpot_s])

    def note_path(self, reason: str) -> None:
        """Record why the job follows the path to its client, also in its latest decisions."""
        self.path_reason = reason
        for hold in self.holds.values():
            hold.decision.path = reason

    def _use(self, requests: Sequence[GenerationRequest]) -> None:
        """Set the sized requests, whose capacity the job needs."""
        self.requests = requests
        self.use(tuple([need_of(request) for request in requests]))
        self.max_tokens = max([request.sampling.max_tokens for request in requests])

    async def _admit_hop(self, job: Job, flow: FlowTag) -> None:
        """Admit a job that names a flow, with the targets of its part of the remaining time."""
        flows, admission = self._flows, self._parts.admission
        hop = await flows.begin(job.tenant, flow)  # None for an ordinary request
        try:
            if hop is not None:
                self.judged = flows.divide(hop, self, admission)
                self.continues = not hop.is_first
                self.service = hop.service
                self.job = replace(job, service=hop.service)
                self._use([replace(one, service=hop.service) for one in self.requests])
            if not admission.admit_now(self):
                await admission.admit(self)
        except BaseException as error:
            if hop is not None:
                await flows.fail(hop, error)
            raise
        finally:
            if self.span.recording:
                self.span.set(flow_attributes(flow, hop))
        if hop is not None:
            flows.admitted(hop)
        self.hop = hop

    async def _end_hop(self, hop: Hop, error: BaseException | None) -> None:
        """Record the end of the job in its flow."""
        if error is None:
            await self._flows.end(hop, self)
        elif isinstance(error, TooMany):
            await self._flows.fail(hop, error)
