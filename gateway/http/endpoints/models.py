"""The endpoints `/v1/models`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import web
from msgspec.structs import replace

from draftgate.backends.types import Task
from draftgate.gateway.errors import ModelNotFound, invalid
from draftgate.gateway.http.context import (
    ACCOUNT,
    NODE,
    is_anthropic,
    json_response,
    query_number,
    read_body,
    requested_model,
)
from draftgate.gateway.http.forwarding import pass_on
from draftgate.gateway.http.generation import offload_if_long
from draftgate.gateway.http.replies.anthropic_models import (
    DEFAULT_MODELS,
    MOST_MODELS,
    UpstreamModel,
    UpstreamModelList,
    message_model,
    model_page,
)
from draftgate.gateway.http.replies.rendering import encode
from draftgate.gateway.http.replies.shapes import (
    DetokenizeReply,
    ModelReply,
    TokenizeReply,
)
from draftgate.gateway.http.requests.decoding import decode
from draftgate.gateway.http.requests.messages import chat_prompt, prompt_ending
from draftgate.gateway.http.requests.reasoning import template_variables
from draftgate.gateway.http.requests.schemas import ChatBody, DetokenizeBody, TokenizeBody
from draftgate.gateway.http.requests.tools import offered_tools
from draftgate.gateway.model_service import ModelService
from draftgate.gateway.node import Node
from draftgate.gateway.served_model import ServedModel
from draftgate.gateway.upstream_models import MOST_NAMES

_tokenize_decoder: Final = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder: Final = msgspec.json.Decoder(DetokenizeBody)
_upstream_models: Final = msgspec.json.Decoder(UpstreamModelList)
_upstream_model_decoder: Final = msgspec.json.Decoder(UpstreamModel)


async def list_models(request: web.Request) -> web.StreamResponse:
    """List the models of this node, of its pool and of its upstreams."""
    node, anthropic = request.app[NODE], is_anthropic(request)
    limit = query_number(request, "limit", DEFAULT_MODELS, MOST_MODELS) if anthropic else 0
    found = _listed(node)
    listed = [one for name, one in found.items() if request[ACCOUNT].allows(name)]
    if not found:  # no list is known, and an upstream explains why
        convert = partial(_upstream_page, request, limit)
        return await pass_on(request, node.models[-1], convert)
    if anthropic:
        return json_response(
            model_page([_in_both_forms(one) for one in listed], request.query, limit)
        )
    return json_response(msgspec.json.encode({"object": "list", "data": listed}))


async def get_model(request: web.Request) -> web.StreamResponse:
    """Describe the model.

    Raises:
        ModelNotFound: the node serves other models.
    """
    node, name = request.app[NODE], request.match_info["model"]
    listed = {k: v for k, v in _listed(node).items() if request[ACCOUNT].allows(k)}
    if (found := listed.get(name)) is not None:
        return json_response(
            encode(message_model(_in_both_forms(found)) if is_anthropic(request) else found)
        )
    upstreams = node.models[-1]
    allows = request[ACCOUNT].allows(name)
    if allows and _uses_upstream_names(upstreams) and upstreams.may_forward(name):  # no list yet
        return await pass_on(request, upstreams, partial(_upstream_model, request))
    raise ModelNotFound(name, *list(listed)[:MOST_NAMES])


def _listed(node: Node) -> dict[str, ModelReply | Mapping[str, Any]]:
    """Return the models of this node as it describes them, and those of upstreams as they do."""
    found: dict[str, ModelReply | Mapping[str, Any]] = {}
    for model in _known(node):
        listed: Mapping[str, ModelReply | Mapping[str, Any]]
        if _uses_upstream_names(model):
            listed = model.fleet.upstream_models.described()
        else:
            listed = {one.id: one for one in _described(model)}
        for name, one in listed.items():
            found.setdefault(name, one)  # where requests for this name go
    return found


def _in_both_forms(model: ModelReply | Mapping[str, Any]) -> ModelReply | UpstreamModel:
    """Return the fields of a model that the formats of OpenAI and Anthropic have."""
    return model if isinstance(model, ModelReply) else msgspec.convert(model, UpstreamModel)


def _upstream_page(request: web.Request, limit: int, body: bytes) -> bytes:
    """Return an upstream's list of models, in Anthropic's format for a client of that API."""
    if not is_anthropic(request):
        return body
    try:
        models = _upstream_models.decode(body).data
    except (ValueError, RecursionError):
        return body
    return encode(model_page(models, request.query, limit))


def _upstream_model(request: web.Request, body: bytes) -> bytes:
    """Return an upstream's model, in Anthropic's format for a client of that API."""
    if not is_anthropic(request):
        return body
    try:
        return encode(message_model(_upstream_model_decoder.decode(body)))
    except (ValueError, RecursionError):
        return body


def _uses_upstream_names(model: ModelService) -> bool:
    """Return whether clients use the upstreams' own names of models."""
    return model.forwards and not model.config.served_model_name


