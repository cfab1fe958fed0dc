"""The endpoints `POST /v1/messages` and `POST /v1/messages/count_tokens`, Anthropic's API."""

from __future__ import annotations

from functools import partial
from typing import Final

from aiohttp import web

from draftgate.gateway.http.context import (
    MESSAGES_PATH,
    NODE,
    json_response,
    new_id,
    read_body,
    requested_model,
)
from draftgate.gateway.http.endpoints.input_tokens import count_tokens
from draftgate.gateway.http.forwarding import pass_on
from draftgate.gateway.http.generation import Endpoint
from draftgate.gateway.http.replies.anthropic import MessageRendering
from draftgate.gateway.http.replies.anthropic_shapes import MessageTokensReply
from draftgate.gateway.http.requests.anthropic import PARAMS, parse_count_tokens, parse_messages
from draftgate.gateway.http.requests.headers import Sender
from draftgate.gateway.http.translation.translations import MessageTokenCount, MessageTranslation

COUNT_PATH: Final = f"{MESSAGES_PATH}/count_tokens"

MESSAGES: Final = Endpoint(
    MESSAGES_PATH, "chat", parse_messages, MessageRendering, PARAMS, MessageTranslation
)


async def count_message_tokens(request: web.Request) -> web.StreamResponse:
    """Return the number of tokens of the prompt that `/v1/messages` would make of a body.

    Raises:
        GatewayError, RequestRejected: the body is malformed or not supported.
    """
    model = await requested_model(request, request.app[NODE])
    if model.forwards:
        return await pass_on(request, model, translate=MessageTokenCount)
    served = model.served
    body = await read_body(request)
    parse = partial(parse_count_tokens, body, served, Sender(new_id()))
    return json_response(MessageTokensReply(await count_tokens(parse, PARAMS, len(body))))
