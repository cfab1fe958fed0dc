"""Requests that an upstream answers: bytes in as they came, bytes out as they come."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from typing import Final

from aiohttp import web

from draftgate.backends.base import UpstreamCall
from draftgate.gateway.accounts import EVERYBODY, Account
from draftgate.gateway.errors import NotOffered
from draftgate.gateway.forwarding.answer import Forwarded
from draftgate.gateway.forwarding.forwarder import ForwardJob, forward_ask
from draftgate.gateway.http.accounts import ACCOUNT, fingerprint
from draftgate.gateway.http.context import NODE, REQUEST_ID, REQUEST_ID_HEADER, new_id, read_body
from draftgate.gateway.http.heartbeats import Heartbeats
from draftgate.gateway.http.relay import Relay
from draftgate.gateway.http.requests.forwarded import Wishes, changes, rewritten, wishes_of
from draftgate.gateway.http.requests.service import TPOT_HEADER, TTFT_HEADER, retries_of, service_of
from draftgate.gateway.node import Node
from draftgate.gateway.offload import offload
from draftgate.gateway.telemetry.tracing import NO_SPAN, Span
from draftgate.gateway.telemetry.watch import RequestWatch
from draftgate.policies.types import ServiceLevel

INLINE_BYTES: Final = 256 << 10
"""Of larger bodies the fields are read in a thread: 1 MB takes 7 ms, 13 with a name to map (Zen 4,
two busy cores, 2026-11-21), and the event loop may be held for 5."""

_TRACE: Final = ("traceparent", "tracestate")
_PASSED_ON: Final = ("Content-Type", "Accept", TTFT_HEADER, TPOT_HEADER, *_TRACE)
"""Headers the upstream gets. Not `Authorization`: the client's key is for this node, and the
upstream's is this node's own (`--upstream-api-key-env`)."""


async def forward(request: web.Request, node: Node, watch: RequestWatch) -> web.StreamResponse:
    """Answer a generating request from an upstream.

    Raises:
        GatewayError: nothing was sent to the client, and no upstream answers.
        ConnectionResetError: the client is gone.
    """
    return await _forward(request, node, watch, generates=True)


async def forward_embeddings(
    request: web.Request, node: Node, watch: RequestWatch
) -> web.StreamResponse:
    """As `forward`, of a request that has a prompt and no output."""
    return await _forward(request, node, watch, generates=False)


async def pass_on(request: web.Request) -> web.StreamResponse:
    """Answer from an upstream what takes none of its seats: `/v1/models`.

    Raises:
        GatewayError: as `forward`.
    """
    return await _pass_on(request, missing=())


async def pass_on_if_there(request: web.Request) -> web.StreamResponse:
    """As `pass_on`, of what not every engine has: `/tokenize`.

    Raises:
        NotOffered: this one has it not.
    """
    return await _pass_on(request, missing=(404, 405))


async def _forward(
    request: web.Request, node: Node, watch: RequestWatch, *, generates: bool
) -> web.StreamResponse:
    wishes, body = await _read(request, node, request[ACCOUNT])
    if not generates:
        wishes = replace(wishes, stream=False, n=1, max_tokens=0)
    watch.forwarding(
        wishes.model or "",
        request[ACCOUNT].name,
        wishes.n if generates else 0,
        stream=wishes.stream,
    )
    with watch.span.child("forward") as span:
        job = _job(request, body, wishes, span)
        relay, running = Relay(request, watch), node.forwarder.run(job, watch.span)
        return await relay.ended(_relayed(relay, running, watch, stream=wishes.stream))


async def _relayed(
    relay: Relay,
    running: AbstractAsyncContextManager[Forwarded],
    watch: RequestWatch,
    *,
    stream: bool,
) -> web.StreamResponse:
    """Send the answer that a forwarder's context has; who waits for events is told now and then."""
    async with AsyncExitStack() as stack:
        beats = Heartbeats(relay.comment) if stream else None
        try:
            answer = await stack.enter_async_context(running)
            if beats is not None:
                await beats.sent()
        finally:
            if beats is not None:
                beats.stop()
        watch.forwarded(answer.worker_id, answer.plan)
        return await relay.send(answer)


async def _pass_on(request: web.Request, missing: tuple[int, ...]) -> web.StreamResponse:
    with request.app[NODE].dispatcher.counted():
        relay = Relay(request)
        return await relay.ended(_straight(request, relay, missing))


async def _straight(
    request: web.Request, relay: Relay, missing: tuple[int, ...]
) -> web.StreamResponse:
    node = request.app[NODE]
    _, body = await _read(request, node, EVERYBODY)
    call = _call(request, body, NO_SPAN, service_of(request.headers))._replace(sequences=0)
    async with node.forwarder.straight(call) as answer:
        if answer.status in missing:
            raise NotOffered(f"the upstream has no {request.path}")
        return await relay.send(answer)


async def _read(request: web.Request, node: Node, account: Account) -> tuple[Wishes, bytes]:
    """Return what a request asks for, and its body as the upstream is to have it."""
    body = await read_body(request)
    if len(body) <= INLINE_BYTES:
        return _understood(body, node, account)
    return await offload(_understood, body, node, account)


def _understood(body: bytes, node: Node, account: Account) -> tuple[Wishes, bytes]:
    card = node.fleet.card
    wishes = wishes_of(body, card.max_model_len)
    if not body:
        return wishes, body
    names = (node.config.served_model_name, card.model_id)
    return wishes, rewritten(body, changes(wishes, names, account))


def _job(request: web.Request, body: bytes, wishes: Wishes, span: Span) -> ForwardJob:
    """Return a request as the forwarder takes it, within its account's bounds."""
    account = request[ACCOUNT]
    service = replace(service_of(request.headers), priority=wishes.priority)
    ask = forward_ask(new_id(), wishes.prompt_tokens, wishes.max_tokens, wishes.n, service, account)
    ask = replace(
        ask,
        fingerprint=fingerprint(account.name, body),
        retries=retries_of(request.headers),
    )
    call = _call(request, body, span, ask.service)._replace(sequences=wishes.n)
    return ForwardJob(ask, call, wishes.temperature, wishes.mode, wishes.max_draft_tokens)


def _call(request: web.Request, body: bytes, span: Span, service: ServiceLevel) -> UpstreamCall:
    """Return a request as the upstream gets it, with the service that its account gets."""
    headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
    asked = service_of(request.headers)
    if service.ttft_s is not None and service.ttft_s != asked.ttft_s:
        headers[TTFT_HEADER] = f"{service.ttft_s * 1e3:g}"
    if service.tpot_s is not None and service.tpot_s != asked.tpot_s:
        headers[TPOT_HEADER] = f"{service.tpot_s * 1e3:g}"
    headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
    headers.update(span.propagation())
    return UpstreamCall(request.method, request.rel_url.raw_path_qs, headers, body)
