"""The bodies of `/v1/responses` and the events of their streams, as msgspec structs."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from draftgate.gateway.http.replies.metric_shapes import OptionalMetrics
from draftgate.gateway.http.replies.shapes import TokenLogprobReply


class OutputText(Struct, tag_field="type", tag="output_text"):
    """The text of a message.

    The log probabilities are those of its tokens, if the request includes them.
    """

    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[TokenLogprobReply] = field(default_factory=list)


class MessageItem(Struct, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class FunctionCallItem(Struct, tag_field="type", tag="function_call"):
    """A function call that the client is to execute."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """The text of reasoning."""

    text: str


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    """The reasoning of a model that marks it."""

    id: str
    status: str
    content: list[ReasoningText]
    summary: list[Any] = field(default_factory=list)


Item = MessageItem | FunctionCallItem | ReasoningItem


class InputTokensDetails(Struct):
    """The number of cached input tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    """The number of reasoning tokens in the output, with the markers of reasoning."""

    reasoning_tokens: int


class ResponseUsage(Struct):
    """The token usage of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct):
    """The reason why a response is incomplete."""

    reason: str


class ResponseFailure(Struct):
    """The error that ended a response after its first event.

    The field `retry_after_s` is Draftgate's extension.
    """

    code: str
    message: str
    type: str | UnsetType = UNSET
    retry_after_s: float | UnsetType = UNSET


class ReasoningReply(Struct):
    """The field `reasoning` of the request."""

    effort: str | None
    summary: str | None


class ResponseReply(Struct):
    """A response, complete or in progress.

    The field `metrics` is Draftgate's extension.
    """

    id: str
    created_at: int
    completed_at: int | None
    model: str
    status: str
    output: list[Item]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    truncation: str
    reasoning: ReasoningReply
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    max_tool_calls: int | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    user: str | None
    usage: ResponseUsage | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    object: str = "response"
    background: bool = False
    store: bool = False
    service_tier: str = "default"
    previous_response_id: str | None = None
    metrics: OptionalMetrics = UNSET


class ResponseEvent(Struct):
    """An event of a streamed response.

    The type of the event determines its fields.
    """

    type: str
    sequence_number: int
    response: ResponseReply | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    logprobs: list[TokenLogprobReply] | UnsetType = UNSET
