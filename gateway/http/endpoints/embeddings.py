"""`POST /v1/embeddings`: texts in, normalised hidden states of their last tokens out."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Final

from aiohttp import web

from backends.errors import BackendFailed, RequestRejected
from gateway.errors import NoEmbeddings
from gateway.http.accounts import in_name_of_account
from gateway.http.context import new_id, read_body
from gateway.http.forwarding import forward_embeddings
from gateway.http.generation import INLINE_BODY_BYTES, send_json, watched
from gateway.http.replies.embeddings import embeddings_reply
from gateway.http.requests.embeddings import EmbeddingCall, embedding_call, waves
from gateway.http.requests.service import service_of
from gateway.job import Job
from gateway.node import Node
from gateway.telemetry.watch import RequestWatch

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
        return await forward_embeddings(request, node, watch)
    call = await _parsed(request, node, watch)
    states: list[bytes] = []
    for wave in waves(call.job):
        states += await _states(node, wave, watch, len(states))
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


async def _parsed(request: web.Request, node: Node, watch: RequestWatch) -> EmbeddingCall:
    """Return what the request asks for, in its account's name and within its bounds."""
    capabilities, served = node.fleet.card.capabilities, node.served
    if not capabilities.embeddings:
        raise NoEmbeddings(node.config.backend, served.name)
    body = await read_body(request)
    parse = partial(
        embedding_call, body, served, capabilities, new_id(), service_of(request.headers)
    )
    call = parse() if len(body) <= INLINE_BODY_BYTES else await asyncio.to_thread(parse)
    job = in_name_of_account(call.job, request, body)
    watch.parsed(job, served.name, stream=False)
    return replace(call, job=job)


async def _states(node: Node, wave: Job, watch: RequestWatch, first: int) -> list[bytes]:
    """Return the pooled hidden state of each of a wave's texts.

    Args:
        first: number of its first text in the request.

    Raises:
        RequestRejected: one can never run.
        Overloaded, QuotaExceeded: not now.
        BackendFailed: a worker broke.
    """
    states: dict[int, bytes] = {}
    try:
        async with node.dispatcher.run(wave, watch.span, watch.placed) as run:
            async for delta in run.deltas:
                watch.observe(delta._replace(choice=first + delta.choice))
                if delta.embedding is not None:
                    states[delta.choice] = delta.embedding
    except RequestRejected as error:
        raise RequestRejected(str(error), "input", error.limit_tokens) from None
    if len(states) < len(wave.prompts):
        raise BackendFailed("the worker ended the stream too early")
    return [states[index] for index in range(len(wave.prompts))]
