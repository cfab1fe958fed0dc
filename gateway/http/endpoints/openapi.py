"""`GET /openapi.json`: what this node takes and answers."""

from __future__ import annotations

from aiohttp import web

from gateway.errors import Unavailable
from gateway.http.context import NODE
from gateway.http.openapi.document import document


async def get_document(request: web.Request) -> web.Response:
    """Return the OpenAPI document; while the model loads, without its name and vocabulary."""
    try:
        served = request.app[NODE].served
    except Unavailable:
        served = None
    return web.Response(body=document(served), content_type="application/json")
