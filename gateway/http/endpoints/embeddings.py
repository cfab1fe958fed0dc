"""`POST /v1/embeddings`: texts in, normalised hidden states of their last tokens out."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from aiohttp import web

from backends.errors import BackendFailed, RequestRejected
from gateway.dispatch import Job, Placement
from gateway.errors import NoEmbeddings
from gateway.http.context import new_id, read_body
from gateway.http.generation import INLINE_BODY_BYTES, send_json, watched
from gateway.http.replies.embeddings import embeddings_reply
from gateway.http.requests.embeddings import EmbeddingCall, embedding_call
from gateway.http.requests.service import service_of
from gateway.node import Node
from gateway.telemetry.watch import RequestWatch

PATH: Final = "/v1/embeddings"

INLINE_STATE_BYTES: Final = 64 << 10
"""Longer answers are made in a thread: so many, 16384 numbers, take 0.8 ms as decimals and 0.2 ms
as base64 (one core of an AMD EPYC Zen 4, 2026-11-21)."""


async def embed(request: web.Request) -> web.StreamResponse:
    """Embed the texts of a request, in order.

    Raises:
        NoEmbeddings: the backend has none.
        GatewayError, RequestRejected, BackendFailed: as of generating requests.
    """
    return await watched(request, PATH, "embeddings", _respond)


async def _respond(request: web.Request, node: Node, watch: RequestWatch) -> web.StreamResponse:
    call = await _parse(request, node)
    internal_id = new_id()
    watch.span.set({"gen_ai.request.model": node.served.name, "gen_ai.response.id": internal_id})
    states: list[bytes] = []
    for job in call.jobs(internal_id):
        states += await _states(node, job, watch)
    reply = partial(
        embeddings_reply,
        states,
        dimensions=call.dimensions,
        as_base64=call.base64,
        model=node.served.name,
        prompt_tokens=watch.prompt_tokens,
    )
    short = sum(map(len, states)) <= INLINE_STATE_BYTES
    return await send_json(request, reply() if short else await asyncio.to_thread(reply))


async def _parse(request: web.Request, node: Node) -> EmbeddingCall:
    capabilities = node.fleet.card.capabilities
    if not capabilities.embeddings:
        raise NoEmbeddings(node.config.backend, node.served.name)
    body = await read_body(request)
    service = service_of(request.headers)
    if len(body) <= INLINE_BODY_BYTES:
        return embedding_call(body, node.served, capabilities, service)
    return await asyncio.to_thread(embedding_call, body, node.served, capabilities, service)


async def _states(node: Node, job: Job, watch: RequestWatch) -> list[bytes]:
    """Return the pooled hidden state of each of a job's texts.

    Raises:
        RequestRejected: one can never run.
        BackendFailed: a worker broke.
    """
    placements = _placed(node, job)
    watch.placed(placements)
    dispatch = watch.span.child("dispatch")
    states: dict[int, bytes] = {}
    try:
        async with node.dispatcher.run(placements) as deltas:
            async for delta in deltas:
                watch.observe(delta)
                if delta.embedding is not None:
                    states[delta.choice] = delta.embedding
    finally:
        dispatch.end()
    if len(states) < len(placements):
        raise BackendFailed("the worker ended the stream too early")
    return [states[index] for index in range(len(placements))]


def _placed(node: Node, job: Job) -> list[Placement]:
    try:
        return node.dispatcher.decide(job)
    except RequestRejected as error:
        raise RequestRejected(str(error), "input", error.limit_tokens) from None
