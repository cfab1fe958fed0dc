"""What operators ask: `/health`, `/ready`, `/version`, `/metrics`."""

from __future__ import annotations

import asyncio

from aiohttp import web

from gateway import __version__
from gateway.fleet import FleetWorker
from gateway.http.context import NODE
from gateway.lifecycle import NodeState


async def health(request: web.Request) -> web.Response:
    """200 while the process is worth keeping: loading, serving or draining. 503 once it failed.

    A node of several workers lives on while one of them is well; the broken ones say why.
    """
    node = request.app[NODE]
    state = node.state
    body = {
        "status": state.value,
        "in_flight": node.dispatcher.in_flight,
        "workers": [_described(worker) for worker in node.fleet.workers],
    }
    if node.lifecycle.failure is not None:
        return web.json_response({**body, "reason": node.lifecycle.failure}, status=503)
    return web.json_response(body)


async def ready(request: web.Request) -> web.Response:
    """200 while new requests are welcome, else 503; a node that loads says how far it is.

    A node whose upstreams are all out is not ready until one is back.
    """
    node = request.app[NODE]
    state = node.state
    if state is NodeState.STARTING:
        body = {"status": state.value, "progress": round(node.fleet.progress, 3)}
        return web.json_response(body, status=503)
    outage = node.fleet.outage
    if state is NodeState.READY and outage is not None:  # of upstreams: it may pass
        return web.json_response({"status": "unavailable", "reason": outage}, status=503)
    return web.json_response(
        {"status": state.value}, status=200 if state is NodeState.READY else 503
    )


def _described(worker: FleetWorker) -> dict[str, str]:
    failure = worker.backend.failure
    if failure is None:
        status = "ok" if worker.backend.progress >= 1.0 else "loading"
        return {"id": worker.worker_id, "status": status}
    return {"id": worker.worker_id, "status": "failed", "reason": failure}


async def version(_request: web.Request) -> web.Response:
    """Return the version."""
    return web.json_response({"version": __version__})


async def metrics(request: web.Request) -> web.Response:
    """Return the metrics: Prometheus' text format, or OpenMetrics for who accepts it."""
    write, content_type = request.app[NODE].metrics.page(request.headers.get("Accept", ""))
    body = await asyncio.to_thread(write)  # thousands of lines take longer than the loop has
    return web.Response(body=body, headers={"Content-Type": content_type})
