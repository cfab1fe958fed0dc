"""What a prompt holds on a worker, from the reservation of its capacity to its release."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, Protocol

from draftgate.backends.base import DeltaSink
from draftgate.backends.errors import StreamMoved
from draftgate.backends.types import Delta, FinishReason, GenerationRequest, Pace
from draftgate.gateway.dispatch.admission import AdmissionController
from draftgate.gateway.dispatch.decisions import Decision
from draftgate.gateway.dispatch.kv_fetch import KvFetcher
from draftgate.gateway.dispatch.kv_replication import PrefixUse, Replicator
from draftgate.gateway.dispatch.leases import Leases, NoCapacity, lease_tokens
from draftgate.gateway.dispatch.output import PromptOutput
from draftgate.gateway.dispatch.placement import Placer, need_of, with_adapter
from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.dispatch.routing import Routed, decode_id
from draftgate.gateway.dispatch.run import Run
from draftgate.gateway.dispatch.span_attributes import (
    describe_decision,
    describe_reservation,
    record_route,
)
from draftgate.gateway.dispatch.splice import Splice
from draftgate.gateway.dispatch.suspects import Suspects
from draftgate.gateway.dispatch.watchdog import Watchdog
from draftgate.gateway.dispatch.worker_spans import WorkerSpans, open_dispatch
from draftgate.gateway.errors import OutputCut
from draftgate.gateway.fleet import Fleet
from draftgate.gateway.state.values import Reservation
from draftgate.gateway.tracing import NO_SPAN, Attributes, Span
from draftgate.policies.routing.types import RouteView
from draftgate.policies.values import replace


class Parts(NamedTuple):
    """The parts of a dispatcher that all prompts use.

    Attributes:
        suspects: the requests that may break workers.
        most_resumes: maximum number of times that a prompt may resume on another worker.
    """

    fleet: Fleet
    queue: CentralQueue
    admission: AdmissionController
    placer: Placer
    leases: Leases
    watchdog: Watchdog
    kv: KvFetcher
    replicator: Replicator
    suspects: Suspects
    most_resumes: int

    def route_view(self, run: Run, index: int, request: GenerationRequest) -> RouteView:
        """Return the routing policy's view of a prompt, or of the rest of a prompt."""
        return self.placer.route_view(run.job, index, request, run.expected_tokens)


class PromptSink(DeltaSink, Protocol):
    """A prompt (`prompt.Prompt`), which gets the deltas of its holds."""

    run: Run
    index: int
    output: PromptOutput

    def begin(self) -> None:
        """Notice that its present hold sends the request."""
        ...


