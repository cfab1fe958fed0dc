"""`GET /decisions`: what was decided about speculation lately, and from what."""

from __future__ import annotations

from typing import Final

import msgspec
from aiohttp import web

from draftgate.gateway.dispatch.decisions import KEPT, DecisionList
from draftgate.gateway.errors import InvalidRequest
from draftgate.gateway.http.context import NODE

SHOWN: Final = 50
"""Decisions that are shown unless `limit` asks for another number."""


async def list_decisions(request: web.Request) -> web.Response:
    """List the latest decisions, the newest first; `?limit=N` says how many.

    Raises:
        InvalidRequest: the limit is not from 1 to `KEPT`.
    """
    limit = request.query.get("limit", str(SHOWN))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 10 and 1 <= int(limit) <= KEPT):
        raise InvalidRequest(f"limit: must be from 1 to {KEPT}, not {limit!r}", "limit")
    found = DecisionList(list(request.app[NODE].decisions.latest(int(limit))))
    return web.Response(body=msgspec.json.encode(found), content_type="application/json")
