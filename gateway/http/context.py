"""What handlers share: the node, and the id of the request."""

from __future__ import annotations

import secrets
from typing import Final

from aiohttp import web

from draftgate.gateway.errors import BodyTooLarge, InvalidRequest
from draftgate.gateway.http.readers import SlowReaders
from draftgate.gateway.node import Node
from draftgate.gateway.telemetry.logs import add_about_request
from draftgate.gateway.telemetry.tracing import Span, Tracing

NODE: Final = web.AppKey("node", Node)
SLOW_READERS: Final = web.AppKey("slow_readers", SlowReaders)

REQUEST_ID: Final = web.RequestKey("request_id", str)
"""The id under which logs and the `x-request-id` header know a request."""

REQUEST_ID_HEADER: Final = "x-request-id"
_LONGEST_ID: Final = 128


def client_request_id(request: web.Request) -> str:
    """Return the id the client sent if it is short and printable, or a new one."""
    sent = request.headers.get(REQUEST_ID_HEADER, "")
    if 0 < len(sent) <= _LONGEST_ID and sent.isascii() and sent.isprintable():
        return sent
    return new_id()


def new_id() -> str:
    """Return an id nobody else has."""
    return secrets.token_hex(12)


def begin_span(tracing: Tracing, request: web.Request, route: str, operation: str) -> Span:
    """Start the SERVER span of a generating request; its log lines have the trace's id.

    Attributes are those of OpenTelemetry's HTTP and GenAI conventions. What samplers are given is
    little: most of it is gathered for spans only that will be sent.
    """
    span = tracing.server(f"{request.method} {route}", request.headers, {"http.route": route})
    if not span.recording:
        return span
    add_about_request(trace=span.trace_id)
    version = request.version
    span.set(
        {
            "http.request.method": request.method,
            "url.path": request.path,
            "url.scheme": request.scheme,
            "client.address": request.remote or "",
            "network.protocol.version": f"{version.major}.{version.minor}",
            "user_agent.original": request.headers.get("User-Agent", ""),
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "draftgate",
            "draftgate.request_id": request[REQUEST_ID],
        }
    )
    return span


async def read_body(request: web.Request) -> bytes:
    """Return the body.

    Raises:
        BodyTooLarge: it exceeds the limit.
        InvalidRequest: its transfer or content encoding is broken.
    """
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[NODE].config.max_body_bytes
        raise BodyTooLarge(f"the body exceeds {limit} bytes") from None
    except web.RequestPayloadError as error:
        reason = " ".join(str(error).split())
        raise InvalidRequest(f"the body cannot be read: {reason}") from None
