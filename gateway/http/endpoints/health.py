"""The endpoints `/health`, `/ready`, `/version` and `/metrics` for operators."""

from __future__ import annotations

from contextlib import suppress

from aiohttp import web

from draftgate import __version__
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.http.context import NODE, json_response
from draftgate.gateway.http.replies.shapes import (
    HealthReply,
    ReadyReply,
    VersionReply,
    WorkerHealth,
)
from draftgate.gateway.lifecycle import NodeState
from draftgate.gateway.node import Node
from draftgate.gateway.offload import offload
from draftgate.gateway.state.store import StoreError
from draftgate.gateway.telemetry import metric_definitions as metric


async def health(request: web.Request) -> web.Response:
    """Return status 503 if the node has failed, or 200 in any other state.

    A node with several workers fails with its last worker. The body has the reasons of failed
    workers.
    """
    node = request.app[NODE]
    workers = [_described(worker, number) for number, (_, worker) in enumerate(node.workers(), 1)]
    reply = HealthReply(node.state.value, node.in_flight, workers)
    if node.lifecycle.failure is None:
        return json_response(reply)
    reply.reason = node.lifecycle.failure
    return json_response(reply, 503)


async def ready(request: web.Request) -> web.Response:
    """Return status 200 if the node accepts requests, or 503 otherwise.

    The body has the progress of loading. A node is not ready while all its upstreams are
    unavailable, or all workers of all its models hang.
    """
    node = request.app[NODE]
    state = node.state
    if state is NodeState.STARTING:
        return json_response(ReadyReply(state.value, round(node.progress, 3)), 503)
    outages = [model.fleet.outage or _hung(model.fleet) for model in node.models]
    if state is NodeState.READY and outages[0] and None not in outages:  # the outage may end
        return json_response(ReadyReply("unavailable", reason=outages[0]), 503)
    return json_response(ReadyReply(state.value), 200 if state is NodeState.READY else 503)


def _hung(fleet: Fleet) -> str | None:
    """Return the outage of a fleet whose serving workers all hang, or None."""
    return "no worker completes a step" if all(w.hung for w in fleet.serving) else None


def _described(worker: FleetWorker, number: int) -> WorkerHealth:
    failure = worker.backend.failure
    found = WorkerHealth(worker.worker_id, worker.status)
    if failure is not None:
        found.reason = f"upstream {number}: {failure}" if worker.forwards else failure
    elif worker.hung:
        found.reason = "the worker completes no step"
    return found


async def version(_request: web.Request) -> web.Response:
    """Return the version."""
    return json_response(VersionReply(__version__))


async def metrics(request: web.Request) -> web.Response:
    """Return the metrics in Prometheus' text format, or OpenMetrics if the client accepts it."""
    node = request.app[NODE]
    await _set_stored(node)
    others = [model.metrics.snapshot() for model in node.models[1:]]
    if node.siblings is not None:
        others += await node.siblings.metrics()
    write, content_type = node.metrics.page(request.headers.get("Accept", ""), others)
    body = await offload(write)  # rendering thousands of lines would hold the event loop
    return web.Response(body=body, headers={"Content-Type": content_type})


async def _set_stored(node: Node) -> None:
    """Set the metrics of the stored responses. An outage of the store keeps the last values."""
    with suppress(StoreError):
        usage = await node.responses.usage()
        node.metrics.set(metric.STORED_RESPONSES, usage.values)
        node.metrics.set(metric.STORED_BYTES, usage.bytes)
    node.metrics.set(metric.EVICTED_RESPONSES, node.responses.evicted)
