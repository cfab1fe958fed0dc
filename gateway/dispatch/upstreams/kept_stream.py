"""What the gateway keeps of a stream, so that another upstream can continue it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

from draftgate.backends.base import Exchange, TokenUsage, Upstream, UpstreamCall
from draftgate.backends.errors import UpstreamFailed
from draftgate.backends.openai.continuation import (
    CHATS,
    TOKENIZE,
    JoinedStream,
    RestOfStream,
    count_request,
    counted_tokens,
    is_servers_fault,
    rest_of,
)
from draftgate.backends.openai.events import last_event
from draftgate.backends.openai.stream_output import NotContinuable, read_output
from draftgate.gateway.dispatch.admission import AdmissionController, Entry
from draftgate.gateway.dispatch.decisions import Decision
from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.dispatch.recovery import wait_for
from draftgate.gateway.dispatch.routing import View
from draftgate.gateway.dispatch.run import NotResumed, Resume, Watch
from draftgate.gateway.dispatch.upstreams.pools import UpstreamPools
from draftgate.gateway.dispatch.upstreams.refusals import read_and_close
from draftgate.gateway.dispatch.upstreams.rules import ForwardingRules, RetryCause
from draftgate.gateway.dispatch.waiting import Waiting
from draftgate.gateway.dispatch.watchdog import Watchdog
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.offload import offload
from draftgate.gateway.tracing import Span
from draftgate.policies.resilience.failover import Cause, GivenUp, Loss, given_up
from draftgate.policies.types import RequestView
from draftgate.policies.values import replace

_INLINE_BYTES: Final = 32 << 10
"""More bytes are parsed in a thread. The chunks of 32 KiB take 2.3 ms (AMD EPYC, one busy
core, 2026-11-29)."""

_COUNT_S: Final = 2.0
"""Longest wait for the number of tokens of a text in seconds. A server answers in milliseconds,
and the client sees no text meanwhile. (Chosen, 2026-11-29.)"""


class Continuer(Protocol):
    """What all kept streams share (`forwarder.Forwarder`)."""

    fleet: Fleet
    queue: CentralQueue
    admission: AdmissionController
    pools: UpstreamPools
    watchdog: Watchdog
    rules: ForwardingRules

    def takes_retry(self, cause: RetryCause) -> bool:
        """Return whether the budget allows a retry now, and count the retry if so."""
        ...

    def changed_call(self, call: UpstreamCall, body: bytes, model: str) -> UpstreamCall:
        """Return a call with another body, also for upstreams with another name of its model."""
        ...


class KeptStream:
    """The events of a stream that its client has, and the upstreams that it has lost.

    The watchdog watches it while an upstream sends it (`watchdog.WatchedStream`). The states are
    those of its request (`forward_state.ForwardState`).

    Attributes:
        error: why the present upstream is lost, or None.
        error_passed: whether the client gets an error event of a lost upstream.
        is_complete: whether the client has the whole output, without the end of the stream.
        tokens: number of output tokens at the last loss, or None before one.
        outputs: number of events with output of lost upstreams.
        num_deltas: number of blocks so far.
        runs: whether the gateway waits for the upstream.
        preempted: its place in the queue if another request has taken its upstream, or None.
    """

    __slots__ = (
        "_blocks", "_call", "_entry", "_error_event", "_joined", "_leaving", "_left_bytes",
        "_losses", "_prompt_tokens", "_rest", "_resumes", "_seen_pieces", "_shared", "_stalled",
        "_watch", "_watched", "error", "error_passed", "is_complete", "leave", "num_deltas",
        "outputs", "preempted", "runs", "tokens",
    )  # fmt: skip

    is_owed: Final = False  # upstreams do not report steps

    def __init__(
        self,
        shared: Continuer,
        call: UpstreamCall,
        entry: Entry,
        worker: FleetWorker,
        watch: Watch,
    ) -> None:
        """Keep a stream that a worker sends.

        Args:
            call: the request of the client.
            watch: takes the events of the request.
        """
        self.error: UpstreamFailed | None = None
        self.error_passed = self.is_complete = self.runs = False
        self.tokens: int | None = None
        self.num_deltas = self.outputs = 0
        self.leave: Callable[[], None] | None = None
        self._shared = shared
        self._call = call
        self._entry = entry
        self._watch = watch
        self._blocks: list[bytes] = []
        self._left_bytes = shared.rules.most_bytes
        self._rest: RestOfStream | None = None  # since the last loss
        self._losses: list[Loss] = []
        self._resumes: list[Resume] = []
        self._seen_pieces = self._prompt_tokens = 0
        self._stalled = False
        self.preempted: Waiting | None = None
        self._error_event = b""
        self._joined: JoinedStream | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._watched: FleetWorker | None = worker
        shared.watchdog.watch(self, worker)

    async def read(self, exchange: Exchange, block: bytes) -> bytes:
        """Return the next events for the client, or nothing at the end or if `error` is set.

        Args:
            block: complete events of the response that have been read already, or nothing.
        """
        shown = b""
        self.leave = exchange.close
        while not shown and self.error is None:
            self.runs = not block
            try:
                block = block or await exchange.read()
                if not block:
                    break
                self.num_deltas += 1
                if exchange.error_sent:
                    block = self._without_error(block)
                shown, block = self._add(block), b""
            except UpstreamFailed as error:
                self._lose(error)
            finally:
                self.runs = False
        return shown

    def _without_error(self, block: bytes) -> bytes:
        """Keep an error event at the end of some events back, if it is not about the request."""
        event = last_event(block)
        if not is_servers_fault(event):
            return block
        self._error_event = event
        self._lose(UpstreamFailed("the upstream sent an error event"))
        return block[: len(block) - len(event)]

    def _add(self, block: bytes) -> bytes:
        """Keep events of the present upstream, and return those for the client.

        Raises:
            UpstreamFailed: the events of a continuation cannot be read.
        """
        if self._joined is not None:
            try:
                block = self._joined.convert(block)
            except NotContinuable as error:
                raise UpstreamFailed(f"the continuation cannot be read: {error}") from error
        self._left_bytes -= len(block)
        if self._left_bytes >= 0:
            self._blocks.append(block)
        elif self._blocks:
            self._blocks = []
        return block

    @property
    def patience_s(self) -> float:
        """Silence of the upstream that counts as a loss, in seconds."""
        return self._shared.rules.patience_s

    def fail(self, error: Exception) -> None:
        """Leave an upstream that has sent nothing for too long, if another one can continue."""
        if self._leaving is None or self._leaving.done():
            self._leaving = asyncio.create_task(self._leave_silent())

    async def _leave_silent(self) -> None:
        """Leave the present upstream if another one can continue, as `fail` does."""
        seen, rest, worker = self.num_deltas, await self._find_rest(), self._watched
        if self.num_deltas != seen or self.error is not None or worker is None:
            return  # the upstream has sent something meanwhile
        why = self._given_up(worker.worker_id, rest, leaves=True)
        if why is None and self.leave is not None:
            self._stalled = True
            self._lose(UpstreamFailed("the upstream stopped sending"))
            self.leave()
        elif why is GivenUp.UNABLE:
            self.unwatch()  # and wait for the upstream as long as the client does
        elif why is GivenUp.BUDGET:
            self.num_deltas += 1  # which begins the silence again

    async def is_continuable(self) -> bool:
        """Return whether another request can ask for the rest of the stream so far."""
        seen = -1
        while seen != self.num_deltas and self.has_begun:  # events may arrive meanwhile
            seen = self.num_deltas
            if await self._find_rest() is None:
                return False
        return self.has_begun

    @property
    def has_begun(self) -> bool:
        """Whether the upstream has sent events for the client, and neither all nor is lost."""
        sends = self.error is None and self.leave is not None and bool(self._blocks)
        return sends and b"[DONE]" not in self._blocks[-1][-32:]

    def preempt(self, waiting: Waiting) -> None:
        """Leave the present upstream for another request.

        Args:
            waiting: the place in the queue with which the stream waits for the next upstream.
        """
        assert self.leave is not None
        self.preempted = waiting
        self._lose(UpstreamFailed("a request of a higher class took its place"))
        self.leave()

    def _lose(self, error: UpstreamFailed) -> None:
        """Note the first error. Leaving a stalled upstream makes `read` raise another one."""
        if self.error is None:
            self.error = error

    def unwatch(self) -> None:
        """End the watch of the present upstream."""
        worker, self._watched = self._watched, None
        if worker is not None:
            self._shared.watchdog.unwatch(self, worker)

    async def lose(self, output_tokens: int, outputs: int) -> None:
        """Record that the present upstream is lost.

        Args:
            output_tokens, outputs: tokens, and events with output, of the stream so far.
        """
        self.unwatch()
        self.tokens, self.outputs = output_tokens, outputs
        self._rest = await self._find_rest()
        self.is_complete = self._rest is not None and self._rest.output.has_finished

    async def _find_rest(self) -> RestOfStream | None:
        """Return what the rest of the stream needs, or None if it cannot be requested."""
        kept_bytes = self._shared.rules.most_bytes - self._left_bytes
        if self._left_bytes < 0:
            return None
        if max(kept_bytes, len(self._call.body)) <= _INLINE_BYTES:
            return _rest_in(self._call, self._blocks)
        return await offload(_rest_in, self._call, list(self._blocks))

    async def wait(self, lost: str) -> GivenUp | None:
        """Return why the stream cannot continue, or None once it can, or if it is complete.

        Args:
            lost: id of the lost upstream.
        """
        fleet, rest = self._shared.fleet, self._rest
        if self.is_complete:
            return None
        if rest is None:
            return GivenUp.UNABLE
        if not (self._stalled or self.preempted):
            await wait_for(fleet, lambda: fleet.is_open_for(self._call.model))
            why = self._given_up(lost, rest)
            if why is not None:
                return why
        if self.preempted is None:
            self._losses.append(self._loss(lost, rest))
        self._seen_pieces = rest.output.pieces
        self._prompt_tokens = rest.output.prompt_tokens or self._prompt_tokens
        return None

    def _given_up(
        self, lost: str, rest: RestOfStream | None, *, leaves: bool = False
    ) -> GivenUp | None:
        """Return why no upstream can continue the stream now, or None if one may.

        Args:
            leaves: whether the present upstream may still send the rest itself.
        """
        fleet, rules = self._shared.fleet, self._shared.rules
        able = fleet.open_among(fleet.workers, self._call.model)
        if leaves:
            able = [one for one in able if one.worker_id != lost]
        if not able or fleet.ending:
            return GivenUp.NO_WORKER
        if rest is None:
            return GivenUp.UNABLE
        why = given_up([*self._losses, self._loss(lost, rest)], rules.most_resumes, len(able))
        return why or (None if self._shared.takes_retry(RetryCause.LOST) else GivenUp.BUDGET)

    def _loss(self, worker_id: str, rest: RestOfStream) -> Loss:
        return Loss(worker_id, rest.output.pieces - self._seen_pieces)

    async def turn(self, span: Span, view: View) -> FleetWorker:
        """Wait until an upstream has capacity, and reserve it.

        A stream precedes new requests, or only those of its class if it has been preempted.

        Raises:
            BackendFailed, QueueTimeout: no upstream has.
        """
        entry, queue = self._entry, self._shared.queue
        need = entry.needs[0]
        need = replace(need, prompt_tokens=need.prompt_tokens + (self.tokens or 0))
        lost = frozenset([one.worker_id for one in self._losses])
        if self.preempted is None:
            waiting = self._shared.admission.waiting(entry, 0)
            waiting = waiting.for_rest(entry.request_id, need, lost, 0)
            waiting.returning = True
        else:
            waiting = self.preempted
            waiting.need, waiting.avoid = need, lost
        waiting.has_blocks = True  # the rest is not divided between upstreams with roles
        with span.child("queue"):
            return (await queue.turn(waiting, view)).worker

    async def rest_on(self, worker: FleetWorker) -> UpstreamCall:
        """Return the request for the rest, for which an upstream counts the tokens of the text."""
        rest = self._rest
        assert rest is not None
        self.tokens = tokens = await self._count(rest, worker)
        self.is_complete = rest.is_complete(tokens)
        if len(self._call.body) <= _INLINE_BYTES:
            body = rest.request(tokens)
        else:
            body = await offload(rest.request, tokens)
        return self._shared.changed_call(self._call, body, self._call.model)

    async def _count(self, rest: RestOfStream, worker: FleetWorker) -> int:
        """Return the number of tokens of the text in the request for the rest.

        The upstream counts them if the chunks do not say. If it cannot, each chunk counts as one.
        """
        output = rest.output
        if not rest.text or output.tokens is not None:
            return output.tokens or 0
        model = self._call.model
        call = self._shared.changed_call(self._call, count_request(model, rest.text), model)
        call = call._replace(path=TOKENIZE, sequences=0, stream=False)
        found = None
        upstream: Upstream = worker.backend  # type: ignore[assignment]
        with suppress(UpstreamFailed, TimeoutError):
            async with asyncio.timeout(_COUNT_S):
                exchange = await upstream.forward(call)
                body = await read_and_close(exchange)
                found = counted_tokens(body if exchange.status == 200 else b"")
        return output.pieces if found is None else found

    def join(
        self, lost: str, worker: FleetWorker, decision: Decision | None, view: RequestView
    ) -> None:
        """Continue the client's stream with the events of another upstream.

        Args:
            lost: id of the lost upstream.
            decision: the decision about the request, or None without one.
            view: the policies' view of the request.
        """
        rest, tokens, sink = self._rest, self.tokens or 0, worker.worker_id
        assert rest is not None
        cause = self._cause
        reason = str(self.error)
        resume = Resume(0, lost, sink, cause, reason, tokens, same_numerics_class=False)
        self._resumes.append(resume)
        metrics = {"worker_id": sink, "resumes": [one.shown() for one in self._resumes]}
        self._joined = JoinedStream(rest, tokens, metrics, self._prompt_tokens)
        self.error, self._stalled, self._error_event = None, False, b""
        self.preempted = self.leave = None
        self._watch(resume)
        pools = self._shared.pools
        pools.record_move(self._entry, decision, lost, worker, cause=cause, view=view)
        self._watched = worker
        self._shared.watchdog.watch(self, worker)

    @property
    def _cause(self) -> Cause:
        if self.preempted is not None:
            return Cause.PREEMPTED
        return Cause.STALLED if self._stalled else Cause.FAILED

    def give_up(self, why: GivenUp, later: BaseException | None) -> bytes:
        """Return the error event of the lost upstream.

        Args:
            later: why no other upstream has continued, if they were asked.

        Raises:
            UpstreamFailed: the upstream has sent none.
        """
        self._watch(NotResumed(self._cause, why))
        if self._error_event:
            self.error_passed, self.error = True, None
            return self._error_event
        assert self.error is not None
        if later is None:
            raise self.error
        # The later error may have the address of an upstream, which only operators know.
        raise UpstreamFailed(f"{self.error}; no other upstream could continue it") from later

    def closing(self) -> bytes:
        """Return the last events of a stream whose output is complete."""
        rest, prompt_tokens = self._rest, self._entry.needs[0].prompt_tokens
        assert rest is not None
        self.error = None
        prompt_tokens = rest.output.prompt_tokens or self._prompt_tokens or prompt_tokens
        return JoinedStream(rest, self.tokens or 0, {}, prompt_tokens).closing()

    def usage(self, present: TokenUsage | None) -> TokenUsage:
        """Return the usage of the client's stream after a loss.

        Args:
            present: the usage of the present upstream, or None without one.
        """
        if present is not None and present.prompt and self._joined is not None:
            return self._joined.usage(present)
        output = (self.tokens or 0) + (0 if present is None else present.output)
        prompt_tokens = self._prompt_tokens or self._entry.needs[0].prompt_tokens
        return TokenUsage(prompt_tokens, 0, output)


def _rest_in(call: UpstreamCall, blocks: Sequence[bytes]) -> RestOfStream | None:
    try:
        return rest_of(call.body, read_output(blocks), is_chat=call.path == CHATS)
    except NotContinuable:
        return None
