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

from aiohttp.abc import AbstractStreamWriter

from draftgate.backends.types import Delta
from draftgate.gateway.dispatch.dispatcher import RunningJob
from draftgate.gateway.errors import GatewayError, as_gateway_error
from draftgate.gateway.http.answer import Answer
from draftgate.gateway.http.context import request_id_of
from draftgate.gateway.http.direct import DirectResponse, Request, begin_response, new_response
from draftgate.gateway.http.readers import Reader, Readers
from draftgate.gateway.http.replies.rendering import COMMENT
from draftgate.gateway.offload import offload
from draftgate.gateway.telemetry.watch import Ending, RequestWatch

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
    """

    def __init__(self, request: Request, readers: Readers) -> None:
        self._request = request
        self.reader = Reader(request, readers)
        self.response = new_response(request, EVENT_HEADERS)
        self._transport = request.transport
        self._protocol = request.protocol
        self._writer: AbstractStreamWriter | DirectResponse | None = None
        self._chunked = False
        self._beginning = asyncio.Lock()

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return request_id_of(self._request)

    @property
    def begun(self) -> bool:
        """Whether the status line has been sent."""
        return self.response.prepared

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
        # The lock prevents a heartbeat and the first event from sending the headers twice.
        async with self._beginning:
            if self._writer is None:
                self.reader.limit_buffers()
                self._writer = await begin_response(self._request, self.response)
                self._chunked = self.response.headers.get("Transfer-Encoding") == "chunked"
            return self._writer

    async def end(self, events: bytes = b"") -> None:
        """Send complete events with the end of the response. A second call has no effect.

        Raises:
            ConnectionResetError: the client has disconnected.
        """
        if self._writer is None:
            await self._begin()
        await self.response.write_eof(events)


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
            self._wait()


async def stream_answer(events: EventStream, answer: Answer, running: RunningJob) -> None:
    """Send a response as events.

    Args:
        running: the context of the job (`Dispatcher.run`).

    Raises:
        ConnectionResetError: the client has disconnected, and the request was cancelled.
        Exception: any error before the first event. Later errors are sent as an event.
    """

    def take(delta: Delta) -> bool:
        """Send the text of a delta in the callback that delivers it."""
        if not events.writes_directly:
            return False
        chunk = answer.take(delta)
        if chunk:
            events.write_directly(chunk)
        return True

    async with OneEnding(events, answer.watch, answer.rendering.failure):
        async with running as run:
            answer.run = run
            run.take = take
            events.reader.watch(run, lambda: answer.watch.output_tokens)
            with Heartbeats(events, answer.rendering.heartbeat):
                async for delta in run.deltas:
                    answer.observe(delta)
                    if not (delta.text or delta.finish_reason or delta.logprobs or delta.steps):
                        continue  # the worker holds the text back
                    if len(delta.logprobs) <= INLINE_LOGPROBS and delta.prompt_logprobs is None:
                        chunk = answer.chunk(delta)
                    else:
                        chunk = await offload(answer.chunk, delta)
                    if chunk:
                        await events.write(chunk)
                        if not (answer.complete or run.unread_tokens):
                            await events.coalesced()
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
                if isinstance(error, ConnectionResetError):
                    return False
                shown = as_gateway_error(error)
                self._watch.fail(Ending.FAILED, shown.status, error)
                await events.write(self._failure(shown, events.request_id))
        finally:
            events.reader.left()
        if events.begun:
            await events.end()
        return True
