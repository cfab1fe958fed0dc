"""The one path of a generating request: parse, decide, run, answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from aiohttp import web

from draftgate.gateway.errors import Draining, GatewayError, Starting, as_gateway_error
from draftgate.gateway.http.accounts import ACCOUNT, in_name_of_account
from draftgate.gateway.http.answer import Answer
from draftgate.gateway.http.context import NODE, SLOW_READERS, begin_span, new_id, read_body
from draftgate.gateway.http.forwarding import forward
from draftgate.gateway.http.replies.rendering import Frame, Rendering
from draftgate.gateway.http.requests.naming import named_as
from draftgate.gateway.http.requests.service import retries_of, service_of
from draftgate.gateway.http.requests.validation import Call
from draftgate.gateway.http.stream import EventStream, stream_answer
from draftgate.gateway.node import Node
from draftgate.gateway.offload import offload
from draftgate.gateway.served import Served
from draftgate.gateway.telemetry.watch import Ending, RequestWatch
from draftgate.policies.types import ServiceLevel

T = TypeVar("T")

INLINE_BODY_BYTES: Final = 16 << 10
"""Larger bodies are parsed in a thread: 1 MB of text takes 0.4 s to tokenise, and the event loop
may be held for 5 ms (design, section 8)."""

Respond = Callable[[web.Request, Node, RequestWatch], Awaitable[web.StreamResponse]]
"""Answers a request of a node, and tells the watch about it."""

CLIENT_GONE: Final = 499
"""Status in logs and traces for a request whose client left (nginx's)."""


@dataclass(frozen=True, slots=True)
class Api:
    """One generating endpoint.

    Attributes:
        operation: `gen_ai.operation.name` of its spans.
        params: what its clients call parameters that have other names in what it is turned into.
        parse: body, model, request id and what headers ask for to a call; may run in a thread.
    """

    path: str
    operation: str
    parse: Callable[[bytes, Served, str, ServiceLevel], Call]
    rendering: Callable[[Frame, Call], Rendering]
    params: Mapping[str, str] = field(default_factory=dict)


def handler(api: Api) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return the aiohttp handler of an endpoint."""

    async def respond(request: web.Request, node: Node, watch: RequestWatch) -> web.StreamResponse:
        return await _respond(request, node, api, watch)

    async def handle(request: web.Request) -> web.StreamResponse:
        return await watched(request, api.path, api.operation, respond)

    return handle


async def watched(
    request: web.Request, path: str, operation: str, respond: Respond
) -> web.StreamResponse:
    """Answer a request that goes to the workers: in flight, and watched, up to its last byte.

    Args:
        operation: `gen_ai.operation.name` of its spans.
    """
    node = request.app[NODE]
    span = begin_span(node.tracing, request, path, operation)
    watch = RequestWatch(node.metrics, span, path, operation)
    try:
        with node.dispatcher.counted():
            response = await respond(request, node, watch)
    except (asyncio.CancelledError, ConnectionResetError) as error:
        watch.end(Ending.CANCELLED, CLIENT_GONE, error)
        raise
    except Exception as error:
        shown = as_gateway_error(error)
        watch.end(_ending(shown), shown.status, error)
        raise
    watch.end(Ending.FINISHED, response.status)
    return response


async def _respond(
    request: web.Request, node: Node, api: Api, watch: RequestWatch
) -> web.StreamResponse:
    if node.fleet.forwards:
        return await forward(request, node, watch)
    with named_as(api.params):
        call = await _parsed(request, node, api, watch)
        answer = Answer(call, api.rendering(_frame(call, node), call), watch)
        running = node.dispatcher.run(call.job, watch.span, watch)
        if call.stream:
            events = EventStream(request, request.app[SLOW_READERS])
            await stream_answer(events, answer, running)
            return events.response
        async with running as answer.run:
            body = await answer.whole()
    return await send_json(request, body)


async def send_json(request: web.Request, body: bytes) -> web.StreamResponse:
    """Send an answer; the request is in flight, and its span open, up to the last byte."""
    response = web.Response(body=body, content_type="application/json")
    await response.prepare(request)
    await response.write_eof()
    return response


async def _parsed(request: web.Request, node: Node, api: Api, watch: RequestWatch) -> Call:
    """Return what the request asks for, in its account's name and within its bounds.

    Raises:
        GatewayError, RequestRejected: it cannot run.
    """
    served = node.served
    body = await read_body(request)
    internal_id = new_id()  # two clients may send the same id
    service = service_of(request.headers)
    account, retries = request[ACCOUNT], retries_of(request.headers)

    def parse() -> Call:
        call = api.parse(body, served, internal_id, service)
        return replace(call, job=in_name_of_account(call.job, account, body, retries))

    call = await parsed(parse, body)
    watch.parsed(call.job, served.name, stream=call.stream)
    return call


async def parsed(parse: Callable[[], T], body: bytes) -> T:
    """Return what parses a body, which takes a thread where it is long."""
    return parse() if len(body) <= INLINE_BODY_BYTES else await offload(parse)


def _frame(call: Call, node: Node) -> Frame:
    wants_logprobs = call.job.sampling.logprobs is not None
    served = node.served
    request_id = call.job.request_id
    return Frame(request_id, int(time.time()), served.name, served.tokenizer, wants_logprobs)


def _ending(error: GatewayError) -> Ending:
    refused = error.status < 500 or isinstance(error, Starting | Draining)
    return Ending.REJECTED if refused else Ending.FAILED
