"""The one path of a generating request: parse, decide, run, answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from aiohttp import web

from gateway.accounts import Account
from gateway.errors import Draining, GatewayError, Starting, as_gateway_error
from gateway.http.accounts import ACCOUNT, fingerprint
from gateway.http.answer import Answer
from gateway.http.context import NODE, SLOW_READERS, begin_span, new_id, read_body
from gateway.http.forwarding import forward
from gateway.http.replies.rendering import Frame, Rendering
from gateway.http.requests.naming import named_as
from gateway.http.requests.service import retries_of, service_of
from gateway.http.requests.validation import Call, Served
from gateway.http.stream import EventStream, stream_answer
from gateway.node import Node
from gateway.telemetry.watch import Ending, RequestWatch
from policies.types import ServiceLevel

INLINE_BODY_BYTES: Final = 16 << 10
"""Larger bodies are parsed in a thread: 1 MB of text takes 0.4 s to tokenise, and the event loop
may be held for 5 ms (design, section 8)."""

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

    async def handle(request: web.Request) -> web.StreamResponse:
        return await _handle(request, api)

    return handle


async def _handle(request: web.Request, api: Api) -> web.StreamResponse:
    node = request.app[NODE]
    span = begin_span(node.tracing, request, api.path, api.operation)
    watch = RequestWatch(node.metrics, span, api.path, api.operation)
    try:
        with node.dispatcher.counted():
            response = await _respond(request, node, api, watch)
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
        running = node.dispatcher.run(call.job, watch.span, watch.placed)
        if call.stream:
            events = EventStream(request, request.app[SLOW_READERS])
            await stream_answer(events, answer, running)
            return events.response
        async with running as answer.run:
            body = await answer.whole()
    response = web.Response(body=body, content_type="application/json")
    # Sent from here, so that the request is in flight, and its span open, up to the last byte.
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
        return _in_name_of(account, call, body, retries)

    call = parse() if len(body) <= INLINE_BODY_BYTES else await asyncio.to_thread(parse)
    watch.parsed(call.job, served.name, stream=call.stream)
    return call


def _in_name_of(account: Account, call: Call, body: bytes, retries: int | None) -> Call:
    """Return a call as an account may make it."""
    job = replace(
        call.job,
        service=account.capped(call.job.service),
        tenant=account.name,
        share=account.share,
        fingerprint=fingerprint(account.name, body),
        retries=retries,
    )
    return replace(call, job=job)


def _frame(call: Call, node: Node) -> Frame:
    wants_logprobs = call.job.sampling.logprobs is not None
    served = node.served
    request_id = call.job.request_id
    return Frame(request_id, int(time.time()), served.name, served.tokenizer, wants_logprobs)


def _ending(error: GatewayError) -> Ending:
    refused = error.status < 500 or isinstance(error, Starting | Draining)
    return Ending.REJECTED if refused else Ending.FAILED
