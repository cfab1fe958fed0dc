"""The endpoints that retrieve and delete stored responses, and list their input items."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from aiohttp import web

from draftgate.gateway.errors import NotOffered, ResponseNotFound, Unsupported, invalid
from draftgate.gateway.http.context import ACCOUNT, NODE, json_response, query_number
from draftgate.gateway.http.generation import offload_if_long
from draftgate.gateway.http.history import find_response, no_store
from draftgate.gateway.http.replies.shapes import DeletedResponse, InputItemList
from draftgate.gateway.http.requests.conversation import decode_stored
from draftgate.gateway.state.commands import DeleteResponse
from draftgate.gateway.state.store import StoreError

PATH: Final = "/v1/responses/{response_id}"
ROUTE: Final = "/v1/responses/{response_id:(?!input_tokens/?$)[^{}/]+}"
"""The route of `PATH`, without the path of another endpoint, which accepts other methods."""

ITEMS_PATH: Final = f"{PATH}/input_items"

MOST_ITEMS: Final = 100
DEFAULT_ITEMS: Final = 20
"""OpenAI's bounds of a page of input items."""

ORDERS: Final = ("asc", "desc")


async def get_response(request: web.Request) -> web.Response:
    """Return a stored response.

    Raises:
        Unsupported: the client requests a stream, which only background responses have.
        ResponseNotFound: the account has no such response.
    """
    _check_offered(request)
    if request.query.get("stream", "false") != "false":
        raise Unsupported("stream")
    stored = await find_response(request, request.match_info["response_id"])
    found = await offload_if_long(lambda: decode_stored(stored), len(stored))
    return json_response(bytes(found.response))


async def delete_response(request: web.Request) -> web.Response:
    """Delete a stored response.

    Raises:
        ResponseNotFound: the account has no such response.
        Unavailable: the store does not respond.
    """
    _check_offered(request)
    response_id = request.match_info["response_id"]
    try:
        delete = DeleteResponse(request[ACCOUNT].name, response_id)
        found = await request.app[NODE].responses.call(delete)
    except StoreError as error:
        raise no_store() from error
    if not found:
        raise ResponseNotFound(response_id)
    return json_response(DeletedResponse(response_id))


async def list_input_items(request: web.Request) -> web.Response:
    """Return a page of the input items of a stored response, including those that it continues.

    Raises:
        InvalidRequest: a parameter is malformed, or `after` is not the id of an input item.
        ResponseNotFound: the account has no such response.
    """
    _check_offered(request)
    limit = query_number(request, "limit", DEFAULT_ITEMS, MOST_ITEMS)
    order = request.query.get("order", "desc")
    if order not in ORDERS:
        raise invalid("order", f"must be asc or desc, not {order!r}")
    after = request.query.get("after")
    stored = await find_response(request, request.match_info["response_id"])
    return json_response(
        await offload_if_long(lambda: _page(stored, order, after, limit), len(stored))
    )


def _page(stored: bytes, order: str, after: str | None, limit: int) -> InputItemList:
    """Return the items that follow the item `after` in an order.

    Raises:
        InvalidRequest: no item has the id `after`.
    """
    items = msgspec.json.decode(decode_stored(stored).items, type=list[dict[str, Any]])
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise invalid("after", f"must be the id of an input item, not {after!r}")
    begin = 0 if after is None else ids.index(after) + 1
    page = items[begin : begin + limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return InputItemList(page, first, last, begin + limit < len(items))


def _check_offered(request: web.Request) -> None:
    if all(model.forwards for model in request.app[NODE].models):
        raise NotOffered(
            "this node only forwards requests to upstreams, which store the responses themselves"
        )
