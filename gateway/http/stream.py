"""Server-sent events, with one event per delta and exactly one ending.

A stream ends after the last finish reason (`Rendering.ending`), or with one error event. An error
before the first event becomes an ordinary HTTP error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from draftgate.backends.streams import UnreadDeltas
from draftgate.backends.types import Delta
from draftgate.gateway.dispatch.dispatcher import RunningJob
from draftgate.gateway.dispatch.upstreams.fallbacks import reason_of
from draftgate.gateway.errors import GatewayError, as_gateway_error
from draftgate.gateway.http.answer import Answer
from draftgate.gateway.http.context import PASSES_ON, READERS, request_id_of
from draftgate.gateway.http.direct import DirectResponse, Request
from draftgate.gateway.http.readers import Reader, Readers
from draftgate.gateway.http.replies.rendering import COMMENT
from draftgate.gateway.http.sending import begin_response, new_response
from draftgate.gateway.offload import offload
from draftgate.gateway.telemetry.ending import Ending
from draftgate.gateway.telemetry.watch import RequestWatch

INLINE_LOGPROBS: Final = 32
"""Deltas with more log probabilities, or with those of a prompt, are rendered in a thread. A token
with 20 alternatives takes 40 us (one core, Zen 4, 2026-11-21). Merged deltas of a slow client have
many tokens."""

UNBUFFERED: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers that make proxies forward events immediately."""

EVENT_HEADERS: Final = {"Content-Type": "text/event-stream; charset=utf-8", **UNBUFFERED}

KEEPALIVE_S: Final = 5.0
"""The longest silence of a stream, in seconds, before a heartbeat is sent. Proxies close silent
connections. Streams are silent while they wait for the first token or for another worker."""