class Hold:
    """What a prompt holds on one worker: capacity, claim, lease, blocks, span and deltas.

    The queue has reserved the capacity of a new hold. `start` leases it and sends the request. A
    move prepares the hold of its destination with `prepare` first. `close` cancels the request and
    releases everything, in any state and only once.

    The hold is the sink of the request (`DeltaSink`). It observes the deltas and passes them to the
    prompt. Until `start`, the deltas of a request that was sent early go to a move instead.

    Attributes:
        worker: the worker, which a reservation may change.
        request: the request for the prompt, or for the rest of the prompt, with its speculation
            plan once that is decided.
        output: the output of the prompt.
        decision: the decision about speculation, once the worker is leased.
        error: why the worker sends no further deltas, or None.
        num_deltas: number of deltas so far.
        decodes: whether a choice has its first token from this worker.
        on_delta: a callback after each observed delta, or None.
    """

    decision: Decision
    error: Exception | None = None
    num_deltas = 0
    decodes = False
    patience_s: Final = None  # that of its worker
    on_delta: Callable[[Delta], None] | None = None
    _reservation: Reservation | None = None  # once prepared
    _splice: Splice | None = None  # the output of a request that was sent early
    _further: Callable[[Delta], None] | None = None  # takes the further deltas of such a request
    _sent = False
    _span: Span = NO_SPAN
    _spans: WorkerSpans | None = None  # if recorded
    _prefix: PrefixUse | None = None  # of a sent request, if workers had it cached
    _begun = _closed = False

    def __init__(
        self,
        parts: Parts,
        prompt: PromptSink,
        request: GenerationRequest,
        routed: Routed,
    ) -> None:
        """Hold a reserved worker.

        Args:
            prompt: gets the deltas, which are added to its output before.
            request: the request for the prompt, or for the rest of the prompt.
            routed: the reserved worker (`CentralQueue.turn`).
        """
        self.worker = routed.worker
        self.run = prompt.run
        self.request = request
        self.output = prompt.output
        self.routed = routed
        self._parts = parts
        self._index = prompt.index
        self._prompt = prompt
        self._sink: DeltaSink = prompt

    @property
    def numerics_class(self) -> str | None:
        """The class of the worker with the digest of the request's adapter, or None."""
        numerics = self.worker.backend.card.numerics_class
        return None if numerics is None else with_adapter(numerics, self.request.adapter)

    def start_now(self) -> bool:
        """Start as `start` does if nothing has to wait, and return whether it did."""
        if self._splice is not None:
            self._take_over(self._splice)
            return True
        if self._reservation is None:
            run, request = self.run, self.request
            if run.span.recording or request.resumed or self.routed.cached_blocks:
                return False
            found = self._parts.leases.reserve_at_once(run.quota)
            if found is None:
                return False
            self._accept(found)
            self._decide(found)
        self._send()
        return True

    async def start(self) -> None:
        """Lease the worker and send the request.

        Call `close` after any error, too.

        Raises:
            NoCapacity: other gateways have filled the workers. The request was not sent.
            InvalidRequest, QuotaExceeded: the request does not fit into its quota.
            BackendFailed: the worker has failed or rejects the request.
        """
        await self._lease()
        if self.request.resumed:
            await self._parts.kv.fetch_resumed(self.run, self.request, self.worker)
        elif self.routed.cached_blocks:
            cached_blocks = self.routed.cached_blocks
            await self._parts.kv.fetch_new(self.run, self.request, self.worker, cached_blocks)
        self._send()

    async def prepare(self) -> None:
        """Lease the worker and decide about speculation, before the prompt continues here.

        The caller fetches KV blocks itself. The errors are those of `start`, and close the hold.
        """
        try:
            await self._lease()
        except BaseException as error:
            self.close(error)
            raise
        self.worker.await_blocks(self.request.request_id)

    def take_decode(self) -> tuple[str, Routed | None]:
        """Return the reserved worker that continues the request, and the id of the rest.

        The caller must release the capacity of the worker. Later calls return None as the worker.
        """
        decode = self.routed.decode
        if decode is not None:
            self.routed = self.routed._replace(decode=None)
        return decode_id(self.request.request_id), decode

    @property
    def rest(self) -> GenerationRequest:
        """The request for the rest of the present output."""
        return self.output.rest(self.request.request_id)

    def extend(self) -> None:
        """Continue a prepared hold from the present output, unless its request has been sent."""
        if not self._sent:
            self._replace_request(self.rest)

    def send_early(self, request: GenerationRequest, sink: DeltaSink) -> None:
        """Send a request for the rest of an earlier output, while the prompt runs on its source.

        Args:
            request: an earlier value of `rest`, which may contain the tokens after that output.
            sink: gets the deltas until the prompt continues here.
        """
        self._replace_request(request)
        self._sink = sink
        self._send()

    def _replace_request(self, request: GenerationRequest) -> None:
        self.request = request.planned(self.request.speculation)

    def continue_with(self, splice: Splice) -> None:
        """Set the output of a request that was sent early, with which the prompt continues."""
        self._splice = splice

    def set_pace(self, pace: Pace, tpot_s: float = 0.0) -> None:
        """Set the pace of the request on its worker, which the job's own pace replaces."""
        self.worker.generating.set_pace(self.request.request_id, pace, tpot_s)

    @property
    def is_owed(self) -> bool:
        """Whether the worker owes a delta."""
        ended = self.error is not None or self.output.is_complete
        return not ended and self.run.pace is not Pace.PAUSED

    @property
    def runs(self) -> bool:
        """Whether the worker owes a delta of each step. An offline request lets others pass."""
        if self.request.service.is_offline:
            return False
        return self.decodes and self.run.pace is Pace.FULL and self.is_owed

    def put(self, delta: Delta) -> None:
        """Take a delta of the worker."""
        if self.error is not None:
            return
        self.num_deltas += 1
        if delta.phases is not None:
            self.decodes = True
        if self._further is not None:
            self._further(delta)
        elif self._sink is self._prompt:
            self._observe(delta)
        else:
            self._sink.put(delta)

    def fail(self, error: Exception) -> None:
        """End the deltas with an error, unless they have ended."""
        if self.error is None:
            self.error = error
            self._sink.fail(error)

    def _observe(self, delta: Delta) -> None:
        """Pass a delta to output, queue, trace, acceptance history and the prompt."""
        counted = self.output.add(delta)
        if not self._begun:
            self._begin()
        if self._spans is not None:
            self._spans.observe(delta)
        if delta.outcome is not None:
            self.run.ended += 1
            self._parts.placer.record_outcome(
                self.request, self.worker, self.decision, delta.outcome
            )
        if self.on_delta is not None:
            self.on_delta(delta)
        if delta.finish_reason is FinishReason.ABORT:
            # Every worker would end the output here, so none can continue it.
            self.fail(OutputCut(self.output.tokens))
        else:
            self._prompt.put(counted)

    def _begin(self) -> None:
        """Report the first delta to worker, admission and queue."""
        self._begun = True
        self.worker.started(self.request.request_id)
        self._parts.admission.answered(self.run)
        self._parts.queue.dispatch_waiting(self.worker)

    async def _lease(self) -> None:
        """Lease capacity of a worker, and decide how far the prompt may speculate there.

        The reservation may choose another worker than the router did, if other gateways have leased
        the first choice in the meantime. It includes the quota of the request, if still due.

        Raises:
            NoCapacity: other gateways have filled the workers.
            InvalidRequest, QuotaExceeded: the request does not fit into its quota.
        """
        leases, run, request = self._parts.leases, self.run, self.request
        span, recording = run.span, run.span.recording
        if recording:
            record_route(span, self.routed)
        with span.child("reserve") if recording else NO_SPAN as child:
            found = leases.reserve_at_once(run.quota)
            if found is None and request.service.is_offline:
                # A lease would take capacity from the requests of other gateways.
                found = await leases.reserve_quota(run.quota)
            elif found is None:
                tokens = lease_tokens(request, run.expected_tokens)
                # A refusal says nothing about claimed workers and about quotas.
                claimed = request.request_id in self._parts.queue.claims
                reserve = leases.reserve if claimed or run.quota else leases.reserve_new
                found = await reserve(request.request_id, tokens, self.routed, run.quota)
            self._accept(found)
            if recording:
                describe_reservation(child, found)
        with span.child("decide") if recording else NO_SPAN as child:
            self._decide(found)
            if recording:
                describe_decision(child, self.decision)

    def _accept(self, found: Reservation) -> None:
        """Record what the store has reserved, with the errors of `_lease`."""
        parts, run, request_id = self._parts, self.run, self.request.request_id
        if run.quota is not None:
            parts.admission.record_quota(run, found.shortage)
        if parts.leases.must_wait(found):
            raise NoCapacity
        if request_id in parts.queue.claims:
            parts.queue.claims.end(request_id, leased=found.lease is not None)

    def _decide(self, found: Reservation) -> None:
        """Decide how far the prompt may speculate on the worker of its lease."""
        if found.lease is not None and found.lease.worker_id != self.worker.worker_id:
            self._move_to(found.lease.worker_id)
        self._reservation = found
        self.decision = self._parts.placer.decide(
            self.run.job, self._index, self.request, self.routed, found
        )
        self.request = self.request.planned(self.decision.plan)

    def _move_to(self, worker_id: str) -> None:
        """Reserve another worker that the router offered."""
        request = self.request
        self.worker.release(request.request_id)
        self.worker = next(one for one in self.routed.choices if one.worker_id == worker_id)
        self.worker.reserve(request.request_id, need_of(request))
        self.routed = self.routed._replace(worker=self.worker)
        view = partial(self._parts.route_view, self.run, self._index, request)
        self._parts.queue.router.moved(view, self.worker)

    def _send(self) -> None:
        """Send the request to its worker."""
        run, worker, request = self.run, self.worker, self.request
        if self._sink is self._prompt:
            self._prompt.begin()
        if run.span.recording:
            placed: Attributes = {
                "draftgate.prompt": self._index,
                "draftgate.prompt_tokens": len(request.prompt_ids),
            }
            self._span = open_dispatch(run.span, worker.worker_id, worker.server, placed)
            self._spans = WorkerSpans(self._span)
            request = self._spans.carried(request)
        if self.routed.cached_blocks:
            cached_blocks = self.routed.cached_blocks
            self._prefix = self._parts.replicator.begin(run, request, worker, cached_blocks)
        output, now_s = self.output, self._parts.queue.now_s()
        if output.begun_s is None:
            output.begun_s = now_s
        else:
            request = replace(request, age_s=max(now_s - output.begun_s, 0.0))
        lease = None if self._reservation is None else self._reservation.lease
        worker.submit(request, self, 0 if lease is None else lease.number)
        self._sent = True
        if run.pace is not Pace.FULL:
            self.set_pace(run.pace, run.tpot_s)
        self._parts.watchdog.watch(self, worker)

    def _take_over(self, splice: Splice) -> None:
        """Give the prompt the deltas of a request that was sent early."""
        self._sink = self._prompt
        self._prompt.begin()
        if self.run.pace is not Pace.FULL:
            self.set_pace(self.run.pace, self.run.tpot_s)
        self._further = splice.continued(self._observe)

    def close(self, error: BaseException | None = None) -> None:
        """End the deltas and the spans, release the worker, and dispatch the next request.

        Only the first call has an effect.

        Args:
            error: the reason, or None after the last delta.
        """
        if self._closed:
            return
        self._closed = True
        if isinstance(error, StreamMoved):
            error = None
        try:
            if self._sent:
                self._parts.watchdog.unwatch(self, self.worker)
                self.worker.generating.cancel(self.request.request_id)
            if self._begun and not self.output.is_complete:
                # The worker reports no outcome of a choice that is cancelled, lost or moved.
                self._parts.placer.record_unfinished(self.decision, self.output.unfinished)
            if self._spans is not None:
                self._spans.end()
                if error is not None:
                    self._span.fail(error)
                self._span.end()
        finally:
            del self._prompt, self._sink, self.run  # end cycles of references
            self._further = None
            self._release(error)

    def _release(self, error: BaseException | None) -> None:
        """Release the capacity of the worker, and dispatch the next request."""
        parts, request_id, decode = self._parts, self.request.request_id, self.routed.decode
        self.worker.release(request_id)
        if decode is not None:
            decode.worker.release(decode_id(request_id))
        if self._prefix is not None:
            parts.replicator.end(self._prefix)
        if not isinstance(error, NoCapacity):  # a refused request has no lease, and keeps its claim
            if request_id in parts.queue.claims:
                parts.queue.claims.end(request_id, leased=parts.leases.shared)
            parts.leases.release(request_id)
        parts.queue.dispatch_waiting(self.worker if decode is None else None)
