"""The bodies of responses of `/v1/messages` and the events of their streams, as msgspec structs."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from draftgate.gateway.http.replies.metric_shapes import OptionalMetrics
from draftgate.gateway.http.requests.anthropic import TextBlock, ThinkingBlock, ToolUseBlock

Block = TextBlock | ToolUseBlock | ThinkingBlock


class MessageUsage(Struct):
    """The token usage of a message.

    The field `input_tokens` does not include cached tokens. The server caches every prompt, so it
    does not count the tokens that it adds to its cache.
    """

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class MessageReply(Struct):
    """A message of the assistant.

    The field `metrics` is Draftgate's extension.
    """

    id: str
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    type: str = "message"
    role: str = "assistant"
    metrics: OptionalMetrics = UNSET


class MessageEventDelta(Struct):
    """What an event adds to a block or, without a type, to the message."""

    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: str | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageErrorDetail(Struct):
    """An error.

    The field `retry_after_s` is Draftgate's extension.
    """

    type: str
    message: str
    retry_after_s: float | UnsetType = UNSET


class MessageErrorReply(Struct):
    """The body of every error of `/v1/messages`."""

    error: MessageErrorDetail
    request_id: str
    type: str = "error"


class MessageEvent(Struct):
    """An event of a streamed message.

    The type of the event determines its fields. The field `metrics` of `message_delta` is
    Draftgate's extension.
    """

    type: str
    message: MessageReply | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Block | UnsetType = UNSET
    delta: MessageEventDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    error: MessageErrorDetail | UnsetType = UNSET
    request_id: str | UnsetType = UNSET
    metrics: OptionalMetrics = UNSET


class MessageTokensReply(Struct):
    """The response of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessageModel(Struct):
    """A model in Anthropic's format of `/v1/models`."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None = None
    max_tokens: int | None = None
    type: str = "model"


class MessageModelList(Struct):
    """A page of models."""

    data: list[MessageModel]
    has_more: bool
    first_id: str | None
    last_id: str | None
