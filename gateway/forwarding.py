"""Forwarding: choose an upstream, pass a request on, try another one while nothing was answered."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Final

import msgspec

from backends.base import Exchange, TokenUsage, UpstreamCall
from backends.errors import UpstreamFailed, UpstreamUnreachable
from gateway.accounts import Account
from gateway.admission import AdmissionController, Ask, Entry
from gateway.errors import GatewayError, UpstreamBroken, UpstreamBusy, UpstreamUnavailable
from gateway.fleet import Fleet, FleetWorker
from gateway.queue import CentralQueue
from gateway.telemetry.tracing import NO_SPAN, Span
from policies.room import Need
from policies.types import ServiceLevel

MOST_ATTEMPTS: Final = 3
"""Of one request. More would multiply the load on those that are left when some are out."""

MOST_CALLS: Final = 2
"""Of one request to one upstream: the first may have met a connection that was being closed."""

_ERRORS: Final = 400
_UNAVAILABLE: Final = 503
_TOO_MANY: Final = 429
_BAD_GATEWAY: Final = 502
_MOST_REASON_BYTES: Final = 64 << 10


UNSAID_OUTPUT_TOKENS: Final = 1024
"""What an answer is taken to have at most where the request does not say; what answers turn out to
have is learnt as a share of it."""


@dataclass(frozen=True, slots=True)
class ForwardJob:
    """A client's request for an upstream, and what is known of it without a tokenizer.

    Attributes:
        ask: what it takes, by an estimate.
        stream: whether events are asked for.
    """

    ask: Ask
    call: UpstreamCall
    stream: bool = False


def forward_ask(
    request_id: str,
    prompt_tokens: int,
    max_tokens: int | None,
    n: int,
    service: ServiceLevel,
    account: Account,
) -> Ask:
    """Return what a request takes; `max_tokens` is per choice, None is all that fits."""
    most = UNSAID_OUTPUT_TOKENS if max_tokens is None else max_tokens
    capped = account.capped(service)
    need = Need(n, prompt_tokens, (prompt_tokens + most) * n, capped.tpot_s)
    return Ask(request_id, (need,), most, capped, account.name, account.share)


@dataclass(frozen=True, slots=True)
class Answer:
    """An upstream's answer that has begun, or that has no body.

    Attributes:
        blocks: the body, from its first byte; ends with `BackendFailed` if the upstream breaks.
    """

    worker_id: str
    exchange: Exchange
    headers: Mapping[str, str]
    blocks: AsyncGenerator[bytes, None]

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.exchange.status

    def usage(self) -> TokenUsage:
        """Return the tokens so far."""
        return self.exchange.usage()


@dataclass(frozen=True, slots=True)
class _Refusal:
    """An answer that says to try elsewhere, or later: 429, 502 or 503."""

    worker: FleetWorker
    exchange: Exchange
    body: bytes


class Forwarder:
    """Runs jobs on the upstreams of a fleet."""

    def __init__(self, fleet: Fleet, queue: CentralQueue, admission: AdmissionController) -> None:
        """Use a fleet of upstreams; it need not have started yet."""
        self._fleet = fleet
        self._queue = queue
        self._admission = admission
        self._turns = count(1)
        self._last_turn: dict[str, int] = {}

    @asynccontextmanager
    async def run(self, job: ForwardJob, span: Span = NO_SPAN) -> AsyncIterator[Answer]:
        """Admit a job, let it wait its turn, pass it on; leaving the context early cancels it.

        Raises:
            Overloaded, QuotaExceeded: not now; the error says when.
            GatewayError: on entering: no upstream answers it. Nothing was sent to the client yet.
        """
        if not self._fleet.open:
            yield self._last_word(None, None)
            return
        with span.child("admit"):
            entry = self._admission.admit(job.ask)
        try:
            async with self._turn(entry, span) as first, self._passed(job, first) as answer:
                if answer.status < _ERRORS:
                    self._admission.answered(entry)
                try:
                    yield answer
                finally:
                    _book(entry, answer)
        finally:
            self._admission.settle(entry)

    @asynccontextmanager
    async def _turn(self, entry: Entry, span: Span) -> AsyncIterator[FleetWorker]:
        """Wait until an upstream has room; it is reserved there until the context is left."""
        waiting = self._admission.waiting(entry, 0)
        with span.child("queue"):
            worker = await self._queue.turn(waiting)
        try:
            yield worker
        finally:
            worker.release(waiting.request_id)
            self._queue.pump()

    @asynccontextmanager
    async def _passed(self, job: ForwardJob, first: FleetWorker) -> AsyncIterator[Answer]:
        """Pass a job on to an upstream, and to others if that one does not answer it.

        Raises:
            GatewayError: no one answers it.
        """
        tried: list[str] = []
        refusal: _Refusal | None = None
        failure: UpstreamFailed | None = None
        worker: FleetWorker | None = self._taken(first)
        while worker is not None:
            tried.append(worker.worker_id)
            async with AsyncExitStack() as stack:
                try:
                    answer = await _begin(stack, worker, job.call)
                    refusal = await _refused(worker, answer)
                except UpstreamFailed as error:
                    failure, refusal = error, None
                else:
                    if refusal is None:
                        yield answer
                        return
            again = len(tried) < MOST_ATTEMPTS
            worker = self._choose(tried, again=refusal is None) if again else None
        yield self._last_word(refusal, failure)

    def _taken(self, worker: FleetWorker) -> FleetWorker:
        """Note that it is a worker's turn, and return it."""
        self._last_turn[worker.worker_id] = next(self._turns)
        return worker

    def _choose(self, tried: list[str], *, again: bool) -> FleetWorker | None:
        """Return the upstream with the fewest requests in flight; of equals, the one longest idle.

        Args:
            tried: ids of those that were asked already: they come last.
            again: whether one of these may be asked again.
        """
        there = [worker for worker in self._fleet.workers if worker.upstream.rest is None]
        fresh = [worker for worker in there if worker.worker_id not in tried]
        asked = [worker for worker in there if tried.count(worker.worker_id) < MOST_CALLS]
        candidates = fresh or (asked if again else [])
        if not candidates:
            return None
        chosen = min(
            candidates,
            key=lambda worker: (
                worker.backend.load().running,
                self._last_turn.get(worker.worker_id, 0),
            ),
        )
        return self._taken(chosen)

    def _last_word(self, refusal: _Refusal | None, failure: UpstreamFailed | None) -> Answer:
        """Return the last refusal if it says how to go on.

        Raises:
            GatewayError: otherwise, the reason why nobody answered.
        """
        retry_after_s = self._retry_after_s()
        if refusal is not None:
            return _passed_refusal(refusal, retry_after_s)
        if failure is not None:
            raise failure
        rests = [worker.upstream.rest for worker in self._fleet.workers]
        if any(rest is not None and rest.status == _UNAVAILABLE for rest in rests):
            raise UpstreamUnavailable("no upstream serves now", retry_after_s=retry_after_s)
        raise UpstreamBusy("every upstream has too much to do", retry_after_s=retry_after_s)

    def _retry_after_s(self) -> int:
        """Return the whole seconds until an upstream may be called again, 1 or more."""
        rests = [worker.upstream.rest for worker in self._fleet.workers]
        return max(1, math.ceil(min(rest.remaining_s if rest else 0.0 for rest in rests)))


