"""Upstreams with scripted answers, and nodes in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from draftgate.backends.openai.upstream import OpenAIUpstream
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.app import Listening
from tests.gateway.harness import running

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]

SSE = {"Content-Type": "text/event-stream"}
TOKEN = b'data: {"id":"c","choices":[{"index":0,"text":" a","finish_reason":null}]}\n\n'
LAST = b'data: {"id":"c","choices":[{"index":0,"text":".","finish_reason":"stop"}]}\n\n'
USAGE = (
    b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":2}}}\n\n'
)
DONE = b"data: [DONE]\n\n"
WHOLE = b'{"id": "c", "choices": [{"text": "hi", "finish_reason": "stop"}], "usage":\
 {"prompt_tokens": 5, "completion_tokens": 2}}'


@dataclass
class ScriptedUpstream:
    """A server on a free port whose answers a test decides.

    Attributes:
        answer: handles a request; set by the test.
        status: of `/health`.
        owner: `owned_by` of its model.
        metrics: its metrics page; empty for none.
        requests, bodies: received, without probes.
        left: gets the path of each request whose client left before the answer was complete.
    """

    url: str = ""
    answer: Answering | None = None
    status: int = 200
    owner: str = "somebody"
    metrics: str = ""
    requests: list[web.Request] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    left: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    came: asyncio.Queue[web.Request] = field(default_factory=asyncio.Queue)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response(status=self.status)
        if request.path == "/metrics":
            return web.Response(status=200 if self.metrics else 404, text=self.metrics)
        if request.path == "/v1/models":
            model = {"id": "theirs", "max_model_len": 99, "created": 5, "owned_by": self.owner}
            return web.json_response({"object": "list", "data": [model]})
        if request.path == "/props":
            return web.json_response({"total_slots": 3})
        self.bodies.append(await request.read())
        self.requests.append(request)
        self.came.put_nowait(request)
        assert self.answer is not None
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.left.put_nowait(request.path)
            raise


@asynccontextmanager
async def upstream(answer: Answering | None = None) -> AsyncIterator[ScriptedUpstream]:
    """Serve a scripted upstream."""
    scripted = ScriptedUpstream(answer=answer)
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
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def in_front(
    *upstreams: ScriptedUpstream, clock: Clock | None = None, seats: int = 0, **settings: Any
) -> AsyncIterator[Listening]:
    """Yield a node in front of them, on the test's clock, that probes only on request."""
    configs = [WorkerConfig(upstream=one.url, upstream_concurrency=seats) for one in upstreams]
    backends = [unasked(config, clock or Clock()) for config in configs]
    async with running(backends=backends, **settings) as where:
        yield where


def unasked(config: WorkerConfig, clock: Clock) -> OpenAIUpstream:
    """Return an upstream that probes and polls at its start, and then only on request."""
    return OpenAIUpstream(config, clock, probe_s=3600.0, poll_s=3600.0)


def stream_of(*blocks: bytes) -> Answering:
    """Answer with these blocks, each in its own write, and end the body."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        for block in blocks:
            await response.write(block)
        await response.write_eof()
        return response

    return answer


def cut_after(*blocks: bytes) -> Answering:
    """Answer with these blocks and break the connection."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        for block in blocks:
            await response.write(block)
        assert request.transport is not None
        request.transport.close()  # after the written blocks
        return response

    return answer


def refusal(status: int, body: bytes = b"", **headers: str) -> Answering:
    """Answer with a status; header names have _ for -."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(
            status=status, body=body, headers={"Content-Type": "application/json", **names}
        )

    return answer


async def whole(request: web.Request) -> web.StreamResponse:
    """Answer with `WHOLE`."""
    return web.Response(body=WHOLE, content_type="application/json")


def held(*blocks: bytes) -> Answering:
    """Answer with these blocks without an end."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if blocks:
            response = web.StreamResponse(headers=SSE)
            await response.prepare(request)
            for block in blocks:
                await response.write(block)
        return await asyncio.get_running_loop().create_future()

    return answer


def after(event: asyncio.Event, answer: Answering) -> Answering:
    """Answer once the event is set."""

    async def wait(request: web.Request) -> web.StreamResponse:
        await event.wait()
        return await answer(request)

    return wait
