"""A server with prepared responses, which is also the minimal server and the minimal proxy.

    python -m bench.edge.mock [--upstream URL] --port PORT

Without an upstream, the mock responds to requests itself. It then serves as the upstream of all
proxies, and as the minimal server that generates its tokens in process. With an upstream, the mock
is the minimal proxy and forwards bytes unread.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import Final

import aiohttp
import uvloop
from aiohttp import web

from bench.edge import wire

_STREAM: Final = {"Content-Type": "text/event-stream; charset=utf-8"}
_UPSTREAM: Final = web.AppKey("upstream", aiohttp.ClientSession)


async def answer(request: web.Request) -> web.StreamResponse:
    """Send a chat completion with one write per chunk, without delay or at the requested pace."""
    chat = wire.decode(await request.read())
    request_id, created_s = secrets.token_hex(12), int(time.time())
    if not chat.stream:
        body = wire.full_response(request_id, created_s, chat.tokens)
        return web.Response(body=body, content_type="application/json")
    response = web.StreamResponse(headers=_STREAM)
    await response.prepare(request)
    head = wire.chunk_head(request_id, created_s)
    last, pace_s = chat.tokens - 1, chat.pace_s
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    for place in range(chat.tokens):
        text = wire.NEXT if place else wire.FIRST
        await response.write(head + text + (wire.FINISHED if place == last else wire.UNFINISHED))
        # Unpaced chunks are separate writes too, because a worker sends the tokens of each step.
        due_s += pace_s
        await asyncio.sleep(max(0.0, due_s - loop.time()) if pace_s else 0.0)
    await response.write(wire.DONE)
    await response.write_eof()
    return response


async def forward(request: web.Request) -> web.StreamResponse:
    """Forward a request to the upstream, and forward the response to the client, both unread."""
    body = await request.read()
    headers = {"Content-Type": "application/json"}
    async with request.app[_UPSTREAM].post(request.path, data=body, headers=headers) as upstream:
        response = web.StreamResponse(status=upstream.status)
        response.content_type = upstream.content_type
        await response.prepare(request)
        async for data in upstream.content.iter_any():
            await response.write(data)
        await response.write_eof()
        return response


async def list_models(_request: web.Request) -> web.Response:
    """Return the list of models, which has a single entry."""
    return web.json_response({"object": "list", "data": [{"id": wire.MODEL, "object": "model"}]})


async def respond_ok(_request: web.Request) -> web.Response:
    """Return status 200 for any other request, because gateways have different health checks."""
    return web.json_response({"status": "ok", "model_path": wire.MODEL, "model_id": wire.MODEL})


async def _take_traces(request: web.Request) -> web.Response:
    """Accept traces (OTLP over HTTP)."""
    await request.read()
    return web.Response(content_type="application/x-protobuf")


def application(upstream: str | None) -> web.Application:
    """Return the server, or return the proxy if `upstream` is given."""
    app = web.Application()

    async def session(app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(upstream) as opened:
            app[_UPSTREAM] = opened
            yield

    if upstream is not None:
        app.cleanup_ctx.append(session)
    app.add_routes(
        [
            web.post(wire.PATH, answer if upstream is None else forward),
            web.post("/v1/traces", _take_traces),
            web.get("/v1/models", list_models),
            web.get("/{anything:.*}", respond_ok),
        ]
    )
    return app


def main() -> None:
    """Serve on the loopback interface until a signal arrives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", help="forward all requests to this server")
    args = parser.parse_args()
    uvloop.install()
    web.run_app(
        application(args.upstream), host="127.0.0.1", port=args.port, access_log=None, print=None
    )


if __name__ == "__main__":
    main()