class EventStream:
    """A response of server-sent events.

    The headers are sent with the first event, and the end of the response with the last event.

    Attributes:
        comment_bytes: bytes of heartbeats that were sent.
        reader: the client that reads the stream.
        response: the response, whose headers may change until it has begun.
        begun: whether the headers are final.
    """

    def __init__(self, request: Request, readers: Readers) -> None:
        self._request = request
        self.reader = Reader(request, readers)
        self.response = new_response(request, EVENT_HEADERS)
        self.begun = False
        self.comment_bytes = 0
        self._transport = request.transport
        self._protocol = request.protocol
        self._writer: AbstractStreamWriter | DirectResponse | None = None
        self._chunked = False
        self._beginning: asyncio.Future[None] | None = None  # while the headers are sent

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return request_id_of(self._request)

    async def write(self, events: bytes) -> None:
        """Send complete events, and wait while the client reads slowly.

        Raises:
            ConnectionResetError: the client has disconnected.
        """
        writer = self._writer or await self._begin()
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has disconnected")
        if self.reader.written_bytes:
            self.write_directly(events)
        else:
            await writer.write(events)  # with the headers
            self.reader.count_write(len(events))
        if self._protocol.writing_paused:
            await self.reader.drained(writer)

    def passes_on(self, error: BaseException) -> bool:
        """Return whether the next model of a chain responds after an error, on this stream."""
        if not self._request.get(PASSES_ON, False) or not isinstance(error, Exception):
            return False
        return self.reader.written_bytes <= self.comment_bytes and reason_of(error) is not None

    def left(self) -> None:
        """Stop checking the client, because the stream has ended."""
        self.reader.left()

    @property
    def writes_directly(self) -> bool:
        """Whether `write_directly` may be called now."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if self.reader.pacing.hold_s:
            return False  # `coalesced` waits between writes
        return self.reader.written_bytes > 0 and not self._protocol.writing_paused

    def write_directly(self, events: bytes) -> None:
        """Send complete events after others, while the client reads in time."""
        # A direct write avoids two coroutines of aiohttp, which cost 1.2 us per event (one core,
        # Zen 4, 2026-11-21).
        assert self._transport is not None
        self._transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)
        self.reader.count_write(len(events))

    async def coalesced(self) -> None:
        """Wait after a write while further tokens are coalesced into the next chunk, if they are.

        The first token of a chunk does not wait if the last write was long ago.
        """
        if self.reader.pacing.hold_s:
            await asyncio.sleep(self.reader.pacing.hold_s)

    async def _begin(self) -> AbstractStreamWriter | DirectResponse:
        while self._writer is None:
            # A heartbeat and the first event must not both send the headers.
            if self._beginning is not None:
                await asyncio.wait((self._beginning,))
                continue
            self._beginning = beginning = asyncio.get_running_loop().create_future()
            try:
                self.reader.limit_buffers()
                self._writer = await begin_response(self._request, self.response)
                self.begun = True
                self._chunked = self.response.headers.get("Transfer-Encoding") == "chunked"
            finally:
                self._beginning = None
                beginning.set_result(None)
        return self._writer

    async def end(self, events: bytes = b"") -> None:
        """Send complete events with the end of the response. A second call has no effect.

        Raises:
            ConnectionResetError: the client has disconnected.
        """
        if self._writer is None:
            await self._begin()
        await self.response.write_eof(events)


_EVENTS: Final = web.RequestKey("events", EventStream)


def event_stream(request: Request) -> EventStream:
    """Return the stream of the response to a request, which is the same for each of its models."""
    events = request.get(_EVENTS)
    if events is None:
        events = EventStream(request, request.app[READERS])
        if PASSES_ON in request:
            request[_EVENTS] = events
    return events


def begun_stream(request: Request) -> EventStream | None:
    """Return the stream of a request whose client has got comments, or None before."""
    events = request.get(_EVENTS)
    return events if events is not None and events.begun else None


class Heartbeats:
    """A context manager that sends heartbeats while a stream is silent.

    A timer is cheaper than a task for each stream, which costs 9 us, and most waits are short (one
    core, Zen 4, 2026-11-21).
    """

    def __init__(self, events: EventStream, heartbeat: bytes = COMMENT) -> None:
        self._events = events
        self._heartbeat = heartbeat
        self._loop = asyncio.get_running_loop()
        self._sending: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()

    async def sent(self) -> None:
        """Wait until the current heartbeat has been sent."""
        if self._sending is not None:
            await self._sending

    def _wait(self) -> None:
        self._seen_bytes = self._events.reader.written_bytes
        self._timer = self._loop.call_later(KEEPALIVE_S, self._due)

    def _due(self) -> None:
        if self._events.reader.written_bytes > self._seen_bytes:
            self._wait()
        else:
            self._sending = self._loop.create_task(self._send())

    async def _send(self) -> None:
        # aiohttp itself cancels the handler if the client has disconnected.
        with suppress(ConnectionResetError):
            await self._events.write(self._heartbeat)
            self._events.comment_bytes += len(self._heartbeat)
            self._wait()


class StreamedDeltas:
    """The sink of a streamed response.

    While the client reads in time, events are sent in the call that delivers a delta. Otherwise the
    deltas wait, and the task of the request sends them with `send_unread`.
    """

    def __init__(self, events: EventStream, answer: Answer) -> None:
        self.unread = UnreadDeltas()
        self._events = events
        self._answer = answer
        self._keeps = False  # until `send_unread` has sent all deltas

    def put(self, delta: Delta) -> None:
        """Send the events of a delta, or keep the delta."""
        if self._keeps:
            self.unread.put(delta)
        elif not self._events.writes_directly or _is_long(delta):
            self._keeps = True
            self.unread.put(delta)
            self._answer.run.wake()
        elif events := self._answer.events(delta):
            self._events.write_directly(events)

    async def send_unread(self) -> None:
        """Send the events of the deltas that wait, as fast as the client reads."""
        answer = self._answer
        while self.unread:
            delta = self.unread.pop()
            if _is_long(delta):
                answer.observe(delta)
                events = await offload(answer.chunk, delta)
            else:
                events = answer.events(delta)
            if events:
                await self._events.write(events)
                if not (answer.complete or self.unread):
                    await self._events.coalesced()
        self._keeps = False


def _is_long(delta: Delta) -> bool:
    """Return whether a delta is rendered in a thread."""
    return len(delta.logprobs) > INLINE_LOGPROBS or delta.prompt_logprobs is not None


async def stream_answer(events: EventStream, answer: Answer, running: RunningJob) -> None:
    """Send a response as events.

    Args:
        running: the context of the job (`Dispatcher.run`).

    Raises:
        ConnectionResetError: the client has disconnected, and the request was cancelled.
        Exception: any error before the first event. Later errors are sent as an event.
    """
    async with OneEnding(events, answer.watch, answer.rendering.failure):
        async with running as run:
            sink = StreamedDeltas(events, answer)
            answer.run, run.sink, run.unread = run, sink.put, sink.unread
            events.reader.watch(run, lambda: answer.watch.output_tokens)
            with Heartbeats(events, answer.rendering.heartbeat):
                while await run.wait():
                    await sink.send_unread()
        await events.end(await answer.ending())


class OneEnding:
    """A context that ends a stream that its block has begun, with an error event after an error.

    Raises:
        ConnectionResetError: the client has disconnected.
        Exception: any error of the block before the first event.
    """

    def __init__(
        self,
        events: EventStream,
        watch: RequestWatch,
        failure: Callable[[GatewayError, str], bytes],
    ) -> None:
        """Begin a context.

        Args:
            failure: a function that renders the error event of a request with an id.
        """
        self._events = events
        self._watch = watch
        self._failure = failure

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        events = self._events
        try:
            if error is not None:
                if not (isinstance(error, Exception) and events.begun):
                    return False
                if isinstance(error, ConnectionResetError) or events.passes_on(error):
                    return False
                shown = as_gateway_error(error)
                self._watch.fail(Ending.FAILED, shown.status, error)
                await events.write(self._failure(shown, events.request_id))
        finally:
            events.left()
        if events.begun:
            await events.end()
        return True
