"""The endpoint `POST /v1/responses`, which continues and stores responses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from draftgate.gateway.http.answer import StoreReply
from draftgate.gateway.http.context import NODE
from draftgate.gateway.http.direct import Request
from draftgate.gateway.http.generation import Endpoint, parse_request
from draftgate.gateway.http.history import find_previous, store_response
from draftgate.gateway.http.replies.responses import ResponseRendering
from draftgate.gateway.http.requests.conversation import conversation, items_of
from draftgate.gateway.http.requests.headers import Sender
from draftgate.gateway.http.requests.responses import PARAMS, ResponsesBody, parse_responses
from draftgate.gateway.http.requests.validation import ParsedRequest
from draftgate.gateway.http.translation.translations import ResponseTranslation
from draftgate.gateway.node import Node
from draftgate.gateway.served_model import ServedModel
from draftgate.gateway.telemetry.watch import RequestWatch

_PATH: Final = "/v1/responses"


class ResponsesEndpoint(Endpoint):
    """An endpoint whose requests may continue a stored response."""

    async def parsed(
        self, request: Request, served: ServedModel, watch: RequestWatch
    ) -> ParsedRequest:
        """Return the parsed request after its conversation, as `parse_request` does."""
        previous = await find_previous(request)
        stores = request.app[NODE].config.response_store_bytes > 0

        def parse(body: bytes, served: ServedModel, sender: Sender) -> ParsedRequest:
            earlier = () if previous is None else items_of(previous)
            parsed = parse_responses(body, served, sender, earlier)
            assert isinstance(parsed.body, ResponsesBody)
            if not stores or parsed.body.store is False:
                return parsed
            return replace(parsed, conversation=conversation(body, previous, sender.request_id))

        return await parse_request(request, served, parse, watch, len(previous or b""))

    def store(self, node: Node, parsed: ParsedRequest) -> StoreReply | None:
        """Return the function that stores the response, unless the request has `store: false`."""
        return partial(store_response, node, parsed) if parsed.conversation else None


RESPONSES: Final = ResponsesEndpoint(
    _PATH, "chat", parse_responses, ResponseRendering, PARAMS, ResponseTranslation
)
