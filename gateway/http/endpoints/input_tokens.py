"""The endpoint `POST /v1/responses/input_tokens`, which counts the tokens of an input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from aiohttp import web

from draftgate.gateway.http.context import NODE, json_response, new_id, read_body, requested_model
from draftgate.gateway.http.forwarding import pass_on
from draftgate.gateway.http.generation import offload_if_long
from draftgate.gateway.http.history import find_previous
from draftgate.gateway.http.replies.shapes import InputTokensReply
from draftgate.gateway.http.requests.conversation import items_of
from draftgate.gateway.http.requests.decoding import RenamedParams
from draftgate.gateway.http.requests.headers import Sender
from draftgate.gateway.http.requests.responses import PARAMS, parse_responses
from draftgate.gateway.http.requests.validation import ParsedRequest
from draftgate.gateway.http.translation.translations import InputTokenCount

PATH: Final = "/v1/responses/input_tokens"


async def count_input_tokens(request: web.Request) -> web.StreamResponse:
    """Return the number of tokens of the prompt that `/v1/responses` would make of a body.

    Raises:
        GatewayError, RequestRejected: the body is malformed or not supported.
    """
    model = await requested_model(request, request.app[NODE])
    if model.forwards:
        return await pass_on(request, model, translate=InputTokenCount)
    served = model.served
    body = await read_body(request)
    previous = await find_previous(request)

    def parse() -> ParsedRequest:
        earlier = () if previous is None else items_of(previous)
        return parse_responses(body, served, Sender(new_id()), earlier=earlier)

    tokens = await count_tokens(parse, PARAMS, len(body) + len(previous or b""))
    return json_response(InputTokensReply(tokens))


async def count_tokens(
    parse: Callable[[], ParsedRequest], params: Mapping[str, str], read_bytes: int
) -> int:
    """Return the number of tokens of the prompt that a parser makes.

    Args:
        params: the endpoint's names of parameters.
        read_bytes: the number of bytes that the parser reads.

    Raises:
        InvalidRequest, RequestRejected: the body is malformed or not supported.
    """
    with RenamedParams(params):
        parsed = await offload_if_long(parse, read_bytes)
    return len(parsed.job.prompts[0])