def _book(entry: Entry, answer: Answer) -> None:
    """Book what an answer took."""
    usage = answer.usage()
    entry.prompt_tokens, entry.output_tokens = usage.prompt, usage.output
    if answer.status < _ERRORS and not answer.exchange.error_sent:
        entry.ended = sum(need.sequences for need in entry.ask.needs)


async def _begin(stack: AsyncExitStack, worker: FleetWorker, call: UpstreamCall) -> Answer:
    """Send the call and wait for the first bytes of the answer.

    Raises:
        UpstreamFailed: none came.
    """
    exchange = await stack.enter_async_context(worker.upstream.forward(call))
    blocks = await stack.enter_async_context(aclosing(exchange.blocks()))
    try:
        first = await anext(blocks, b"")
    except UpstreamFailed as error:
        raise UpstreamUnreachable(str(error)) from error
    rest = await stack.enter_async_context(aclosing(_joined(first, blocks)))
    return Answer(worker.worker_id, exchange, exchange.headers, rest)


async def _joined(first: bytes, blocks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    if first:
        yield first
    async for block in blocks:
        yield block


async def _refused(worker: FleetWorker, answer: Answer) -> _Refusal | None:
    """Return the refusal an answer is, or None.

    Raises:
        UpstreamBroken: it is an error of the upstream's that no other attempt helps.
    """
    status = answer.status
    if status not in {_TOO_MANY, _BAD_GATEWAY, _UNAVAILABLE} and not _is_broken(status):
        return None
    body = b""
    async for block in answer.blocks:
        body += block
        if len(body) > _MOST_REASON_BYTES:
            break
    if _is_broken(status):
        raise UpstreamBroken(f"the upstream answered {status}{_reason(body)}")
    return _Refusal(worker, answer.exchange, body)


def _is_broken(status: int) -> bool:
    """Whether a status makes no sense to our client: a redirection, or an error of its own."""
    return 300 <= status < 400 or (status >= 500 and status not in {501, 502, 503})


def _passed_refusal(refusal: _Refusal, retry_after_s: int) -> Answer:
    status = refusal.exchange.status
    if status == _TOO_MANY:  # its body may say whose quota is spent
        headers = {k: v for k, v in refusal.exchange.headers.items() if k.lower() != "retry-after"}
        headers["Retry-After"] = str(retry_after_s)
        blocks = _once(refusal.body)
        return Answer(refusal.worker.worker_id, refusal.exchange, headers, blocks)
    kind: type[GatewayError] = UpstreamUnavailable if status == _UNAVAILABLE else UpstreamBroken
    message = f"the upstream answered {status}{_reason(refusal.body)}"
    raise kind(message, retry_after_s=retry_after_s if status == _UNAVAILABLE else None)


async def _once(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body


def _reason(body: bytes) -> str:
    """Return what an upstream's error says, after a colon, or nothing."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return ""
    error = found.get("error") if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return f": {message}" if isinstance(message, str) and message else ""
