"""A request that an upstream runs, from its admission to the last byte of the response.

All states and transitions are in this file. The gateway may try another upstream until one has
responded. An error after the first byte of a response is final, because a server that accepts text
cannot resume the output of another server.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import Enum, auto
from functools import partial
from typing import Final

from draftgate.backends.base import (
    DENIED,
    CallTranslation,
    Exchange,
    TokenUsage,
    Upstream,
    UpstreamCall,
)
from draftgate.backends.errors import BackendFailed, UpstreamFailed, UpstreamUnreachable
from draftgate.gateway.dispatch.admission import Entry
from draftgate.gateway.dispatch.routing import Routed
from draftgate.gateway.dispatch.span_attributes import record_route
from draftgate.gateway.dispatch.upstreams.error_bodies import read_error
from draftgate.gateway.dispatch.upstreams.forwarder import (
    FIRST_ERROR_STATUS,
    UNAVAILABLE,
    Forwarder,
    denied_access,
    read_first,
)
from draftgate.gateway.dispatch.upstreams.pools import PoolDecision
from draftgate.gateway.dispatch.upstreams.prefixes import BLOCK_TOKENS, ForwardedPrompt
from draftgate.gateway.dispatch.worker_spans import open_dispatch
from draftgate.gateway.errors import UpstreamBroken, UpstreamBusy, UpstreamUnavailable
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.logs import log
from draftgate.gateway.tracing import NO_SPAN, Span
from draftgate.policies.capacity import CapacityNeed, has_capacity
from draftgate.policies.routing.types import RouteView
from draftgate.policies.types import RequestView, SpeculationPlan

UPSTREAM_HEADER: Final = "X-Draftgate-Upstream"
"""The header of a response with the name of its upstream, if there are several."""

_FIRST_REDIRECT: Final = 300

_TOO_MANY: Final = 429
_BAD_GATEWAY: Final = 502
_REFUSALS: Final = frozenset({_TOO_MANY, _BAD_GATEWAY, UNAVAILABLE, *DENIED})
"""Statuses after which another upstream may succeed."""

_PASSED_ON: Final = frozenset({*range(400, 500), 501}) - _REFUSALS
"""Statuses of errors that the client gets. Other errors and redirects mean nothing to it."""

_MOST_REASON_BYTES: Final = 64 << 10
_RETRY_HEADERS: Final = frozenset({"retry-after", "retry-after-ms"})
_NO_TOKENS: Final = TokenUsage(0, 0, 0)
_NO_WORKERS: Final = frozenset[str]()


class ForwardState(Enum):
    """The states of a forwarded request.

    NEW -> ADMITTED -> SENT -> ANSWERED -> ENDED
    SENT -> REFUSED or FAILED -> SENT to another upstream, or ENDED
    """

    NEW = auto()
    ADMITTED = auto()
    SENT = auto()
    """An upstream has reserved capacity for it, and gets it."""
    ANSWERED = auto()
    """The client gets the response of the upstream."""
    REFUSED = auto()
    """The upstream refused it, and another one may take it."""
    FAILED = auto()
    """The upstream did not respond, and another one may."""
    ENDED = auto()


# A name of the module is found in a tenth of the time of a member of an enum.
NEW, ADMITTED, SENT, ANSWERED, REFUSED, FAILED, ENDED = ForwardState


class ForwardedRequest:
    """A client's request for an upstream, and the response to it.

    The caller calls `start`, reads the response, and calls `end`, in any case. A request without an
    entry generates nothing. It needs no admission, capacity and quota.

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
    """

    __slots__ = (
        "_avoid", "_call", "_call_span", "_first", "_forwarder", "_need", "_pool", "_prompt",
        "_span", "_view", "body", "entry", "exchange", "headers", "is_error", "plan", "state",
        "status", "streaming", "translation", "worker", "worker_id",
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
        view: RequestView | None = None,
        span: Span = NO_SPAN,
        prompt: ForwardedPrompt | None = None,
    ) -> None:
        """Create a request, which `start` sends.

        Args:
            view: the policies' view of the request, or None without an entry.
            span: the parent of its spans.
            prompt: what is known about its prompt beside its size, or None.
        """
        self.state = NEW
        self.entry = entry
        self.worker: FleetWorker | None = None
        self.plan: SpeculationPlan | None = None
        self.exchange: Exchange | None = None
        self.translation: CallTranslation | None = None
        self._forwarder = forwarder
        self._call = call
        self._view = view
        self._span = span
        self._prompt = prompt
        self._pool: PoolDecision | None = None
        self._need = None if entry is None else entry.needs[0]
        self._avoid = _NO_WORKERS
        self._call_span = NO_SPAN  # of the present call
        self._first = b""

    def usage(self) -> TokenUsage:
        """Return the reported or estimated tokens of the response so far.

        An error has no tokens.
        """
        exchange, entry = self.exchange, self.entry
        if exchange is None or entry is None or self.is_error:
            return _NO_TOKENS
        usage = exchange.usage()
        if usage.prompt:
            return usage
        need = entry.needs[0]
        is_counted = self.streaming or usage.output > 0
        output = usage.output if is_counted else need.sequences * entry.max_tokens
        return TokenUsage(need.prompt_tokens, 0, output)

    async def start(self) -> None:
        """Get a response from an upstream, which may be an error.

        Raises:
            Overloaded, QuotaExceeded: the request is rejected for now. The error has the retry
                time.
            GatewayError, UpstreamFailed: no upstream responds.
        """
        forwarder, entry = self._forwarder, self.entry
        try:
            if entry is None:
                view = self.route_view
                worker = forwarder.choose(
                    self._call.model, None, _NO_WORKERS, view, [], refused=False
                )
                if worker is None:
                    raise forwarder.no_upstream(self._call.model)
            else:
                worker = await self._seat(entry)
            self.worker, self.state = worker, SENT
            await self._send(worker)
        except BaseException as error:
            await self.end(error)
            raise
        # The first bytes of a whole response arrive with its last token, not with its first.
        if entry is not None and not self.is_error and (self.streaming or not entry.max_tokens):
            forwarder.admission.answered(entry)

    async def _seat(self, entry: Entry) -> FleetWorker:
        """Admit the request, and reserve an upstream, without waiting if one has capacity."""
        forwarder, span, need = self._forwarder, self._span, entry.needs[0]
        if not forwarder.fleet.is_open_for(need.offer):
            raise forwarder.no_upstream(self._call.model)
        if span.recording or not forwarder.admission.admit_at_once(entry):
            with span.child("admit"):
                await forwarder.admission.admit(entry)
        self.state = ADMITTED
        if len(forwarder.fleet.workers) > 1:
            self._choose_pool(entry, need)
        routed = None
        if not span.recording:
            view, avoid = self.route_view, self._avoid
            routed = forwarder.queue.seat_new(entry.request_id, need, view, avoid)
        if routed is None:
            routed = await self._wait(entry)
        entry.prompt_tokens = need.prompt_tokens
        if self._pool is not None:
            forwarder.pools.record(entry, routed.worker, self._pool, routed.route)
        return routed.worker

    async def read(self) -> bytes:
        """Return the next bytes of the body, or nothing at its end.

        Raises:
            BackendFailed: the upstream failed.
        """
        first, self._first = self._first, b""
        if first or self.exchange is None:
            return first
        return await self.exchange.read()

    async def read_begin(self, least_bytes: int) -> tuple[bytes, bool]:
        """Return the body and True, or False and only its begin of more than some bytes."""
        body = bytearray()
        while block := await self.read():
            body += block
            if len(body) > least_bytes:
                return bytes(body), False
        return bytes(body), True

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
            if state is ANSWERED and entry is not None:
                used = usage or self.usage()
                entry.prompt_tokens, entry.output_tokens = used.prompt, used.output
                if self._prompt is not None and not self.is_error:
                    tokens = used.prompt + used.output
                    forwarder.prefixes.record(self._prompt, self.worker_id, tokens)
                # The length of an output that was cut off says nothing about later requests.
                cut = error is not None or (self.streaming and exchange and exchange.error_sent)
                if not (self.is_error or cut):
                    entry.ended = entry.sequences
            if error is None and exchange is not None and exchange.streaming:
                self.exchange = None
                await exchange.finish()
        finally:
            self._leave(error)
            if entry is not None and state is not NEW:
                if self.worker is not None:
                    self.worker.release(entry.request_id)
                    self.worker = None
                forwarder.queue.dispatch_waiting()
                # An upstream that refuses has computed nothing.
                if error is not None and isinstance(error, UpstreamBusy | UpstreamUnavailable):
                    entry.prompt_tokens = 0
                forwarder.admission.settle(entry)

    def route_view(self) -> RouteView:
        """Return the routing policy's view of the request."""
        entry, view = self.entry, self._view
        if entry is None or view is None:
            return RouteView(RequestView(0, 0, 0.0), 0, 0.0)
        need = entry.needs[0]
        tokens, prompt = (need.most_tokens, entry.expected_tokens), self._prompt
        if prompt is None:
            return RouteView(view, *tokens, need.sequences, entry.tenant)
        return RouteView(
            view,
            *tokens,
            need.sequences,
            entry.tenant,
            prompt.block_hashes,
            BLOCK_TOKENS,
            self._forwarder.prefixes.cached(
                prompt, need.prompt_tokens, self._forwarder.fleet.workers
            ),
        )

    def _choose_pool(self, entry: Entry, need: CapacityNeed) -> None:
        """Choose between upstreams with and without speculation, if both are open."""
        forwarder, view = self._forwarder, self._view
        if view is None or not entry.max_tokens:  # embeddings have no drafts
            return
        # If other requests wait, either pool may later be the first with capacity.
        waits = len(forwarder.queue) > 0
        fits = (lambda _: False) if waits else partial(has_capacity, need=need)
        self._pool = forwarder.pools.choose(view, need.offer, fits)
        if self._pool is not None:
            self._avoid = self._pool.avoid

    async def _wait(self, entry: Entry) -> Routed:
        """Wait until an upstream has capacity, and reserve the capacity."""
        forwarder = self._forwarder
        waiting = forwarder.admission.waiting(entry, 0)
        waiting.request_id, waiting.avoid = entry.request_id, self._avoid
        with self._span.child("queue"):
            try:
                routed = await forwarder.queue.turn(waiting, self.route_view)
            except BackendFailed as error:
                raise forwarder.no_upstream(self._call.model) from error
        record_route(self._span, routed)
        return routed

    async def _send(self, worker: FleetWorker) -> None:
        """Send the request to its upstream, and to others until one has responded.

        Raises:
            GatewayError, UpstreamFailed: no upstream responds.
        """
        forwarder, entry, need = self._forwarder, self.entry, self._need
        forwarder.budget.count_request(forwarder.queue.now_s())
        tried: list[str] = []
        while True:
            tried.append(worker.worker_id)
            failure: UpstreamFailed | None = None
            try:
                await self._call_upstream(worker)
            except UpstreamFailed as error:
                self.state, failure = FAILED, error
            if self.state is ANSWERED:
                return
            self._leave(failure)
            if entry is not None:
                worker.release(entry.request_id)
                self.worker = None
            refused, view = self.state is REFUSED, self.route_view
            model, avoid = self._call.model, self._avoid
            other = forwarder.choose(model, need, avoid, view, tried, refused=refused)
            if other is None:
                break
            if entry is not None and need is not None:
                other.reserve(entry.request_id, need)
            self.worker = worker = other
            self.state = SENT
        if failure is not None:
            raise failure
        self._pass_refusal()

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
            tokens = self._need.prompt_tokens
            self._forwarder.prefixes.sent(self._prompt, worker, tokens)
        upstream: Upstream = worker.backend  # type: ignore[assignment]
        self.exchange = exchange = await upstream.forward(call)
        if not exchange.body:
            try:
                self._first = await read_first(exchange)
            except UpstreamFailed as error:
                raise UpstreamUnreachable(str(error)) from error
        self.status, self.headers, self.body = exchange.status, exchange.headers, exchange.body
        self.streaming, self.worker_id = exchange.streaming, worker.worker_id
        self.translation = exchange.translation
        self.is_error = exchange.status >= FIRST_ERROR_STATUS
        if self._span.recording:
            self._call_span.set({"http.response.status_code": exchange.status})
        if self.status >= _FIRST_REDIRECT and self.status not in _PASSED_ON:
            await self._read_refusal(worker)
            return
        self.state = ANSWERED
        if len(self._forwarder.fleet.workers) > 1:
            self.headers = {**self.headers, UPSTREAM_HEADER: worker.worker_id}
        if self._pool is not None:
            self.headers = {**self.headers, **self._pool.headers(worker)}
            self.plan = self._pool.plan

    async def _read_refusal(self, worker: FleetWorker) -> None:
        """Read the reason of a response after which another upstream may succeed.

        Raises:
            UpstreamBroken: the response is an error that another attempt would not avoid.
        """
        if self.status in DENIED:
            where = worker.backend.card.root
            log(logging.WARNING, "an upstream denies access", upstream=where, status=self.status)
        if self.body is None:
            self.body, _ = await self.read_begin(_MOST_REASON_BYTES)
        if self.status not in _REFUSALS:
            raise UpstreamBroken(self._reason(self.body))
        self.state = REFUSED

    def _pass_refusal(self) -> None:
        """Make the refusal of the last upstream the response, if it has status 429.

        Raises:
            UpstreamUnavailable, UpstreamBroken: the client does not get the response, because its
                status is not 429.
        """
        if self.status in DENIED:
            raise denied_access(self.status)
        retry_after_s = self._forwarder.retry_after_s(self._call.model)
        if self.status == _TOO_MANY:
            theirs = self.headers.items()
            headers = {name: value for name, value in theirs if name.lower() not in _RETRY_HEADERS}
            headers |= {"Retry-After": str(retry_after_s), "retry-after-ms": f"{retry_after_s}000"}
            self.headers, self.state = headers, ANSWERED
            return
        message = self._reason(self.body or b"")
        if self.status == UNAVAILABLE:
            raise UpstreamUnavailable(message, retry_after_s=retry_after_s)
        raise UpstreamBroken(message)

    def _reason(self, body: bytes) -> str:
        """Return the status of an error, with the message of the upstream if it has one."""
        reason = f"the upstream responded with status {self.status}"
        message = read_error(body).message
        return f"{reason}: {message}" if message else reason

    def _leave(self, error: BaseException | None) -> None:
        """End the response of the present upstream, and the span of the call."""
        exchange, span = self.exchange, self._call_span
        self.exchange = None
        if exchange is not None:
            exchange.close()
        if span is not NO_SPAN:
            self._call_span = NO_SPAN
            if error is not None:
                span.fail(error)
            span.end()
