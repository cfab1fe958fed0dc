"""`POST /v1/embeddings`: texts in, normalised hidden states of their last tokens out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from aiohttp import web

from draftgate.backends.errors import BackendFailed, RequestRejected
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.errors import NoEmbeddings
from draftgate.gateway.http.accounts import ACCOUNT, in_name_of_account
from draftgate.gateway.http.context import new_id, read_body
from draftgate.gateway.http.forwarding import forward
from draftgate.gateway.http.generation import parsed, send_json, watched
from draftgate.gateway.http.replies.embeddings import embeddings_reply
from draftgate.gateway.http.requests.embeddings import EmbeddingCall, embedding_call
from draftgate.gateway.http.requests.service import retries_of, service_of
from draftgate.gateway.node import Node
from draftgate.gateway.offload import offload
from draftgate.gateway.telemetry.watch import RequestWatch

PATH: Final = "/v1/embeddings"

INLINE_STATE_BYTES: Final = 64 << 10
"""Longer answers are made in a thread: so many, 16384 numbers, take 0.8 ms as decimals and 0.2 ms
as base64 (one core of an AMD EPYC Zen 4, 2026-11-21)."""


async def embed(request: web.Request) -> web.StreamResponse:
    """Embed the texts of a request, in order; before an upstream, pass it on.

    Raises:
        NoEmbeddings: the backend has none.
        GatewayError, RequestRejected, BackendFailed: as of generating requests.
    """
    return await watched(request, PATH, "embeddings", _respond)


async def _respond(request: web.Request, node: Node, watch: RequestWatch) -> web.StreamResponse:
    if node.fleet.forwards:
        return await forward(request, node, watch, generates=False)
    call = await _parsed(request, node, watch)
    states = await _states(node, call.job, watch)
    reply = partial(
        embeddings_reply,
        states,
        dimensions=call.dimensions,
        as_base64=call.base64,
        model=node.served.name,
        prompt_tokens=watch.prompt_tokens,
    )
    short = sum(map(len, states)) <= INLINE_STATE_BYTES
    return await send_json(request, reply() if short else await offload(reply))


async def _parsed(request: web.Request, node: Node, watch: RequestWatch) -> EmbeddingCall:
    """Return what the request asks for, in its account's name and within its bounds."""
    capabilities, served = node.fleet.card.capabilities, node.served
    if not capabilities.embeddings:
        raise NoEmbeddings(node.config.backend, served.name)
    body = await read_body(request)
    request_id, service = new_id(), service_of(request.headers)
    account, retries = request[ACCOUNT], retries_of(request.headers)

    def parse() -> EmbeddingCall:
        call = embedding_call(body, served, capabilities, request_id, service)
        return replace(call, job=in_name_of_account(call.job, account, body, retries))

    call = await parsed(parse, body)
    watch.parsed(call.job, served.name, stream=False)
    return call


async def _states(node: Node, job: Job, watch: RequestWatch) -> list[bytes]:
    """Return the pooled hidden state of each of a request's texts.

    Raises:
        RequestRejected: one can never run.
        Overloaded, QuotaExceeded: not now.
        BackendFailed: a worker broke.
    """
    states: dict[int, bytes] = {}
    try:
        async with node.dispatcher.run(job, watch.span, watch) as run:
            async for delta in run.deltas:
                watch.observe(delta)
                if delta.embedding is not None:
                    states[delta.choice] = delta.embedding
    except RequestRejected as error:
        raise RequestRejected(str(error), "input", error.limit_tokens) from None
    if len(states) < len(job.prompts):
        raise BackendFailed("the worker ended the stream too early")
    return [states[index] for index in range(len(job.prompts))]
