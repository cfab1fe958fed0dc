"""`GET /openapi.json`: what this node takes and answers."""

from __future__ import annotations

from aiohttp import web

from draftgate.gateway.errors import NotOffered, Unavailable
from draftgate.gateway.http.context import NODE
from draftgate.gateway.http.openapi.document import document
from draftgate.gateway.offload import offload


async def get_document(request: web.Request) -> web.Response:
    """Return the OpenAPI document; without a name and a vocabulary where there is no model."""
    try:
        served = request.app[NODE].served
    except (Unavailable, NotOffered):  # it loads, or it is an upstream's
        served = None
    body = await offload(document, served)  # tens of milliseconds, once
    return web.Response(body=body, content_type="application/json")
