"""Server-sent events: one per delta, and exactly one ending.

A stream ends with a finish reason for every choice and what ends such an answer (`Rendering`), or
with one error event and nothing after it. An error before the first event is an ordinary HTTP error
instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from draftgate.backends.types import Delta
from draftgate.gateway.dispatch.run import Run
from draftgate.gateway.errors import GatewayError, as_gateway_error
from draftgate.gateway.http.answer import Answer
from draftgate.gateway.http.heartbeats import Heartbeats
from draftgate.gateway.http.readers import Reader, SlowReaders
from draftgate.gateway.offload import offload
from draftgate.gateway.telemetry.watch import Ending, RequestWatch

INLINE_LOGPROBS: Final = 32
"""A delta of more tokens with log probabilities, merged for a reader that fell behind, is spelled
in a thread: with 20 alternatives a token takes 40 us (one core, Zen 4, 2026-11-21)."""

UNBUFFERED: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers of streams: whoever stands between passes events on as they come."""

EVENT_HEADERS: Final = {"Content-Type": "text/event-stream; charset=utf-8", **UNBUFFERED}


class EventStream:
    """A response of server-sent events that begins with its first event."""

    def __init__(self, request: web.Request, slow: SlowReaders) -> None:
        self._request = request
        self.reader = Reader(request, slow)
        self.response = web.StreamResponse(headers=EVENT_HEADERS)
        self._writer: AbstractStreamWriter | None = None
        self._chunked = False
        self._beginning = asyncio.Lock()

    @property
    def begun(self) -> bool:
        """Whether the status line was sent."""
        return self.response.prepared

    async def write(self, events: bytes) -> None:
        """Send complete events; waits while the client reads slowly.

        Raises:
            ConnectionResetError: the client is gone.
        """
        writer = self._writer or await self._begin()
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        # Past two coroutines of aiohttp, which cost 1.2 us an event (one core, Zen 4, 2026-11-21).
        transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)
        self.reader.written_bytes += len(events)
        if self._request.protocol.writing_paused:
            await self.reader.drained(writer)

    async def _begin(self) -> AbstractStreamWriter:
        """Send the status line and the headers, once: a comment may come beside the first event."""
        async with self._beginning:
            if self._writer is None:
                self.reader.limit_buffers()
                self._writer = await self.response.prepare(self._request)
                self._chunked = self.response.headers.get("Transfer-Encoding") == "chunked"
            assert self._writer is not None  # only websockets have none
            return self._writer

    async def end(self) -> None:
        """Send the end of the response."""
        await self.response.write_eof()


async def stream_answer(
    events: EventStream, answer: Answer, running: AbstractAsyncContextManager[Run]
) -> None:
    """Send the whole answer as events.

    Args:
        running: runs the job when it is entered (`Dispatcher.run`).

    Raises:
        ConnectionResetError: the client is gone; the request was cancelled.
        Exception: whatever went wrong before the first event; later, it is sent as an event.
    """
    async with one_ending(events, answer.watch, answer.rendering.failure):
        async with running as run:
            answer.run = events.reader.paced = run
            await _send_deltas(events, answer, run.deltas)
        await events.write(answer.ending())


@asynccontextmanager
async def one_ending(
    events: EventStream, watch: RequestWatch, failure: Callable[[GatewayError], bytes]
) -> AsyncIterator[None]:
    """End a stream that the block has begun, with an error event if it raises.

    Args:
        failure: renders the error event.

    Raises:
        ConnectionResetError: the client is gone.
        Exception: any error of the block before the first event.
    """
    try:
        yield
    except ConnectionResetError:
        raise
    except Exception as error:
        if not events.begun:
            raise
        shown = as_gateway_error(error)
        watch.fail(Ending.FAILED, shown.status, error)
        events.response.force_close()
        await events.write(failure(shown))
    finally:
        events.reader.left()
    if events.begun:
        await events.end()


async def _send_deltas(
    events: EventStream, answer: Answer, deltas: AsyncGenerator[Delta, None]
) -> None:
    beats = Heartbeats(events.write, lambda: events.reader.written_bytes)
    try:
        async for delta in deltas:
            await _send(events, answer, delta)
    finally:
        beats.stop()


async def _send(events: EventStream, answer: Answer, delta: Delta) -> None:
    answer.observe(delta)
    if not (delta.text or delta.logprobs or delta.steps or delta.finish_reason):
        return  # its text is held back: nothing to tell yet
    if len(delta.logprobs) <= INLINE_LOGPROBS:
        chunk = answer.chunk(delta)
    else:
        chunk = await offload(answer.chunk, delta)
    if chunk:
        await events.write(chunk)
