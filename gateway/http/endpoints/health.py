"""What operators ask: `/health`, `/ready`, `/version`, `/metrics`."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from draftgate import __version__
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.http.context import NODE, SLOW_READERS
from draftgate.gateway.http.replies.shapes import (
    HealthReply,
    ReadyReply,
    VersionReply,
    WorkerHealth,
)
from draftgate.gateway.lifecycle import NodeState
from draftgate.gateway.offload import offload
from draftgate.gateway.telemetry import metric_definitions as metric


async def health(request: web.Request) -> web.Response:
    """200 while the process is worth keeping: loading, serving or draining. 503 once it failed.

    A node of several workers lives on while one of them is well; the broken ones say why.
    """
    node = request.app[NODE]
    state = node.state
    workers = [_described(worker, number) for number, worker in enumerate(node.fleet.workers, 1)]
    reply = HealthReply(state.value, node.dispatcher.in_flight, workers)
    if node.lifecycle.failure is None:
        return _json(reply)
    reply.reason = node.lifecycle.failure
    return _json(reply, 503)


async def ready(request: web.Request) -> web.Response:
    """200 while new requests are welcome, else 503; a node that loads says how far it is.

    A node whose upstreams are all out, or whose workers all hang, is not ready until one is back.
    """
    node = request.app[NODE]
    state = node.state
    if state is NodeState.STARTING:
        return _json(ReadyReply(state.value, round(node.fleet.progress, 3)), 503)
    outage = node.fleet.outage or _hung(node.fleet)
    if state is NodeState.READY and outage is not None:  # it may pass
        return _json(ReadyReply("unavailable", reason=outage), 503)
    return _json(ReadyReply(state.value), 200 if state is NodeState.READY else 503)


def _hung(fleet: Fleet) -> str | None:
    """Return that all workers hang which have not failed, or None while one goes on."""
    return "no worker comes to a further step" if all(w.hung for w in fleet.serving) else None


def _described(worker: FleetWorker, number: int) -> WorkerHealth:
    failure = worker.backend.failure
    if failure is None:
        if worker.hung:
            return WorkerHealth(worker.worker_id, "hung", "it comes to no further step")
        status = "ok" if worker.backend.progress >= 1.0 else "loading"
        return WorkerHealth(worker.worker_id, status)
    reason = f"upstream {number}: {failure}" if worker.forwards else failure
    return WorkerHealth(worker.worker_id, "failed", reason)


async def version(_request: web.Request) -> web.Response:
    """Return the version."""
    return _json(VersionReply(__version__))


async def metrics(request: web.Request) -> web.Response:
    """Return the metrics: Prometheus' text format, or OpenMetrics for who accepts it."""
    node = request.app[NODE]
    queued = len(node.dispatcher.queue)
    own = (worker.backend for worker in node.fleet.own)
    on_workers = sum(backend.load().waiting for backend in own if backend.failure is None)
    node.metrics.set(metric.QUEUED, queued)
    node.metrics.set(metric.WAITING, queued + on_workers)
    node.metrics.set(metric.SLOW_READERS, len(request.app[SLOW_READERS]))
    node.metrics.set(metric.STORE_OUT, node.store.outage is not None)
    node.metrics.set(metric.OPEN_WORKERS, len(node.fleet.open))
    node.metrics.set(metric.TASKS, len(asyncio.all_tasks()))
    write, content_type = node.metrics.page(request.headers.get("Accept", ""))
    body = await offload(write)  # thousands of lines take longer than the loop has
    return web.Response(body=body, headers={"Content-Type": content_type})


def _json(reply: msgspec.Struct, status: int = 200) -> web.Response:
    body = msgspec.json.encode(reply)
    return web.Response(body=body, status=status, content_type="application/json")
