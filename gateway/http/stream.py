"""Server-sent events: one per delta, and exactly one ending.

A stream ends with a finish reason for every choice and what ends such an answer (`Rendering`), or
with one error event and nothing after it. An error before the first event is an ordinary HTTP error
instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from aiohttp import web

from backends.types import Delta
from gateway.dispatch import Dispatcher
from gateway.errors import as_gateway_error
from gateway.http.answer import Answer
from gateway.telemetry.watch import Ending

KEEPALIVE_S: Final = 5.0
"""A stream that waits for its first token sends a comment this often: proxies cut silent ones."""

_COMMENT: Final = b": waiting\n\n"
_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventStream:
    """A response of server-sent events that begins with its first event."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=_HEADERS)

    @property
    def begun(self) -> bool:
        """Whether the status line was sent."""
        return self.response.prepared

    async def write(self, events: bytes) -> None:
        """Send complete events; waits while the client reads slowly.

        Raises:
            ConnectionResetError: the client is gone.
        """
        if not self.begun:
            await self.response.prepare(self._request)
        await self.response.write(events)

    async def end(self) -> None:
        """Send the end of the response."""
        await self.response.write_eof()


async def stream_answer(events: EventStream, answer: Answer, dispatcher: Dispatcher) -> None:
    """Send the whole answer as events.

    Raises:
        ConnectionResetError: the client is gone; the request was cancelled.
        Exception: whatever went wrong before the first event; later, it is sent as an event.
    """
    try:
        async with answer.deltas(dispatcher) as deltas:
            await _send_deltas(events, answer, deltas)
        answer.check_complete()
        await events.write(answer.ending())
    except ConnectionResetError:
        raise
    except Exception as error:
        if not events.begun:
            raise
        shown = as_gateway_error(error)
        answer.watch.end(Ending.FAILED, shown.status, error)
        events.response.force_close()
        await events.write(answer.rendering.failure(shown))
    await events.end()


async def _send_deltas(
    events: EventStream, answer: Answer, deltas: AsyncGenerator[Delta, None]
) -> None:
    first = await _first(events, deltas)
    if first is None:
        return
    await _send(events, answer, first)
    async for delta in deltas:
        await _send(events, answer, delta)


async def _send(events: EventStream, answer: Answer, delta: Delta) -> None:
    answer.observe(delta)
    if not (delta.text or delta.logprobs or delta.finish_reason):
        return  # its text is held back: nothing to tell yet
    if chunk := answer.chunk(delta):
        await events.write(chunk)


async def _first(events: EventStream, deltas: AsyncGenerator[Delta, None]) -> Delta | None:
    """Wait for the first delta, with a comment now and then; None if there is none."""
    waiting = asyncio.ensure_future(anext(deltas, None))
    try:
        while not (await asyncio.wait({waiting}, timeout=KEEPALIVE_S))[0]:
            await events.write(_COMMENT)
    finally:
        if not waiting.done():
            waiting.cancel()
            await asyncio.wait({waiting})
    return waiting.result()
