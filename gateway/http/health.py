"""What operators ask: `/health`, `/ready`, `/version`, `/metrics`."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from gateway import __version__
from gateway.http.context import NODE
from gateway.lifecycle import NodeState

_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


async def health(request: web.Request) -> web.Response:
    """200 while the process is worth keeping: loading, serving or draining. 503 once it failed."""
    node = request.app[NODE]
    state = node.state
    body = {"status": state.value, "in_flight": node.dispatcher.in_flight}
    if node.lifecycle.failure is not None:
        return web.json_response({**body, "reason": node.lifecycle.failure}, status=503)
    return web.json_response(body)


async def ready(request: web.Request) -> web.Response:
    """200 while new requests are welcome, else 503."""
    state = request.app[NODE].state
    status = 200 if state is NodeState.READY else 503
    return web.json_response({"status": state.value}, status=status)


async def version(_request: web.Request) -> web.Response:
    """Return the version."""
    return web.json_response({"version": __version__})


async def metrics(request: web.Request) -> web.Response:
    """Return the metrics in Prometheus' text format."""
    body = request.app[NODE].metrics.exposition()
    return web.Response(body=body, headers={"Content-Type": _METRICS_TYPE})
