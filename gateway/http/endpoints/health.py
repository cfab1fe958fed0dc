"""The endpoints `/health`, `/ready`, `/version` and `/metrics` for operators."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from aiohttp import web
from msgspec import UNSET

from draftgate import __version__
from draftgate.gateway.cluster.siblings import Siblings
from draftgate.gateway.errors import Unavailable
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
from draftgate.gateway.state.commands import ReadUsage
from draftgate.gateway.state.store import StoreError
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.metrics import Row, page_of
from draftgate.gateway.telemetry.tenant_gauges import read_quotas

_UNAVAILABLE: Final = "unavailable"
"""The status of a node that would accept requests, but has no worker or upstream for them."""


async def health(request: web.Request) -> web.Response:
    """Return status 503 if the node has failed, or 200 in any other state.

    A node with several workers fails with its last worker. The body has the reasons of failed
    workers. A node whose upstreams are all unavailable is alive, because a restart of it would not
    help. Its body has the status and the reason of `/ready`.
    """
    node = request.app[NODE]
    workers = [_described(worker) for _, worker in node.workers()]
    reply = HealthReply(node.state.value, node.in_flight, workers)
    if node.lifecycle.failure is not None:
        reply.reason = node.lifecycle.failure
        return json_response(reply, 503)
    outage = outage_of(node)
    if node.state is NodeState.READY and outage is not None:
        reply.status, reply.reason = _UNAVAILABLE, outage
    return json_response(reply)


async def ready(request: web.Request) -> web.Response:
    """Return status 200 if the node accepts requests, or 503 otherwise.

    The body has the progress of loading, and the workers that get no requests. A node is not ready
    while all its upstreams are unavailable, or all workers of all its models hang.
    """
    node = request.app[NODE]
    state = node.state
    if state is NodeState.STARTING:
        return json_response(ReadyReply(state.value, round(node.progress, 3)), 503)
    described = [_described(worker) for _, worker in node.workers()]
    out = [one for one in described if one.reason is not UNSET] or UNSET
    progress = UNSET if all(one.is_known for one in node.models) else round(node.progress, 3)
    outage = outage_of(node)
    if state is NodeState.READY and outage is not None:  # the outage may end
        return json_response(ReadyReply(_UNAVAILABLE, progress, outage, out), 503)
    status = 200 if state is NodeState.READY else 503
    return json_response(ReadyReply(state.value, progress, workers=out), status)


def outage_of(node: Node) -> str | None:
    """Return why no request can run on any model of a node, or None."""
    # A node whose upstreams may start accepts requests, for which autoscalers start them.
    outages = [
        None if model.forwarder.may_start("") else _outage(model.fleet)
        for model in node.models
        if model.is_known
    ]
    return None if None in outages or not outages else outages[0]


def _outage(fleet: Fleet) -> str | None:
    """Return why no request can run, or None. An upstream that is overloaded (429) may run one."""
    pauses = [worker.pause for worker in fleet.workers]
    if pauses and all(pause is not None and pause.status == 503 for pause in pauses):
        return fleet.outage or "every upstream is paused or does not respond"
    return fleet.outage or _hung(fleet)


def _hung(fleet: Fleet) -> str | None:
    """Return the outage of a fleet whose serving workers all hang, or None."""
    return "no worker completes a step" if all(w.hung for w in fleet.serving) else None


def _described(worker: FleetWorker) -> WorkerHealth:
    failure, pause = worker.backend.failure, worker.pause
    found = WorkerHealth(worker.worker_id, worker.status)
    if failure is not None:
        # The page shows the reasons of all workers together, and upstreams have names.
        found.reason = failure if pause is None else f"{worker.worker_id}: {failure}"
    elif worker.hung:
        found.reason = "the worker completes no step"
    elif pause is not None and pause.denied:
        found.reason = (
            f"it denied this gateway access with status {pause.denied}, and gets no requests for "
            f"{pause.remaining_s:.1f} s"
        )
    elif pause is not None and pause.late:
        found.reason = (
            "it did not respond in time to its latest requests, and gets no requests for "
            f"{pause.remaining_s:.1f} s, and then one at a time"
        )
    elif pause is not None:
        found.reason = (
            f"it responded with status {pause.status}, and gets no requests for "
            f"{pause.remaining_s:.1f} s unless a probe succeeds"
        )
    return found


async def version(_request: web.Request) -> web.Response:
    """Return the version."""
    return json_response(VersionReply(__version__))


async def metrics(request: web.Request) -> web.Response:
    """Return the metrics in Prometheus' text format, or OpenMetrics if the client accepts it."""
    node = request.app[NODE]
    await _set_stored(node)
    for model in node.models:
        await read_quotas(model.metrics, model.dispatcher.admission.quotas)
    accept = request.headers.get("Accept", "")
    if node.siblings is None:
        others = [model.metrics.snapshot() for model in node.models[1:]]
        write, content_type = node.metrics.page(accept, others)
    else:
        write, content_type = page_of(await _of_all_processes(node.siblings), accept)
    body = await offload(write)  # rendering thousands of lines would hold the event loop
    return web.Response(body=body, headers={"Content-Type": content_type})


async def _of_all_processes(siblings: Siblings) -> list[list[Row]]:
    """Return the metrics of all processes of a node.

    Raises:
        Unavailable: the parent does not respond. The metrics of one process would look like a
            reset of all counters.
    """
    try:
        return await siblings.metrics()
    except StoreError:
        why = "the metrics of the other processes cannot be read"
        raise Unavailable(why, retry_after_s=1) from None


async def _set_stored(node: Node) -> None:
    """Set the metrics of the stored responses. An outage of the store keeps the last values."""
    with suppress(StoreError):
        usage = await node.responses.call(ReadUsage())
        node.metrics.set(metric.STORED_RESPONSES, usage.values)
        node.metrics.set(metric.STORED_BYTES, usage.bytes)
