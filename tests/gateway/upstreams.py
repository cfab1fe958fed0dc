"""Scripted upstream servers, and nodes that forward requests to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from draftgate.backends.openai.upstream import OpenAIUpstream
from draftgate.backends.worker_config import UpstreamSettings, WorkerConfig
from draftgate.gateway.app import Listening
from tests.gateway.harness import running

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SSE = {"Content-Type": "text/event-stream"}
TOKEN = b'data: {"id":"c","choices":[{"index":0,"text":" a","finish_reason":null}]}\n\n'
LAST = b'data: {"id":"c","choices":[{"index":0,"text":".","finish_reason":"stop"}]}\n\n'
USAGE = (
    b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":2}}}\n\n'
)
DONE = b"data: [DONE]\n\n"
BEGUN_RESPONSE = (
    b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1",'
    b'"error":null,"usage":null,"metadata":{"type":"response.completed"}}}\n\n'
)
DELTA_OF_RESPONSE = (
    b"event: response.output_text.delta\n"
    b'data: {"type":"response.output_text.delta","delta":"a"}\n\n'
)
ENDED_RESPONSE = (
    b'event: response.completed\ndata: {"response":{"id":"resp_1","error":null,"usage":'
    b'{"input_tokens":7,"input_tokens_details":{"cached_tokens":2},"output_tokens":3}},'
    b'"type":"response.completed"}\n\n'
)
WHOLE = b'{"id": "c", "choices": [{"text": "hi", "finish_reason": "stop"}], "usage":\
 {"prompt_tokens": 5, "completion_tokens": 2}}'


@dataclass
class ScriptedUpstream:
    """A server on a free port whose responses a test decides.

    Attributes:
        answer: the handler of a request, which the test sets.
        status: the HTTP status of `/health`.
        owner: the field `owned_by` of the server's models.
        models: the names of the server's models.
        listing: the body of `/v1/models`, or None for a list of `models`.
        metrics: the metrics page, or an empty text for a server without metrics.
        silent: the paths whose requests never get a response.
        requests: the requests that the server received, without probes.
        bodies: the bodies of these requests.
        left: the path of each request whose client disconnected before the end of the response.
        came: each request on its arrival.
    """

    url: str = ""
    handler: Handler | None = None
    status: int = 200
    owner: str = "somebody"
    models: tuple[str, ...] = ("theirs",)
    listing: bytes | None = None
    metrics: str = ""
    silent: set[str] = field(default_factory=set)
    settings: dict[str, Any] = field(default_factory=dict)
    requests: list[web.Request] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    disconnected: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    arrived: asyncio.Queue[web.Request] = field(default_factory=asyncio.Queue)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path in self.silent:
            return await asyncio.get_running_loop().create_future()
        if request.path == "/health":
            return web.Response(status=self.status)
        if request.path == "/metrics":
            return web.Response(status=200 if self.metrics else 404, text=self.metrics)
        if request.path == "/v1/models" and self.listing is not None:
            return web.Response(body=self.listing, content_type="application/json")
        if request.path == "/v1/models":
            shared = {"max_model_len": 99, "created": 5, "owned_by": self.owner}
            listed = [{"id": name, **shared} for name in self.models]
            return web.json_response({"object": "list", "data": listed})
        if request.path == "/props":
            return web.json_response({"total_slots": 3})
        self.bodies.append(await request.read())
        self.requests.append(request)
        self.arrived.put_nowait(request)
        assert self.handler is not None
        try:
            return await self.handler(request)
        except asyncio.CancelledError:
            self.disconnected.put_nowait(request.path)
            raise


@asynccontextmanager
async def upstream(handler: Handler | None = None) -> AsyncIterator[ScriptedUpstream]:
    """Run a scripted upstream server."""
    scripted = ScriptedUpstream(handler=handler)
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", scripted.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    scripted.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield scripted
    finally:
        await runner.cleanup()


class Clock:
    """A clock that a test advances, in seconds."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def forwarding(
    *upstreams: ScriptedUpstream,
    clock: Clock | None = None,
    max_sequences: int = 0,
    max_pause_s: float = 30.0,
    **settings: Any,
) -> AsyncIterator[Listening]:
    """Run a node that forwards to these upstreams and sends probes only when the test calls for
    them."""
    configs = [
        WorkerConfig(
            upstream=UpstreamSettings(
                url=server.url,
                **{
                    "concurrency": max_sequences,
                    "max_pause_s": max_pause_s,
                    **getattr(server, "settings", {}),
                },
            ),
        )
        for server in upstreams
    ]
    backends = [manual_upstream(config, clock or Clock()) for config in configs]
    async with running(backends=backends, **settings) as gateway:
        yield gateway


def manual_upstream(config: WorkerConfig, clock: Clock) -> OpenAIUpstream:
    """Return a backend that probes and polls only at its start and when the test calls for it."""
    return OpenAIUpstream(config, clock, probe_s=3600.0, poll_s=3600.0)


def stream_of(*blocks: bytes) -> Handler:
    """Return a handler that sends each block in its own write and ends the body."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        for block in blocks:
            await response.write(block)
        await response.write_eof()
        return response

    return handler


def cut_after(*blocks: bytes) -> Handler:
    """Return a handler that sends these blocks and closes the connection."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        for block in blocks:
            await response.write(block)
        assert request.transport is not None
        request.transport.close()  # closes after the written blocks
        return response

    return handler


def refusal(status: int, body: bytes = b"", **headers: str) -> Handler:
    """Return a handler that responds with this status. Header names have _ in place of -."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(
            status=status, body=body, headers={"Content-Type": "application/json", **names}
        )

    return handler


async def whole(request: web.Request) -> web.StreamResponse:
    """Respond with `WHOLE`."""
    return web.Response(body=WHOLE, content_type="application/json")


def held(*blocks: bytes) -> Handler:
    """Return a handler that sends these blocks and never ends the response."""

    async def handler(request: web.Request) -> web.StreamResponse:
        if blocks:
            response = web.StreamResponse(headers=SSE)
            await response.prepare(request)
            for block in blocks:
                await response.write(block)
        return await asyncio.get_running_loop().create_future()

    return handler


def after(event: asyncio.Event, handler: Handler) -> Handler:
    """Return a handler that waits for the event and then calls `answer`."""

    async def wait(request: web.Request) -> web.StreamResponse:
        await event.wait()
        return await handler(request)

    return wait
