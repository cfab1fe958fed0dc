"""An upstream whose response a request chooses by the field `user`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

FAULTS = (
    "none", "none", "none", "429", "429-retry", "503", "500", "400", "404", "not-json", "no-usage",
    "cut", "cut-at-once", "reset", "no-done", "error-event", "slow", "comments", "crlf", "huge",
    "gzip", "unknown-coding", "redirect", "empty", "odd-headers", "pieces",
)  # fmt: skip

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
STREAM = {"Content-Type": "text/event-stream"}


def _whole(chat: bool) -> dict[str, Any]:
    choice = {"message": {"role": "assistant", "content": "hi"}} if chat else {"text": "hi"}
    choice |= {"index": 0, "finish_reason": "stop"}
    return {"id": "c", "object": "o", "created": 5, "model": "m", "choices": [choice],
            "usage": USAGE}  # fmt: skip


def _event(chat: bool, text: str, reason: str | None = None, **more: Any) -> bytes:
    choice = {"delta": {"content": text}} if chat else {"text": text}
    choice |= {"index": 0, "finish_reason": reason}
    found = {"id": "c", "object": "o", "created": 5, "model": "m", "choices": [choice], **more}
    return b"data: " + json.dumps(found).encode() + b"\n\n"


def _error(status: int, **headers: str) -> web.Response:
    error = {"error": {"message": f"status {status}", "type": "t", "param": None, "code": "c"}}
    return web.json_response(error, status=status, headers=headers)


def _refused(fault: str) -> web.Response | None:
    """Return the response of a fault that is not a stream, or None."""
    if fault == "429-retry":
        return _error(429, **{"Retry-After": "2"})
    if fault.isdecimal():
        return _error(int(fault))
    if fault == "redirect":
        return web.Response(status=307, headers={"Location": "http://127.0.0.1:1/elsewhere"})
    if fault == "not-json":
        return web.Response(text="<html>", content_type="text/html")
    if fault == "empty":
        return web.Response(content_type="application/json")
    if fault == "unknown-coding":
        return web.Response(body=b"x", headers={"Content-Encoding": "br"})
    return None


async def _stream(request: web.Request, fault: str, chat: bool) -> web.StreamResponse:
    headers = dict(STREAM)
    if fault == "odd-headers":
        headers |= {"X-Own": "1", "Set-Cookie": "a=b", "Server": "own", "x-request-id": "theirs"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    events = [_event(chat, "a"), _event(chat, " b"), _event(chat, ".", "stop")]
    if fault != "no-usage":
        events.append(
            b"data: " + json.dumps({"id": "c", "choices": [], "usage": USAGE}).encode() + b"\n\n"
        )
    if fault == "error-event":
        events[2:] = [
            b'data: {"error": {"message": "out of memory", "type": "t", "code": 500}}\n\n'
        ]
    if fault == "comments":
        events.insert(1, b": ping\n\n")
    if fault == "huge":
        events.insert(1, _event(chat, "x" * 200_000))
    if fault != "no-done":
        events.append(b"data: [DONE]\n\n")
    for place, event in enumerate(events):
        if fault == "slow":
            await asyncio.sleep(1.5)
        if fault in {"cut", "reset"} and place == 2:
            assert request.transport is not None
            request.transport.close() if fault == "cut" else request.transport.abort()
            return response
        data = event.replace(b"\n", b"\r\n") if fault == "crlf" else event
        if fault == "pieces":
            for begin in range(0, len(data), 17):
                await response.write(data[begin : begin + 17])
                await asyncio.sleep(0.001)
        else:
            await response.write(data)
            await asyncio.sleep(0)
    await response.write_eof()
    return response


async def _handle(request: web.Request) -> web.StreamResponse:
    if request.path == "/v1/models":
        listed = {"id": "theirs", "object": "model", "created": 5, "owned_by": "somebody",
                  "max_model_len": 8192}  # fmt: skip
        return web.json_response({"object": "list", "data": [listed]})
    if request.method != "POST":
        return web.Response(status=200 if request.path == "/health" else 404)
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError):
        return _error(400)
    body = body if isinstance(body, dict) else {}
    fault, chat = str(body.get("user")), "chat" in request.path
    if fault == "cut-at-once":
        assert request.transport is not None
        request.transport.close()
        return web.Response()
    if (refused := _refused(fault)) is not None:
        return refused
    if body.get("stream") is True:
        return await _stream(request, fault, chat)
    if fault == "slow":
        await asyncio.sleep(3)
    whole = _whole(chat)
    if fault == "no-usage":
        del whole["usage"]
    response = web.json_response(whole)
    if fault == "gzip":
        response.enable_compression(web.ContentCoding.gzip)
    return response


@asynccontextmanager
async def faulty_upstream() -> AsyncIterator[int]:
    """Run the upstream, and yield its port."""
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", _handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    server = await asyncio.get_running_loop().create_server(runner.server, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        await runner.cleanup()
