"""The endpoints `/live`, `/workers` and `/decisions`, which provide the data of the live page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from heapq import nlargest
from operator import itemgetter
from typing import Final

import msgspec
from aiohttp import web

from draftgate.gateway.dispatch.decisions import KEPT
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.http.context import (
    ACCOUNT,
    NODE,
    READERS,
    check_query,
    json_response,
    query_number,
)
from draftgate.gateway.http.replies.rendering import event
from draftgate.gateway.http.sending import of_aiohttp
from draftgate.gateway.http.stream import EventStream
from draftgate.gateway.model_service import ModelService
from draftgate.gateway.node import Node
from draftgate.gateway.telemetry.live import SAMPLE_S
from draftgate.gateway.telemetry.recent_drafts import DecisionList
from draftgate.gateway.telemetry.worker_list import worker_list

MOST_INTERVAL_S: Final = 60

SHOWN: Final = 50
"""Decisions listed without a `limit`."""


async def live(request: web.Request) -> web.StreamResponse:
    """Send the stored samples (`telemetry.live.NodeSample`), and then one sample each second.

    The query `?interval=N` reduces the response to every Nth sample. The stream ends when the
    client disconnects or the node stops.

    Raises:
        InvalidRequest: the interval is not a whole number from 1 to `MOST_INTERVAL_S`.
    """
    check_query(request, "interval")
    interval = query_number(request, "interval", 1, MOST_INTERVAL_S)
    samples, events = request.app[NODE].live, EventStream(request, request.app[READERS])
    await events.write(b": live\n\n")
    number = 0
    while True:
        last, found = await samples.after(number)
        if not found:
            break
        first = last - len(found) + 1
        # Select by number instead of index, so that the interval continues across writes.
        due = [sample for at, sample in enumerate(found, first) if at % interval == 0]
        number = last
        if due:
            await events.write(b"".join(event(sample) for sample in due))
    await events.end()
    return of_aiohttp(events.response)


async def list_workers(request: web.Request) -> web.Response:
    """List the workers of the pool, the streams of this node, and their latest moves.

    Tenants see only their own streams and moves, and the workers of the models that their key may
    use. The streams of the other processes of the node are up to a second late.
    """
    check_query(request)
    node, account = request.app[NODE], request[ACCOUNT]
    others = [] if node.siblings is None else await node.siblings.streams()
    processes, tenant = [node.streams(), *others], account.sees_tenant
    workers = [
        (worker, model.name)
        for model, worker in node.workers()
        if account.models is None or any(_has(model, worker, name) for name in account.models)
    ]
    return json_response(worker_list(time.time(), workers, processes, tenant))


def _has(model: ModelService, worker: FleetWorker, name: str) -> bool:
    """Return whether requests for a model or adapter of this name may run on a worker."""
    if model.forwards and not model.config.served_model_name:
        return worker.offers(name)
    return name in model.names or name in model.fleet.adapters()


async def list_decisions(request: web.Request) -> web.Response:
    """List the latest decisions, newest first, and report the time that drafts saved lately.

    Tenants see only their own decisions and time. The query `?limit=N` sets the number of
    decisions. The response includes those of the other processes of the node, which are up to a
    second late.

    Raises:
        InvalidRequest: the limit is not a whole number from 1 to `KEPT`.
    """
    check_query(request, "limit")
    node, limit = request.app[NODE], query_number(request, "limit", SHOWN, KEPT)
    tenant = request[ACCOUNT].sees_tenant
    own = node.decisions.latest(limit, tenant)
    others = (
        [] if node.siblings is None else await node.siblings.records("decisions", limit, tenant)
    )
    drafts = node.live.recent_drafts(tenant)
    if not others:
        return json_response(DecisionList(own, drafts))
    encoded = [(one.decided_s, msgspec.json.encode(one)) for one in own]
    latest = nlargest(limit, encoded + others, key=itemgetter(0))
    parts = b",".join(map(itemgetter(1), latest)), msgspec.json.encode(drafts)
    return json_response(b'{"decisions":[%b],"drafts":%b}' % parts)


async def sampling(app: web.Application) -> AsyncIterator[None]:
    """Take samples while the application runs."""
    task = asyncio.create_task(_sample(app[NODE]))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _sample(node: Node) -> None:
    """Take a sample of all processes each second, until cancelled."""
    while True:
        others = [] if node.siblings is None else await node.siblings.activities()
        node.take_sample(others)
        await asyncio.sleep(SAMPLE_S)


async def end_streams(app: web.Application) -> None:
    """End the open streams of samples, so that they do not delay the shutdown."""
    app[NODE].live.close()
