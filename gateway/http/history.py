"""Stored responses of the account of a request, and their continuation."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw, Struct

from draftgate.gateway.errors import PreviousResponseNotFound, ResponseNotFound, Unavailable
from draftgate.gateway.http.context import ACCOUNT, NODE, read_body
from draftgate.gateway.http.direct import Request
from draftgate.gateway.http.generation import offload_if_long
from draftgate.gateway.http.requests.conversation import StoredResponse, encode
from draftgate.gateway.http.requests.decoding import decode
from draftgate.gateway.http.requests.validation import ParsedRequest
from draftgate.gateway.node import Node
from draftgate.gateway.state.commands import GetResponse, PutResponse
from draftgate.gateway.state.store import StoreError
from draftgate.gateway.telemetry import metric_definitions as metric


class _Continuation(Struct):
    """The field of a request that names the response to continue."""

    previous_response_id: str | None = None


_decoder: Final = msgspec.json.Decoder(_Continuation)


async def find_response(request: Request, response_id: str) -> bytes:
    """Return the value of a stored response of the account.

    Raises:
        ResponseNotFound: the account has no such response.
        Unavailable: the store does not respond.
    """
    try:
        stored = await request.app[NODE].responses.call(
            GetResponse(request[ACCOUNT].name, response_id)
        )
    except StoreError as error:
        raise no_store() from error
    if stored is None:
        raise ResponseNotFound(response_id)
    return stored


async def find_previous(request: Request) -> bytes | None:
    """Return the value of the response that a request continues, or None if it continues none.

    Raises:
        PreviousResponseNotFound: the account has no such response.
        GatewayError: the body cannot be read, or the store does not respond.
    """
    body = await read_body(request)
    named = await offload_if_long(lambda: decode(body, _decoder), len(body))
    if not named.previous_response_id:
        return None
    try:
        return await find_response(request, named.previous_response_id)
    except ResponseNotFound:
        raise PreviousResponseNotFound(named.previous_response_id) from None


async def store_response(node: Node, parsed: ParsedRequest, reply: bytes) -> bool:
    """Store a response with its conversation, and return whether the store has it.

    A conversation that is larger than the largest request is not stored, because the store must not
    accept more than a client could send.

    Args:
        reply: the JSON of the response.
    """
    value = encode(StoredResponse(Raw(parsed.conversation), Raw(reply)))
    if len(value) > node.config.max_body_bytes:
        return False
    job = parsed.job
    put = PutResponse(job.tenant, f"resp_{job.request_id}", value)
    found = await node.responses.call(put)
    node.metrics.add(metric.EVICTED_RESPONSES, found.evicted)
    return found.kept


def no_store() -> Unavailable:
    """Return the error of a store that does not respond."""
    return Unavailable("the store of responses does not respond", retry_after_s=1)
