"""Sending an upstream's answer to the client: its bytes as they come, and exactly one ending."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Final

import msgspec
from aiohttp import web

from draftgate.backends.errors import UpstreamFailed
from draftgate.gateway.errors import UpstreamBroken, as_gateway_error
from draftgate.gateway.forwarding.answer import ERRORS, Forwarded
from draftgate.gateway.http.replies.rendering import event
from draftgate.gateway.http.stream import EVENT_HEADERS, UNBUFFERED
from draftgate.gateway.telemetry.watch import Ending, RequestWatch

WHOLE_BYTES: Final = 1 << 20
"""A whole answer of up to this size is sent once it is complete, so that one which breaks off is an
error and no half; a larger one passes as it comes. A completion of 32,000 tokens has 150 kB."""


class Relay:
    """The response to one request; the watch of the request, if it has one, is told.

    A stream that the upstream does not end rightly ends with one error event of ours behind the
    last complete event. Before the first byte an error is an ordinary HTTP error.
    """

    def __init__(self, request: web.Request, watch: RequestWatch | None = None) -> None:
        """Begin before there is an answer."""
        self._request = request
        self._watch = watch
        self._answer: Forwarded | None = None
        self._response: web.StreamResponse | None = None
        self._are_events = False
        self._settled = False

    async def comment(self, data: bytes) -> None:
        """Tell a client that waits for events that it still does."""
        if self._response is None:
            self._are_events = True
            await self._begin(200, EVENT_HEADERS)
        assert self._response is not None
        await self._response.write(data)

    async def send(self, answer: Forwarded) -> web.StreamResponse:
        """Send it all from here, so that the request is in flight up to the last byte.

        Raises:
            BackendFailed: the upstream broke.
            ConnectionResetError: the client is gone.
        """
        self._answer = answer
        if answer.status >= ERRORS:
            self._end(Ending.REJECTED, answer.status, None)
        try:
            if answer.exchange.streaming:
                return await self._stream(answer, b"")
            if self._response is not None:
                return await self._instead(answer, self._response)
            return await self._whole(answer)
        finally:
            self._settle()

    async def ended(self, sending: Awaitable[web.StreamResponse]) -> web.StreamResponse:
        """Return what was sent; once it has begun, an error is its ending.

        Raises:
            ConnectionResetError: the client is gone.
            Exception: whatever went wrong before anything was sent.
        """
        try:
            return await sending
        except ConnectionResetError:
            raise
        except Exception as error:
            if self._response is None:
                raise
            return await self._broke(error, self._response)

    async def _broke(self, error: Exception, response: web.StreamResponse) -> web.StreamResponse:
        """End what has begun: events with one that says so, anything else with a cut."""
        shown = as_gateway_error(error)
        self._end(Ending.FAILED, shown.status, error)
        response.force_close()
        if self._are_events:
            await response.write(event(shown.body()))
            await response.write_eof()
        elif self._request.transport is not None:
            self._request.transport.abort()  # its length, or its last chunk, will be missed
        return response

    async def _whole(self, answer: Forwarded) -> web.StreamResponse:
        body = bytearray()
        async for block in answer.blocks:
            body += block
            if len(body) > WHOLE_BYTES:
                return await self._stream(answer, bytes(body))
        self._progressed(answer)
        response = web.Response(status=answer.status, headers=answer.headers, body=bytes(body))
        await response.prepare(self._request)
        await response.write_eof()
        return response

    async def _instead(self, answer: Forwarded, response: web.StreamResponse) -> web.StreamResponse:
        """End events that have begun, where something else came: an error, most likely."""
        body = bytearray()
        async for block in answer.blocks:
            body += block
            if len(body) > WHOLE_BYTES:
                break
        error = _error_in(bytes(body))
        if error is None:
            text = f"the upstream answered {answer.status}, and no stream of events"
            return await self._broke(UpstreamBroken(text), response)
        self._end(Ending.FAILED, answer.status, UpstreamFailed("the upstream answered an error"))
        response.force_close()
        await response.write(event(error))
        await response.write_eof()
        return response

    async def _stream(self, answer: Forwarded, first: bytes) -> web.StreamResponse:
        """Send what comes, behind what has come."""
        if first:
            await self._write(answer, first)
        async for block in answer.blocks:
            await self._write(answer, block)
        assert self._response is not None
        if answer.exchange.error_sent:
            reason = UpstreamFailed("the upstream sent an error event")
            self._end(Ending.FAILED, as_gateway_error(reason).status, reason)
        await self._response.write_eof()
        return self._response

    async def _write(self, answer: Forwarded, block: bytes) -> None:
        if self._response is None:
            self._are_events = answer.exchange.streaming
            more = UNBUFFERED if self._are_events else {}
            await self._begin(answer.status, {**answer.headers, **more})
        assert self._response is not None
        if not block.startswith(b":"):  # a comment, by which an upstream says that it waits
            self._progressed(answer)
        await self._response.write(block)

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self._response = web.StreamResponse(status=status, headers=headers)
        await self._response.prepare(self._request)

    def _progressed(self, answer: Forwarded) -> None:
        if self._watch is not None:
            self._watch.progressed(answer.exchange.outputs)

    def _end(self, ending: Ending, status: int, error: Exception | None) -> None:
        self._settle()
        if self._watch is not None:
            self._watch.end(ending, status, error)

    def _settle(self) -> None:
        """Count the tokens that came, once."""
        if self._watch is not None and self._answer is not None and not self._settled:
            self._settled = True
            self._watch.settled(self._answer.usage())


def _error_in(body: bytes) -> bytes | None:
    """Return the JSON of an error as OpenAI words it, in one line; None of anything else."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(found, dict) or not found.get("error"):
        return None
    return msgspec.json.encode(found)
