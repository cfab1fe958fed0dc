"""The aiohttp application: routes, request ids, and errors in OpenAI's shape."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from draftgate.gateway.errors import (
    Draining,
    GatewayError,
    InvalidRequest,
    MethodNotAllowed,
    RouteNotFound,
    as_gateway_error,
)
from draftgate.gateway.http import generation
from draftgate.gateway.http.accounts import authenticate
from draftgate.gateway.http.context import (
    NODE,
    REQUEST_ID,
    REQUEST_ID_HEADER,
    SLOW_READERS,
    client_request_id,
)
from draftgate.gateway.http.endpoints import (
    decisions,
    embeddings,
    health,
    live,
    models,
    openapi,
    page,
    tokenize,
)
from draftgate.gateway.http.endpoints.chat import CHAT
from draftgate.gateway.http.endpoints.completions import COMPLETIONS
from draftgate.gateway.http.endpoints.responses import RESPONSES
from draftgate.gateway.http.peers.endpoint import add_peer_routes
from draftgate.gateway.http.readers import SlowReaders
from draftgate.gateway.node import Node
from draftgate.gateway.telemetry.logs import about_request, log

GENERATING: Final = (CHAT, COMPLETIONS, RESPONSES)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(node: Node) -> web.Application:
    """Return the application that serves a node."""
    app = web.Application(
        middlewares=[_identify, _explain, authenticate], client_max_size=node.config.max_body_bytes
    )
    app[NODE] = node
    app[SLOW_READERS] = SlowReaders(time.monotonic)
    app.on_response_prepare.append(_sign)
    app.cleanup_ctx.append(live.sampling)
    app.on_shutdown.append(live.end_streams)
    app.add_routes(
        [
            *(web.post(api.path, generation.handler(api)) for api in GENERATING),
            web.post(embeddings.PATH, embeddings.embed),
            web.get("/v1/models", models.list_models),
            web.get("/v1/models/{model:.+}", models.get_model),
            web.post("/tokenize", tokenize.tokenize),
            web.post("/detokenize", tokenize.detokenize),
            web.get("/health", health.health),
            web.get("/ready", health.ready),
            web.get("/version", health.version),
            web.get("/metrics", health.metrics),
            web.get("/decisions", decisions.list_decisions),
            web.get("/live", live.live, allow_head=False),
            web.get("/", page.index),
            web.get("/web/{name}", page.file),
            web.get("/openapi.json", openapi.get_document),
        ]
    )
    add_peer_routes(app)
    return app


@web.middleware
async def _identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every request an id, which all its log lines have."""
    request[REQUEST_ID] = client_request_id(request)
    with about_request(id=request[REQUEST_ID]):
        return await handler(request)


async def _sign(request: web.Request, response: web.StreamResponse) -> None:
    """Add what every response has, streamed or not."""
    # aiohttp refuses a bad `Expect` before the middlewares have run.
    response.headers[REQUEST_ID_HEADER] = request.get(REQUEST_ID) or client_request_id(request)
    response.headers["Server"] = "draftgate"


@web.middleware
async def _explain(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every exception into an answer."""
    try:
        return await handler(request)
    except ConnectionResetError:
        return web.Response(status=generation.CLIENT_GONE)  # nobody is left to read it
    except web.HTTPException as error:
        return _error_response(_of_http(error, request))
    except Exception as error:  # noqa: BLE001 - every one becomes an answer
        shown = as_gateway_error(error)
        if type(shown) is GatewayError:
            log(logging.ERROR, "internal error", error=error)
        return _error_response(shown)
    finally:
        _close_behind_broken(request)


def _close_behind_broken(request: web.Request) -> None:
    """Let the connection end with this answer if the body cannot be decoded.

    Else aiohttp, which wants to read what is left of it, logs a traceback for each.
    """
    if request.content.exception() is not None:
        request.content.feed_eof()
        request.protocol.close()


def _of_http(error: web.HTTPException, request: web.Request) -> GatewayError:
    """Return our error for one that aiohttp raised."""
    if error.status == 404:
        return RouteNotFound(f"there is no {request.path}")
    if isinstance(error, web.HTTPMethodNotAllowed):
        return MethodNotAllowed(
            f"{request.path} does not take {request.method}", sorted(error.allowed_methods)
        )
    return InvalidRequest(error.reason or "the request is malformed")


def _error_response(error: GatewayError) -> web.Response:
    response = web.Response(
        status=error.status,
        body=error.body(),
        content_type="application/json",
        headers=error.headers(),
    )
    if isinstance(error, Draining):
        response.force_close()  # so that the client's next connection finds another node
    return response
