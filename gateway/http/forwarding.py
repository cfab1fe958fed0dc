"""Requests that an upstream answers: bytes in as they came, bytes out as they come.

A stream that the upstream does not end rightly ends with one error event of ours behind the last
complete event. Before the first byte an error is an ordinary HTTP error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final

from aiohttp import web

from backends.base import UpstreamCall
from backends.errors import BackendFailed, UpstreamFailed
from gateway.errors import NotOffered, as_gateway_error
from gateway.forwarding import Answer, ForwardJob, forward_ask
from gateway.http.accounts import ACCOUNT, fingerprint
from gateway.http.context import NODE, REQUEST_ID, REQUEST_ID_HEADER, new_id, read_body
from gateway.http.requests.forwarded import Wishes, estimated_tokens, renamed, wishes_of
from gateway.http.requests.service import TPOT_HEADER, TTFT_HEADER, retries_of, service_of
from gateway.http.stream import COMMENT, EVENT_HEADERS, KEEPALIVE_S
from gateway.node import Node
from gateway.telemetry.tracing import NO_SPAN, Span
from gateway.telemetry.watch import Ending, RequestWatch

WHOLE_BYTES: Final = 1 << 20
"""A whole answer of up to this size is sent once it is complete, so that one which breaks off is an
error and no half; a larger one passes as it comes. A completion of 32,000 tokens has 150 kB."""

INLINE_BYTES: Final = 256 << 10
"""Of larger bodies the fields are read in a thread: 1 MB takes 7 ms, 13 with a name to map (Zen 4,
two busy cores, 2026-11-21), and the event loop may be held for 5."""

_TRACE: Final = ("traceparent", "tracestate")
_PASSED_ON: Final = ("Content-Type", "Accept", TTFT_HEADER, TPOT_HEADER, *_TRACE)
"""Headers the upstream gets. Not `Authorization`: the client's key is for this node, and the
upstream's is this node's own (`--upstream-api-key-env`)."""

_STREAM_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def forward(request: web.Request, node: Node, watch: RequestWatch) -> web.StreamResponse:
    """Answer a generating request from an upstream.

    Raises:
        GatewayError: nothing was sent to the client, and no upstream answers.
        ConnectionResetError: the client is gone.
    """
    body = await read_body(request)
    if len(body) <= INLINE_BYTES:
        wishes, body = _understood(body, node)
    else:
        wishes, body = await asyncio.to_thread(_understood, body, node)
    watch.span.set(
        {"gen_ai.request.model": wishes.model or "", "gen_ai.request.stream": wishes.stream}
    )
    with watch.span.child("forward") as span:
        job = _job(request, body, wishes, span)
        waiting = _Waiting(request)
        async with AsyncExitStack() as stack:
            entering = stack.enter_async_context(node.forwarder.run(job, watch.span))
            try:
                answer = await (waiting.told(entering) if wishes.stream else entering)
            except Exception as error:
                if waiting.response is None:
                    raise
                return await _broken_off(waiting.response, error, watch)
            watch.workers = [answer.worker_id]
            return await _Relay(request, answer, watch, wishes.n, waiting.response).send()


def _job(request: web.Request, body: bytes, wishes: Wishes, span: Span) -> ForwardJob:
    """Return a generating request as the forwarder takes it, within its account's bounds."""
    account = request[ACCOUNT]
    service = replace(service_of(request.headers), priority=wishes.priority)
    ask = forward_ask(new_id(), wishes.prompt_tokens, wishes.max_tokens, wishes.n, service, account)
    ask = replace(
        ask,
        fingerprint=fingerprint(account.name, body),
        retries=retries_of(request.headers),
    )
    return ForwardJob(ask, _call(request, body, span), wishes.stream)


async def pass_on(request: web.Request) -> web.StreamResponse:
    """Answer from an upstream, beside generating requests: `/v1/embeddings`, `/v1/models`.

    Raises:
        GatewayError: as `forward`.
    """
    return await _pass_on(request, missing=())


async def pass_on_if_there(request: web.Request) -> web.StreamResponse:
    """As `pass_on`, of what not every engine has: `/tokenize`.

    Raises:
        NotOffered: this one has it not.
    """
    return await _pass_on(request, missing=(404, 405))


async def _pass_on(request: web.Request, missing: tuple[int, ...]) -> web.StreamResponse:
    node = request.app[NODE]
    with node.dispatcher.counted():
        body = await read_body(request)
        tokens, account = estimated_tokens(body), request[ACCOUNT]
        ask = forward_ask(new_id(), tokens, 0, 1, service_of(request.headers), account)
        job = ForwardJob(ask, _call(request, body, NO_SPAN))
        async with node.forwarder.run(job) as answer:
            if answer.status in missing:
                raise NotOffered(f"the upstream has no {request.path}")
            return await _Relay(request, answer).send()


