"""A request that an upstream runs, from its admission to the last byte of the response.

All transitions between its states are in this file. The gateway may try another upstream until one
has responded. A stream that breaks off later continues on another upstream if the text so far
suffices for that (`kept_stream`), and otherwise the error is final.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from draftgate.backends.base import CallTranslation, Exchange, TokenUsage, Upstream, UpstreamCall
from draftgate.backends.errors import BackendFailed, UpstreamFailed
from draftgate.gateway.dispatch.admission import Entry
from draftgate.gateway.dispatch.decisions import Decision
from draftgate.gateway.dispatch.run import Fallback, Watch, ignore
from draftgate.gateway.dispatch.upstreams import refusals
from draftgate.gateway.dispatch.upstreams.fallbacks import FallbackReason, Turn, attempt_models
from draftgate.gateway.dispatch.upstreams.forward_state import (
    ADMITTED,
    ANSWERED,
    ENDED,
    FAILED,
    LOST,
    NEW,
    PREFILLING,
    REFUSED,
    SENT,
)  # fmt: skip
from draftgate.gateway.dispatch.upstreams.forwarder import Forwarder
from draftgate.gateway.dispatch.upstreams.kept_stream import KeptStream
from draftgate.gateway.dispatch.upstreams.pools import PoolDecision
from draftgate.gateway.dispatch.upstreams.preemption import PreemptibleRequest
from draftgate.gateway.dispatch.upstreams.prefill import DividedCall
from draftgate.gateway.dispatch.upstreams.prefixes import ForwardedPrompt
from draftgate.gateway.dispatch.upstreams.rules import RetryCause
from draftgate.gateway.dispatch.upstreams.usage import NO_TOKENS, usage_so_far
from draftgate.gateway.dispatch.worker_spans import open_dispatch
from draftgate.gateway.errors import GatewayError, UpstreamBroken, UpstreamBusy, UpstreamUnavailable
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.tracing import NO_SPAN, Span
from draftgate.policies.resilience.failover import Cause, GivenUp
from draftgate.policies.routing.types import RouteView
from draftgate.policies.types import RequestView, SpeculationPlan
from draftgate.policies.values import replace

_NO_WORKERS: Final = frozenset[str]()
_NO_VIEW: Final = RequestView(0, 0, 0.0)


class ForwardedRequest:
    """A client's request for an upstream, and the response to it.

    The caller calls `start`, reads the response, and calls `end`, in any case. If the state is LOST
    after reading, it calls `resume` and reads on. A request without an entry generates nothing. It
    needs no admission, capacity and quota.

    Attributes:
        state: its state.
        entry: the request at admission, with estimates of its tokens, or None.
        worker: the upstream that has reserved capacity for it, or None.
        status, headers: those of the response.
        is_error: whether the status is an error.
        streaming: whether the response is a stream of events.
        body: the whole body of the response if it has arrived, or None. It is read with `read`.
        translation: the translation of the request, if the upstream got it, or None. A whole
            response has to be converted with it.
        worker_id: id of the upstream that responded.
        plan: the decision about speculation, or None without a choice.
        fallback: the last change of its model, or None.
        decision: the recorded decision about it, or None without one.
    """

    __slots__ = (
        "_avoid", "_call", "_call_span", "_divided", "_first", "_forwarder", "_kept", "_need",
        "_place", "_pool", "_prompt", "_span", "_turn", "_view", "_watch", "body", "decision",
        "entry", "exchange", "fallback", "headers", "is_error", "plan", "state", "status",
        "streaming", "translation", "worker", "worker_id",
    )  # fmt: skip

    status: int
    is_error: bool
    headers: Mapping[str, str]
    streaming: bool
    body: bytes | None
    worker_id: str

    def __init__(
        self,
        forwarder: Forwarder,
        call: UpstreamCall,
        entry: Entry | None = None,
        view: RequestView = _NO_VIEW,
        span: Span = NO_SPAN,
        watch: Watch = ignore,
        prompt: ForwardedPrompt | None = None,
        turn: Turn | None = None,
    ) -> None:
        """Create a request, which `start` sends.

        Args:
            view: the policies' view of the request.
            span, watch: the parent of its spans, and what takes its events.
            prompt: what is known about its prompt beside its size, or None.
            turn: the models of a chain that may respond, or None without a chain.
        """
        self.state = NEW
        self.entry = entry
        self.worker: FleetWorker | None = None
        self.plan: SpeculationPlan | None = None
        self.exchange: Exchange | None = None
        self.translation: CallTranslation | None = None
        self._forwarder = forwarder
        self._call = call
        self._view, self._span, self._prompt = view, span, prompt
        self._pool: PoolDecision | None = None
        self._need = None if entry is None else entry.needs[0]
        self._avoid = _NO_WORKERS
        self._call_span = NO_SPAN  # of the present call
        self._first = b""
        self._watch = watch
        self.decision: Decision | None = None
        self._kept: KeptStream | None = None  # of a stream that can be continued
        self._place: PreemptibleRequest | None = None  # if it may lose its upstream to another one
        self._turn = turn
        self.fallback = None if turn is None else turn.fallback
        self._divided: DividedCall | None = None  # for upstreams with roles

    def usage(self) -> TokenUsage:
        """Return the reported or estimated tokens of the response so far, or none for an error."""
        if self.entry is None or self.is_error:
            return NO_TOKENS
        return usage_so_far(self.exchange, self.entry, self._kept, streaming=self.streaming)

    async def start(self) -> None:
        """Get a response from an upstream, which may be an error.

        Raises:
            Overloaded, QuotaExceeded: the request is rejected for now. The error has the retry
                time.
            GatewayError, UpstreamFailed: no upstream responds.
        """
        forwarder, entry = self._forwarder, self.entry
        try:
            await (self.attempt() if self._turn is None else attempt_models(self, self._turn))
        except BaseException as error:
            await self.end(error)
            raise
        # The first bytes of a whole response arrive with its last token, not with its first.
        if entry is not None and not self.is_error and (self.streaming or not entry.max_tokens):
            forwarder.admission.answered(entry)
            if self.streaming:
                worker = self.worker
                assert worker is not None
                self._leave_kv()
                self._kept = forwarder.keep(self._call, entry, worker, self._watch, self._place)

    async def attempt(self) -> None:
        """Get a response from an upstream of the present model, with the errors of `start`."""
        forwarder, entry, model = self._forwarder, self.entry, self._call.model
        seated = None if entry is None else await self._seat(entry)
        self.worker = worker = seated or forwarder.first_of(model, self.route_view)
        self.state = SENT
        forwarder.budget.count_request(forwarder.queue.now_s())
        if self._divided is not None:
            self.state = PREFILLING
            self._call = await self._divided.compute(self._call)
            self.state = SENT
        await self._send(worker, [])

    def fall_back(self, model: str, reason: FallbackReason) -> None:
        """Send the request to another model from now on."""
        entry, requested = self.entry, self._call.model
        assert entry is not None
        self._leave(None)
        self._release(entry)
        entry.needs = (replace(entry.needs[0], offer=model),)
        self._call = self._forwarder.call_for(model, self._call)
        self._need, self._avoid, self._pool = entry.needs[0], _NO_WORKERS, None
        self._prompt = self._divided = None  # of the model before
        self.state = NEW if self.state is NEW else ADMITTED
        self.fallback = Fallback(requested, model, reason)
        self._watch(self.fallback)

    async def _seat(self, entry: Entry) -> FleetWorker:
        """Admit the request, and reserve an upstream, without waiting if one has capacity."""
        forwarder, span, need = self._forwarder, self._span, entry.needs[0]
        if not forwarder.fleet.is_open_for(need.offer) and not forwarder.may_start(need.offer):
            raise forwarder.no_upstream(self._call.model)
        if self.state is NEW and (span.recording or not forwarder.admission.admit_at_once(entry)):
            with span.child("admit"):
                await forwarder.admission.admit(entry)
        self.state = ADMITTED
        if len(forwarder.fleet.workers) > 1:
            self._pool = forwarder.choose_pool(entry, self._view)
            if self._pool is not None:
                self._avoid = self._pool.avoid
        routed = None
        if forwarder.preemption is not None:
            self._place = forwarder.preemption.place(entry, self._watch)
        elif not span.recording:
            view, avoid = self.route_view, self._avoid
            routed = forwarder.queue.seat_new(entry.request_id, need, view, avoid)
        if routed is None:
            routed = await forwarder.turn(entry, self._avoid, self.route_view, span, self._place)
        entry.prompt_tokens = need.prompt_tokens
        if entry.max_tokens or self.fallback or forwarder.costs is not None:
            self.decision = forwarder.record(entry, routed, self._view, self._pool, self.fallback)
        if routed.phases is None:
            return routed.worker
        self._divided = DividedCall(forwarder, entry, routed, self.route_view, span, self._watch)
        return self._divided.worker

    async def read(self) -> bytes:
        """Return the next bytes of the body, or nothing at its end or if the upstream is lost.

        Raises:
            BackendFailed: the upstream failed.
        """
        first, self._first = self._first, b""
        kept, exchange = self._kept, self.exchange
        if exchange is None:
            return first
        if kept is None:
            return first or await exchange.read()
        block = await kept.read(exchange, first)
        if kept.error is not None:
            self.state = LOST
        return block

    async def end(
        self, error: BaseException | None = None, usage: TokenUsage | None = None
    ) -> None:
        """Cancel what is left of the request, charge its tokens, and release its upstream.

        A sent prompt is charged, whatever the outcome, unless the upstream rejects the request or
        reports another count. Only the first call has an effect.

        Args:
            error: why the request ends early, or None.
            usage: the tokens of the whole response (`usage`), if the caller knows them.
        """
        state, self.state = self.state, ENDED
        if state is ENDED:
            return
        forwarder, entry, exchange = self._forwarder, self.entry, self.exchange
        try:
            if entry is not None and (state is ANSWERED or self._kept is not None):
                used = usage or self.usage()
                entry.prompt_tokens, entry.output_tokens = used.prompt, used.output
                if self._prompt is not None and not self.is_error:
                    tokens = used.prompt + used.output
                    forwarder.prefixes.record(self._prompt, self.worker_id, tokens)
                if exchange is not None and (drafts := exchange.drafts()) is not None:
                    forwarder.pools.record_drafts(entry, self._view, self.decision, drafts)
                    self._watch(drafts)
                # The length of an output that was cut off says nothing about later requests.
                cut = error is not None or (self.streaming and self.error_sent)
                if not (self.is_error or cut):
                    entry.ended = entry.sequences
            if error is None and exchange is not None and exchange.streaming:
                self.exchange = None
                await exchange.finish()
        finally:
            self._leave(error)
            if entry is not None and state is not NEW:
                self._release(entry)
                forwarder.queue.dispatch_waiting()
                # An upstream that refuses has computed nothing.
                if error is not None and isinstance(error, UpstreamBusy | UpstreamUnavailable):
                    entry.prompt_tokens = 0
                forwarder.admission.settle(entry)

    @property
    def has_responded(self) -> bool:
        """Whether the client has got a response, or a part of it."""
        return self.state is ANSWERED or self._kept is not None

    @property
    def outputs(self) -> int:
        """Number of events with output so far, of all upstreams of a stream."""
        return sum(one.outputs for one in (self._kept, self.exchange) if one is not None)

    @property
    def error_sent(self) -> bool:
        """Whether the stream ended with an error event of an upstream."""
        passed = self._kept is not None and self._kept.error_passed
        return passed or (self.exchange is not None and self.exchange.error_sent)

    def route_view(self) -> RouteView:
        """Return the routing policy's view of the request."""
        return self._forwarder.route_view(self.entry, self._view, self._prompt, self._call.path)

    async def resume(self) -> None:
        """Continue a lost stream on another upstream, or give the client the error.

        Raises:
            UpstreamFailed: the stream cannot be continued.
        """
        kept, entry = self._kept, self.entry
        assert kept is not None and kept.error is not None and entry is not None  # noqa: PT018
        lost = self.worker_id
        await kept.lose(self.usage().output, self.outputs)
        self._leave(kept.error)
        self._release(entry)
        self._forwarder.queue.dispatch_waiting()
        error: BaseException | None = None
        try:
            why = await kept.wait(lost)
            if why is None and not kept.is_complete:
                self.worker = await kept.turn(self._span, self.route_view)
                self._call = await kept.rest_on(self.worker)
                if not kept.is_complete:
                    self.state = SENT
                    await self._send(self.worker, [] if kept.preempted else [lost])
                    if self.is_error or not self.streaming:
                        raise UpstreamBroken(refusals.reason(self.status, self.body or b""))
                    kept.join(lost, self.worker, self.decision, self._view)
        except (BackendFailed, GatewayError) as later:
            why, error = GivenUp.NO_WORKER, later
            self._leave(later)
        self.state, self.streaming, self.is_error = ANSWERED, True, False
        if why is not None:
            self._first = kept.give_up(why, error)
        elif kept.is_complete:
            self._first = kept.closing()

    async def _send(self, worker: FleetWorker, tried: list[str]) -> None:
        """Send the request to its upstream, and to others until one has responded.

        Args:
            tried: ids of upstreams that were called before.

        Raises:
            GatewayError, UpstreamFailed: no upstream responds.
        """
        forwarder, entry, need = self._forwarder, self.entry, self._need
        while True:
            tried.append(worker.worker_id)
            failure: UpstreamFailed | None = None
            try:
                if self._place is None:
                    await self._call_upstream(worker)
                elif not await self._place.run(worker, self._call, self._call_upstream(worker)):
                    tried.pop()
                    worker = await self._wait_again(self._place, worker)
                    continue
            except UpstreamFailed as error:
                self.state, failure = FAILED, error
            if self.state is ANSWERED:
                return
            self._leave(failure)
            if entry is not None:
                self._release(entry)
            model, avoid, cause = self._call.model, self._avoid, RetryCause.of(failure)
            other = forwarder.choose(model, need, avoid, self.route_view, tried, cause)
            if other is None:
                break
            if entry is not None and need is not None:
                other.reserve(entry.request_id, need)
            self.worker = worker = other
            self.state = SENT
            self._leave_kv()
        if failure is not None:
            raise failure
        wait_s, body = forwarder.retry_after_s(self._call.model), self.body or b""
        self.headers = refusals.passed_refusal(self.status, self.headers, body, wait_s)
        self.state = ANSWERED

    async def _wait_again(self, place: PreemptibleRequest, lost: FleetWorker) -> FleetWorker:
        """Leave an upstream for a request of a higher class, and wait for another upstream."""
        forwarder, entry, span = self._forwarder, self.entry, self._span
        assert entry is not None
        self.state = ADMITTED
        self._leave(None)
        self._release(entry)
        place.hand_over(lost)
        place.waiting.has_blocks = True  # one upstream gets it, whatever the roles are
        routed = await forwarder.turn(entry, place.waiting.avoid, self.route_view, span, place)
        self.worker, self.state = routed.worker, SENT
        self._leave_kv()
        self.decision = forwarder.pools.record_move(
            entry, self.decision, lost.worker_id, self.worker, Cause.PREEMPTED, self._view
        )
        return self.worker

    async def _call_upstream(self, worker: FleetWorker) -> None:
        """Call an upstream, and wait for the first bytes of its response.

        Raises:
            UpstreamFailed: no bytes arrived.
            UpstreamBroken: the response is an error that another attempt would not avoid.
        """
        call, self.exchange = self._call, None
        if self._span.recording:
            self._call_span = span = open_dispatch(self._span, worker.worker_id, worker.server)
            call = call._replace(headers={**call.headers, **span.propagation()})
        if self._prompt is not None and self._need is not None:
            self._forwarder.prefixes.sent(self._prompt, worker, self._need.prompt_tokens)
        upstream: Upstream = worker.backend  # type: ignore[assignment]
        self.exchange = exchange = await upstream.forward(call)
        if not exchange.body:
            self._first = await refusals.read_first(exchange)
        self.status, self.headers, self.body = exchange.status, exchange.headers, exchange.body
        self.streaming, self.worker_id = exchange.streaming, worker.worker_id
        self.translation = exchange.translation
        self.is_error = exchange.status >= refusals.FIRST_ERROR
        prefilled_by = "" if self._divided is None else self._divided.prefilled_by
        if self._span.recording:
            self._call_span.set({"http.response.status_code": exchange.status})
        if self.status >= refusals.FIRST_REDIRECT and self.status not in refusals.PASSED_ON:
            if self.body is None:
                self.body, _ = await refusals.read_begin(self.read, refusals.MOST_REASON_BYTES)
            refusals.check_refusal(self.status, self.body, worker, has_kv=bool(prefilled_by))
            self.state = REFUSED
            return
        self.state = ANSWERED
        if self.streaming and self.entry is not None:
            worker.started(self.entry.request_id)  # its prompt no longer waits there
        pool = self._pool
        if more := self._forwarder.headers(worker, pool, self.fallback, prefilled_by):
            self.headers = {**self.headers, **more}
        self.plan = None if pool is None else pool.plan

    def _leave_kv(self) -> None:
        """Send the request without the KV cache of its prompt from now on."""
        if self._divided is not None:
            self._call = self._divided.undivided(self._call)

    def _release(self, entry: Entry) -> None:
        """Release the capacity of the present upstream."""
        if self.worker is not None:
            self.worker.release(entry.request_id)
            self.worker = None
        if self._place is not None:
            self._place.leave()

    def _leave(self, error: BaseException | None) -> None:
        """End the response of the present upstream, and the span of the call."""
        exchange, span, self.exchange = self.exchange, self._call_span, None
        if self._kept is not None:
            self._kept.unwatch()
        if exchange is not None:
            exchange.close()
        if span is not NO_SPAN:
            self._call_span = NO_SPAN
            if error is not None:
                span.fail(error)
            span.end()
