"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from aiohttp import web

from draftgate.gateway.errors import ModelNotFound
from draftgate.gateway.http.context import NODE, json_response
from draftgate.gateway.http.forwarding import pass_on
from draftgate.gateway.http.replies.shapes import ModelList, ModelReply
from draftgate.gateway.node import Node


async def list_models(request: web.Request) -> web.StreamResponse:
    """List the model of this node, or the models of the upstream."""
    if _are_the_upstreams(request.app[NODE]):
        return await pass_on(request)
    return json_response(ModelList([_model(request.app[NODE])]))


async def get_model(request: web.Request) -> web.StreamResponse:
    """Describe the model.

    Raises:
        ModelNotFound: it is not the model of this node.
    """
    node = request.app[NODE]
    if _are_the_upstreams(node):
        return await pass_on(request)
    asked, served = request.match_info["model"], _name(node)
    if asked != served:
        raise ModelNotFound(asked, served)
    return json_response(_model(node))


def _model(node: Node) -> ModelReply:
    name, card = _name(node), node.fleet.card
    root = name if node.fleet.forwards else card.root  # hides the upstream's address
    return ModelReply(name, card.created_s, root, card.max_model_len)


def _are_the_upstreams(node: Node) -> bool:
    """Return whether clients use the upstream's own names of models."""
    return node.fleet.forwards and node.config.served_model_name is None


def _name(node: Node) -> str:
    """Return the model's name.

    Raises:
        Unavailable: the model is not loaded.
    """
    return node.model_name if node.fleet.forwards else node.served.name
