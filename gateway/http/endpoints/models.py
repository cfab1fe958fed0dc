"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway.http.context import NODE
from gateway.http.replies.shapes import ModelList, ModelReply
from gateway.node import Node


async def list_models(request: web.Request) -> web.Response:
    """List the one model served here."""
    return _json(ModelList([_model(request.app[NODE])]))


async def get_model(request: web.Request) -> web.Response:
    """Describe the model.

    Raises:
        ModelNotFound: it is not the one served here.
    """
    node = request.app[NODE]
    node.served.check_name(request.match_info["model"])
    return _json(_model(node))


def _model(node: Node) -> ModelReply:
    served, card = node.served, node.fleet.card
    return ModelReply(served.name, card.created_s, card.root, card.max_model_len)


def _json(reply: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(reply), content_type="application/json")
