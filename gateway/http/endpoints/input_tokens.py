"""The endpoint `POST /v1/responses/input_tokens`, which counts the tokens of an input."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from draftgate.gateway.http.context import NODE, json_response, new_id, read_body
from draftgate.gateway.http.forwarding import pass_on
from draftgate.gateway.http.generation import offload_if_long
from draftgate.gateway.http.replies.shapes import InputTokensReply
from draftgate.gateway.http.requests.decoding import rename_params
from draftgate.gateway.http.requests.responses import PARAMS, parse_responses

PATH: Final = "/v1/responses/input_tokens"


async def count_input_tokens(request: web.Request) -> web.StreamResponse:
    """Return the number of tokens of the prompt that `/v1/responses` would make of a body.

    Raises:
        GatewayError, RequestRejected: the body is malformed or not supported.
    """
    node = request.app[NODE]
    if node.fleet.forwards:
        return await pass_on(request, missing=(404, 405))
    served, body = node.served, await read_body(request)
    with rename_params(PARAMS):
        parsed = await offload_if_long(lambda: parse_responses(body, served, new_id()), body)
    return json_response(InputTokensReply(len(parsed.job.prompts[0])))
