"""The endpoints `/records` and `/records/{request_id}` with the latest requests of a node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
from aiohttp import web

from draftgate.gateway.dispatch.decisions import KEPT, Decision
from draftgate.gateway.errors import RequestNotFound
from draftgate.gateway.http.context import (
    ACCOUNT,
    NODE,
    check_query,
    json_response,
    query_number,
)
from draftgate.gateway.http.endpoints.live import SHOWN
from draftgate.gateway.node import Node
from draftgate.gateway.telemetry.request_facts import (
    RecordedRequest,
    RequestDetail,
    RequestList,
    RequestRecord,
    RequestSpan,
)

PATH: Final = "/records/{request_id}"

FILTERS: Final[Mapping[str, str]] = {
    "q": "A text in an id, a name, the ending or the error of the request.",
    "model": "The name of the model that the client has asked for, or of the one that responds.",
    "tenant": "The tenant.",
    "worker": "The id of a worker that ran the request.",
    "ending": "The ending: running, finished, cancelled, rejected or failed.",
}
"""The parameters of the query that select requests, with their descriptions."""

_recorded: Final = msgspec.json.Decoder(RecordedRequest)
_decision: Final = msgspec.json.Decoder(Decision)


async def list_records(request: web.Request) -> web.Response:
    """List the latest requests that match all filters of the query (`FILTERS`), newest first.

    Tenants see only their own requests. Those of the other processes of the node are up to a second
    late.

    Raises:
        InvalidRequest: a parameter is unknown, or the limit no whole number from 1 to `KEPT`.
    """
    check_query(request, "limit", *FILTERS)
    node, limit = request.app[NODE], query_number(request, "limit", SHOWN, KEPT)
    tenant = request[ACCOUNT].sees_tenant
    records = [one.record() for one in node.requests if tenant in {None, one.account}]
    records += [one.record for one in await _of_others(node, tenant)]
    records.sort(key=lambda one: one.started_s, reverse=True)
    wanted = {name: request.query.get(name, "") for name in FILTERS}
    return json_response(
        RequestList(
            [one for one in records if _matches(one, wanted)][:limit],
            _names(name for one in records for name in (one.model, one.requested_model)),
            _names(one.tenant for one in records),
            _names(worker for one in records for worker in one.workers),
            _names(one.ending for one in records),
        )
    )


async def get_record(request: web.Request) -> web.Response:
    """Return one of the latest requests, by the id of its response or by its `x-request-id`.

    Raises:
        RequestNotFound: none of the latest requests that the tenant may see has this id.
    """
    check_query(request)
    node, tenant = request.app[NODE], request[ACCOUNT].sees_tenant
    named = request.match_info["request_id"]
    found = await find_record(node, named, tenant)
    if found is None:
        raise RequestNotFound(f"none of the latest {KEPT} requests has the id {named!r}")
    decisions = await _decisions_about(node, found.record, tenant)
    return json_response(
        RequestDetail(found.record, _with_queue(found, decisions), found.steps, decisions)
    )


async def find_record(node: Node, named: str, tenant: str | None) -> RecordedRequest | None:
    """Return the newest request of this id, or None.

    Args:
        named: the id of the request or of its response, or its `x-request-id`.
        tenant: the tenant whose requests are searched, or None for all.
    """
    ids = {named, named.rpartition("-")[2], named.rpartition("_")[2]}  # chatcmpl-, resp_
    for one in node.requests:
        if tenant in {None, one.account} and not ids.isdisjoint((one.request_id, one.client_id)):
            return one.recorded()
    for other in await _of_others(node, tenant):
        if not ids.isdisjoint((other.record.request_id, other.record.client_id)):
            return other
    return None


async def _of_others(node: Node, tenant: str | None) -> list[RecordedRequest]:
    """Return the latest requests of the other processes of the node, newest first."""
    if node.siblings is None:
        return []
    found = await node.siblings.records("requests", KEPT, tenant)
    return [_recorded.decode(json) for _, json in found]


async def _decisions_about(node: Node, record: RequestRecord, tenant: str | None) -> list[Decision]:
    """Return the decisions about a request, oldest first."""
    found = node.decisions.latest(KEPT, tenant)
    if node.siblings is not None:
        others = await node.siblings.records("decisions", KEPT, tenant)
        found += [_decision.decode(json) for _, json in others]
    about = [one for one in found if one.request_id == record.request_id]
    return sorted(about, key=lambda one: one.decided_s)


def _with_queue(found: RecordedRequest, decisions: list[Decision]) -> list[RequestSpan]:
    """Return the phases of a request, of which an upstream does not know the queue."""
    spans, started_s = found.spans, found.record.started_s
    if not decisions or any(one.name == "queue" for one in spans):
        return spans
    waited_s = max(decisions[0].decided_s - started_s, 0.0)
    later = [msgspec.structs.replace(one, begin_s=max(one.begin_s, waited_s)) for one in spans]
    return [RequestSpan("queue", 0.0, waited_s), *later]


def _matches(record: RequestRecord, wanted: Mapping[str, str]) -> bool:
    return (
        wanted["model"] in {"", record.model, record.requested_model}
        and wanted["tenant"] in {"", record.tenant}
        and wanted["ending"] in {"", record.ending}
        and (not wanted["worker"] or wanted["worker"] in record.workers)
        and record.mentions(wanted["q"].strip().lower())
    )


def _names(values: Iterable[str]) -> list[str]:
    """Return the different names among some values, sorted."""
    return sorted(set(values) - {""})
