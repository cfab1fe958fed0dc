"""The bodies of requests for upstreams, read once and without parsing more than is needed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from draftgate.gateway.accounts import Account
from draftgate.gateway.http.context import read_body
from draftgate.gateway.http.direct import Request
from draftgate.gateway.http.requests.forwarded import (
    ForwardedFields,
    changed_fields,
    read_fields,
    rewrite_body,
)
from draftgate.gateway.model_service import ModelService
from draftgate.gateway.offload import offload

INLINE_BYTES: Final = 256 << 10
"""Larger bodies are parsed in a thread, because no callback may hold the event loop for longer than
5 ms. A body of 1 MB takes 7 ms, or 13 ms with a model name to replace. (Zen 4, two busy cores,
2026-11-21.)"""

_NOT_RENAMED: Final[Mapping[str, bytes]] = MappingProxyType({})
"""The bodies of most requests, whose model has one name at all upstreams."""


class Received(NamedTuple):
    """A request as the gateway forwards it.

    Attributes:
        body: the body for an upstream that has no other name of the model.
        model: the name of the model, or empty without one.
        renamed: the body with each other name of the model (`UpstreamCall`).
    """

    fields: ForwardedFields
    body: bytes
    model: str
    renamed: Mapping[str, bytes]


async def read_request(request: Request, model: ModelService, account: Account) -> Received:
    """Return the request for the upstream, read in a thread if it is large."""
    body = await read_body(request)
    if len(body) <= INLINE_BYTES:
        return read_received(body, model, account)
    return await offload(read_received, body, model, account)


def read_received(body: bytes, model: ModelService, account: Account) -> Received:
    """Return the request for the upstream, whose body has arrived.

    Raises:
        ModelNotFound: no upstream has the model.
        InvalidRequest: a value must be changed but cannot be read.
    """
    fleet = model.fleet
    fields = read_fields(body, fleet.upstream_models.longest_context)
    if not body:
        return Received(fields, body, "", _NOT_RENAMED)
    names = (model.config.served_model_name, fleet.card.model_id)
    changed = changed_fields(fields, names, account)
    offer = str(changed.get("model", fields.model or fleet.card.model_id))
    if offer not in model.forwarder.fallbacks:
        fleet.upstream_models.check(offer)
    renamed = _NOT_RENAMED
    if own := fleet.upstream_models.own_names(offer):
        renamed = {name: rewrite_body(body, {**changed, "model": name}) for name in own}
    return Received(fields, rewrite_body(body, changed), offer, renamed)
