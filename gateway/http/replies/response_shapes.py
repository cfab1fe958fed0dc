"""What clients of `/v1/responses` receive, as msgspec structs in OpenAI's shapes."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from draftgate.gateway.http.replies.shapes import ResponseMetrics


class OutputText(Struct):
    """The text of a message."""

    text: str
    type: str = "output_text"
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


class MessageItem(Struct, tag_field="type", tag="message"):
    """What the model says."""

    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class FunctionCallItem(Struct, tag_field="type", tag="function_call"):
    """A call that the client is to make."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(Struct):
    """Of the input, what was cached."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    """Of the output, what was reasoning: nothing is told apart here."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct):
    """Why an answer is not whole."""

    reason: str


class ResponseFailure(Struct):
    """What went wrong behind the first event."""

    code: str
    message: str


class ResponseReply(Struct):
    """A response, whole or in the making; `metrics` is ours."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[MessageItem | FunctionCallItem]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    user: str | None
    usage: ResponseUsage | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    object: str = "response"
    background: bool = False
    store: bool = False
    truncation: str = "disabled"
    previous_response_id: None = None
    metrics: ResponseMetrics | UnsetType = UNSET


class ResponseEvent(Struct):
    """An event of a streamed response; which fields it has depends on its type."""

    type: str
    sequence_number: int
    response: ResponseReply | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: MessageItem | FunctionCallItem | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