class _Waiting:
    """A client that waits for the first byte of a stream, and is told so now and then.

    Attributes:
        response: begun, once it was told.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response: web.StreamResponse | None = None

    async def told(self, entering: Awaitable[Answer]) -> Answer:
        """Return what is waited for; a comment is sent as often as `KEEPALIVE_S` passes."""
        task = asyncio.ensure_future(entering)
        try:
            while not (await asyncio.wait({task}, timeout=KEEPALIVE_S))[0]:
                await self._comment()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        return task.result()

    async def _comment(self) -> None:
        if self.response is None:
            self.response = web.StreamResponse(headers=EVENT_HEADERS)
            await self.response.prepare(self._request)
        await self.response.write(COMMENT)


async def _broken_off(
    response: web.StreamResponse, error: Exception, watch: RequestWatch | None
) -> web.StreamResponse:
    """End events that have begun with one that says what went wrong."""
    shown = as_gateway_error(error)
    if watch is not None:
        watch.end(Ending.FAILED, shown.status, error)
    response.force_close()
    await response.write(b"data: " + shown.body() + b"\n\n")
    await response.write_eof()
    return response


class _Relay:
    """Sends an answer to the client, and tells the watch of the request, if it has one."""

    def __init__(
        self,
        request: web.Request,
        answer: Answer,
        watch: RequestWatch | None = None,
        choices: int = 1,
        begun: web.StreamResponse | None = None,
    ) -> None:
        self._request = request
        self._answer = answer
        self._watch = watch
        self._choices = choices
        self._settled = False
        self._response = begun

    async def send(self) -> web.StreamResponse:
        """Send it all from here, so that the request is in flight up to the last byte."""
        if self._answer.status >= 400:
            self._end(Ending.REJECTED, self._answer.status, None)
        try:
            if self._answer.exchange.streaming:
                return await self._stream()
            if self._response is not None:
                return await self._as_event(self._response)
            return await self._whole()
        finally:
            self._settle()

    async def _whole(self) -> web.StreamResponse:
        body = bytearray()
        async for block in self._answer.blocks:
            body += block
            if len(body) > WHOLE_BYTES:
                await self._write(bytes(body))
                body.clear()
                return await self._stream()
        self._progressed()
        response = web.Response(
            status=self._answer.status, headers=self._answer.headers, body=bytes(body)
        )
        await response.prepare(self._request)
        await response.write_eof()
        return response

    async def _as_event(self, response: web.StreamResponse) -> web.StreamResponse:
        """Send what came instead of a stream, an error most likely, as the last event of one."""
        body = b"".join([block async for block in self._answer.blocks])
        response.force_close()
        await response.write(b"data: " + b" ".join(body.split()) + b"\n\n")
        await response.write_eof()
        return response

    async def _stream(self) -> web.StreamResponse:
        try:
            async for block in self._answer.blocks:
                await self._write(block)
        except BackendFailed as error:
            return await self._broke(error)
        assert self._response is not None
        if self._answer.exchange.error_sent:
            reason = UpstreamFailed("the upstream sent an error event")
            self._end(Ending.FAILED, as_gateway_error(reason).status, reason)
        await self._response.write_eof()
        return self._response

    async def _write(self, block: bytes) -> None:
        if self._response is None:
            headers: Mapping[str, str] = self._answer.headers
            if self._answer.exchange.streaming:
                headers = {**headers, **_STREAM_HEADERS}
            self._response = web.StreamResponse(status=self._answer.status, headers=headers)
            await self._response.prepare(self._request)
        if not block.startswith(b":"):  # a comment, by which an upstream says that it waits
            self._progressed()
        await self._response.write(block)

    async def _broke(self, error: BackendFailed) -> web.StreamResponse:
        """End what has begun: events with one that says so, anything else with a cut."""
        assert self._response is not None
        self._settle()
        if self._answer.exchange.streaming:
            return await _broken_off(self._response, error, self._watch)
        self._end(Ending.FAILED, as_gateway_error(error).status, error)
        self._response.force_close()
        if self._request.transport is not None:
            self._request.transport.abort()  # its length, or its last chunk, will be missed
        return self._response

    def _progressed(self) -> None:
        if self._watch is not None:
            self._watch.progressed()

    def _end(self, ending: Ending, status: int, error: Exception | None) -> None:
        self._settle()
        if self._watch is not None:
            self._watch.end(ending, status, error)

    def _settle(self) -> None:
        """Count the tokens that came, once."""
        if self._watch is not None and not self._settled:
            self._settled = True
            self._watch.settled(self._answer.usage(), self._choices)


def _understood(body: bytes, node: Node) -> tuple[Wishes, bytes]:
    """Return what a body asks for, and the body as the upstream is to have it."""
    wishes = wishes_of(body)
    ours = node.config.served_model_name
    if ours is None:
        return wishes, body
    return wishes, renamed(body, wishes, ours, node.fleet.card.model_id)


def _call(request: web.Request, body: bytes, span: Span) -> UpstreamCall:
    headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
    headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
    headers.update(span.propagation())
    return UpstreamCall(request.method, request.rel_url.raw_path_qs, headers, body)