def _known(node: Node) -> list[ModelService]:
    """Return the models that clients can use now.

    Raises:
        Unavailable: the first model is not loaded.
    """
    if not node.models[0].is_known:
        node.lifecycle.require_ready()
    return [model for model in node.models if model.is_known]


def _described(model: ModelService) -> list[ModelReply]:
    """Return the entries of a model and of its adapters."""
    card = model.fleet.card
    if model.forwards:
        # The card's root would show the upstream's address.
        return [
            ModelReply(name, card.created_s, model.name, card.max_model_len) for name in model.names
        ]
    served = model.served
    own = ModelReply(
        served.name,
        card.created_s,
        card.root,
        card.max_model_len,
        tasks=card.capabilities.tasks,
        chat=served.chats(card),
        proposers=model.fleet.proposers,
        simulated=card.is_simulated,
        default_parameters=served.defaults().given(),
    )
    return [
        *(replace(own, id=name) for name in model.names),
        *(
            replace(own, id=name, root=adapter.root, parent=served.name, tasks=(Task.GENERATE,))
            for name, adapter in model.fleet.adapters().items()
        ),
    ]


async def tokenize(request: web.Request) -> web.StreamResponse:
    """Return the token ids of a prompt, or of messages rendered by the model's chat template."""
    return await _answer(request, _tokenize)


async def detokenize(request: web.Request) -> web.StreamResponse:
    """Return the text of token ids."""
    return await _answer(request, _detokenize)


async def _answer(
    request: web.Request, work: Callable[[bytes, ServedModel], msgspec.Struct]
) -> web.StreamResponse:
    model = await requested_model(request, request.app[NODE])
    if model.forwards:
        return await pass_on(request, model)
    served = model.served
    body = await read_body(request)
    return json_response(await offload_if_long(lambda: encode(work(body, served)), len(body)))


def _tokenize(body: bytes, served: ServedModel) -> TokenizeReply:
    wire = decode(body, _tokenize_decoder)
    served = served.named(wire.model)
    if (wire.prompt is None) == (wire.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    if wire.prompt is not None and wire.tools is not None:
        raise invalid("tools", "requires messages")
    if wire.prompt is None:
        kwargs = wire.chat_template_kwargs
        chat = ChatBody(messages=wire.messages, tools=wire.tools, chat_template_kwargs=kwargs)
        tools = offered_tools(chat, served)
        variables = template_variables(chat, served.tokenizer)
        ending = prompt_ending(wire)
        tokens = list(chat_prompt(wire.messages, served, tools, variables, ending=ending))
    else:
        special = wire.add_special_tokens is not False
        tokens = served.tokenizer.encode(wire.prompt, add_special_tokens=special)
    texts = list(map(served.tokenizer.token_text, tokens)) if wire.return_token_strs else None
    return TokenizeReply(len(tokens), served.max_model_len, tokens, texts)


def _detokenize(body: bytes, served: ServedModel) -> DetokenizeReply:
    wire = decode(body, _detokenize_decoder)
    served = served.named(wire.model)
    for index, token in enumerate(wire.tokens):
        served.check_token_id(token, f"tokens[{index}]")
    skip = bool(wire.skip_special_tokens)
    return DetokenizeReply(served.tokenizer.decode(wire.tokens, skip_special_tokens=skip))
