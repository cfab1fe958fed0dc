"""The models in Anthropic's format of `/v1/models`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from msgspec import Struct

from draftgate.gateway.errors import InvalidRequest, invalid
from draftgate.gateway.http.replies.anthropic_shapes import MessageModel, MessageModelList
from draftgate.gateway.http.replies.shapes import ModelReply

DEFAULT_MODELS: Final = 20
"""Models of a page without `limit`, as in Anthropic's API."""

MOST_MODELS: Final = 1000


class UpstreamModel(Struct):
    """The fields of an upstream's model that both formats have."""

    id: str
    created: int
    max_model_len: int | None = None


class UpstreamModelList(Struct):
    """An upstream's response of `/v1/models`."""

    data: list[UpstreamModel]


def message_model(model: ModelReply | UpstreamModel) -> MessageModel:
    """Return a model in Anthropic's format."""
    created = datetime.fromtimestamp(model.created, UTC)
    return MessageModel(
        model.id,
        model.id,
        created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        model.max_model_len,
        model.max_model_len,
    )


def model_page(
    models: Sequence[ModelReply | UpstreamModel], query: Mapping[str, str], limit: int
) -> MessageModelList:
    """Return the page of models that a query selects.

    Args:
        query: may contain `after_id` or `before_id`, the ids beside the page.
        limit: maximum models of the page.

    Raises:
        InvalidRequest: the query has both ids, or an unknown id.
    """
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise InvalidRequest("give either after_id or before_id", "before_id")
    places = {model.id: place for place, model in enumerate(models)}
    begin, end = 0, len(models)
    if after is not None:
        begin = _place(places, "after_id", after) + 1
        has_more = begin + limit < end
    elif before is not None:
        end = _place(places, "before_id", before)
        has_more = end - limit > 0
        begin = max(0, end - limit)
    else:
        has_more = limit < end
    page = [message_model(model) for model in models[begin : min(end, begin + limit)]]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return MessageModelList(page, has_more, first, last)


def _place(places: Mapping[str, int], param: str, model_id: str) -> int:
    if model_id not in places:
        raise invalid(param, f"no model has the id {model_id!r}")
    return places[model_id]
