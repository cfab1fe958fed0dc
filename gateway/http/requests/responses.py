"""The request body of `/v1/responses`, and its conversion to a chat."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import msgspec
from msgspec import structs

from draftgate.gateway.errors import ContextTooLong, Unsupported, invalid
from draftgate.gateway.http.requests.decoding import RenamedParams, decode
from draftgate.gateway.http.requests.headers import Sender
from draftgate.gateway.http.requests.limits import (
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    check_ranges,
)
from draftgate.gateway.http.requests.messages import ROLES, template_messages
from draftgate.gateway.http.requests.schemas import (
    AllowedTool,
    AllowedToolChoice,
    AllowedTools,
    CalledFunction,
    ChatBody,
    ContentPart,
    Function,
    JsonObjectFormat,
    JsonSchemaFormat,
    JsonSchemaOptions,
    Message,
    NamedFunction,
    NamedTool,
    RegexFormat,
    ResponseFormat,
    SharedFields,
    TextFormat,
    ThinkingOptions,
    Tool,
    ToolCallMessage,
    ToolMode,
    Wire,
)
from draftgate.gateway.http.requests.structured_outputs import FORMAT_PARAMS
from draftgate.gateway.http.requests.validation import (
    ParsedRequest,
    parse_decoded_chat,
    with_grammar_param,
)
from draftgate.gateway.served_model import ServedModel

Summary = Literal["auto", "concise", "detailed"]

LOGPROBS: Final = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""The values of `include`. Responses have only items that the first value concerns."""


class SchemaTextFormat(JsonSchemaOptions, tag_field="type", tag="json_schema"):
    """The `text.format` for a JSON value that satisfies a schema."""


class TextOptions(Wire):
    """The field `text`.

    The verbosity has no effect.
    """

    format: TextFormat | JsonObjectFormat | SchemaTextFormat | RegexFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Wire):
    """The field `reasoning`.

    An effort of `none` switches reasoning off if the chat template can do so. The other values are
    for templates that read `reasoning_effort`. Summaries are not supported. The field
    `generate_summary` is the old name of `summary`.
    """

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class FlatTool(Function, tag_field="type", tag="function"):
    """A function on offer, in the layout of `/v1/responses`."""


class FlatAllowedTool(NamedFunction, tag_field="type", tag="function"):
    """A function that the response may call, in the layout of `/v1/responses`."""


class FlatNamedTool(NamedFunction, tag_field="type", tag="function"):
    """A `tool_choice` that names one function."""


class FlatAllowedTools(Wire, tag_field="type", tag="allowed_tools"):
    """A `tool_choice` that allows some of the tools, in the layout of `/v1/responses`."""

    tools: list[FlatAllowedTool]
    mode: ToolMode = "auto"


class InputPart(ContentPart):
    """A part of an item's content."""


class InputItem(Wire):
    """A message, a function call, the output of a function call, or reasoning.

    Reasoning belongs to the assistant's message or call that follows.
    """

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class ResponsesBody(SharedFields):
    """Body of `POST /v1/responses`.

    No tool runs in the server, so `max_tool_calls` has no effect. Most fields of `SharedFields`
    are extensions.
    """

    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    include: list[Includable] | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: list[FlatTool] | None = None
    tool_choice: str | FlatNamedTool | FlatAllowedTools | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingOptions | None = None


_SAME_IN_CHATS: Final = (
    *(name for name in SharedFields.__struct_fields__ if name != "response_format"),
    "parallel_tool_calls", "top_logprobs", "chat_template_kwargs", "enable_thinking", "thinking",
)  # fmt: skip

ITEM_TYPES: Final = ("message", "function_call", "function_call_output", "reasoning")
INPUT_PART_TYPES: Final = {
    "input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal",
}  # fmt: skip
"""The types of content parts of messages, and the types of the same parts in chats."""

PART_FIELDS: Final = {**INPUT_PART_TYPES, "reasoning_text": "text"}
"""The types of all content parts, and the fields with their texts."""

PARAMS: Final = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    ".function": "",
    "tool_choice.allowed_tools": "tool_choice",
}
"""This endpoint's names for the parameters of chats."""

_decoder: Final = msgspec.json.Decoder(ResponsesBody)


def parse_responses(
    body: bytes,
    served: ServedModel,
    sender: Sender,
    earlier: Sequence[InputItem] = (),
) -> ParsedRequest:
    """Return the parsed form of the body of `/v1/responses`.

    Args:
        earlier: the items of the conversation that the request continues.

    Raises:
        InvalidRequest: the request is malformed.
        RequestRejected: the model's template rejects the messages.
    """
    wire, chat, names = read_responses(body, earlier)
    served = served.named(wire.model)
    messages = chat.messages or []

    def parse(some: list[Message]) -> ParsedRequest:
        one = structs.replace(chat, messages=some)
        return parse_decoded_chat(one, served, sender)

    tried: dict[int, ParsedRequest] = {}  # by number of messages
    most = served.max_model_len - (wire.max_output_tokens or 1)

    def fits(some: list[Message]) -> bool:
        try:
            parsed = tried[len(some)] = parse(some)
        except ContextTooLong:
            return False
        return len(parsed.job.prompts[0]) <= most

    with RenamedParams(names):
        if wire.truncation == "auto":
            template_messages(messages, served)  # checks also the turns to drop
            messages = drop_oldest_turns(messages, fits)
        parsed = tried.get(len(messages)) or parse(messages)
    if parsed.tools is not None and chat.logprobs:
        param = "top_logprobs" if wire.top_logprobs else "include"
        raise Unsupported(param, " together with tools")
    return replace(with_grammar_param(parsed, names), include_usage=True, body=wire)


def read_responses(
    body: bytes, earlier: Sequence[InputItem] = ()
) -> tuple[ResponsesBody, ChatBody, Mapping[str, str]]:
    """Return a body of `/v1/responses`, the equivalent chat, and its names of parameters.

    Args:
        earlier: the items of the conversation that the request continues.

    Raises:
        InvalidRequest: the request is malformed.
    """
    wire = decode(body, _decoder)
    check_ranges(wire)
    _check_metadata(wire.metadata or {})
    messages, paths = _messages(wire, earlier)
    chat = ChatBody(
        messages=messages,
        max_completion_tokens=wire.max_output_tokens,
        response_format=_format(wire),
        tools=None if wire.tools is None else [Tool(tool) for tool in wire.tools],
        tool_choice=_tool_choice(wire.tool_choice),
        reasoning_effort=None if wire.reasoning is None else wire.reasoning.effort,
        logprobs=LOGPROBS in (wire.include or ()) or bool(wire.top_logprobs),
        **{name: getattr(wire, name) for name in _SAME_IN_CHATS},
    )
    own_format = wire.response_format is None
    names = dict.fromkeys(FORMAT_PARAMS, "text.format") if own_format else {}
    return wire, chat, {**paths, **names}


def _messages(
    wire: ResponsesBody, earlier: Sequence[InputItem]
) -> tuple[list[Message], dict[str, str]]:
    """Return the messages of the equivalent chat, and the paths of their parts in the request."""
    if not wire.input:
        raise invalid("input", "must be given and must not be empty")
    messages: list[Message] = []
    paths: dict[str, str] = {}
    if wire.instructions is not None:
        messages.append(Message("system", wire.instructions))
    reasoning: str | None = None
    for place, item in _items(wire.input, earlier):
        _check_parts(item.content, f"{place}.content")
        _check_parts(item.output, f"{place}.output")
        if item.type == "reasoning":
            reasoning = _reasoning(item)
            continue
        message = _message(item, place)
        calls = message.tool_calls or []
        if calls and messages and messages[-1].role == "assistant":
            # Templates expect the calls of one response in one message.
            calls = messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), *calls]
        else:
            messages.append(message)
        if reasoning and message.role == "assistant" and not messages[-1].reasoning_content:
            messages[-1].reasoning_content = reasoning
        reasoning = None
        where = f"messages[{len(messages) - 1}]"
        if calls:
            paths.setdefault(f"{where}.tool_calls", place)
        elif item.type == "function_call_output":
            paths[f"{where}.content"] = f"{place}.output"
        paths.setdefault(where, place)
    return messages, paths


def _items(
    sent: str | Sequence[InputItem], earlier: Sequence[InputItem]
) -> Iterator[tuple[str, InputItem]]:
    """Yield the items of a conversation, with their places in the request."""
    for item in earlier:
        yield "previous_response_id", item
    if isinstance(sent, str):
        yield "input", InputItem(role="user", content=sent)
    else:
        yield from ((f"input[{index}]", item) for index, item in enumerate(sent))


def _reasoning(item: InputItem) -> str:
    """Return the text of reasoning, without its summary."""
    content = item.content or ""
    return content if isinstance(content, str) else "".join(part.text or "" for part in content)


def _message(item: InputItem, where: str) -> Message:
    match item.type:
        case "message":
            return Message(_required_field(item, where, "role"), _content(item.content))
        case "function_call":
            name, arguments = (
                _required_field(item, where, "name"),
                _required_field(item, where, "arguments"),
            )
            call = ToolCallMessage(
                _required_field(item, where, "call_id"), CalledFunction(name, arguments)
            )
            return Message("assistant", tool_calls=[call])
        case "function_call_output":
            call_id = _required_field(item, where, "call_id")
            return Message("tool", _content(item.output), tool_call_id=call_id)
    raise Unsupported(f"{where}.type", f" {item.type!r}")


def _check_parts(parts: str | list[InputPart] | None, where: str) -> None:
    """Check the parts of every item, including those that are not part of the prompt."""
    for i, part in enumerate(parts if isinstance(parts, list) else ()):
        if part.type not in PART_FIELDS:
            raise Unsupported(f"{where}[{i}].type", f" {part.type!r}")
        if getattr(part, PART_FIELDS[part.type]) is None:
            raise invalid(f"{where}[{i}].{PART_FIELDS[part.type]}", "must be given")


def _required_field(item: InputItem, where: str, name: str) -> str:
    value = getattr(item, name)
    if value is None:
        raise invalid(f"{where}.{name}", "must be given")
    return str(value)


def _content(content: str | list[InputPart] | None) -> str | list[ContentPart] | None:
    """Return content in the form of chats."""
    if not isinstance(content, list):
        return content
    return [ContentPart(INPUT_PART_TYPES.get(p.type, p.type), p.text, p.refusal) for p in content]


def _format(wire: ResponsesBody) -> ResponseFormat | None:
    wanted = None if wire.text is None else wire.text.format
    if wanted is None:
        return wire.response_format
    if wire.response_format is not None:
        raise invalid("response_format", "cannot be combined with text.format")
    return JsonSchemaFormat(wanted) if isinstance(wanted, SchemaTextFormat) else wanted


def _tool_choice(
    choice: str | FlatNamedTool | FlatAllowedTools | None,
) -> str | NamedTool | AllowedToolChoice | None:
    """Return the tool choice in the form of chats."""
    match choice:
        case FlatNamedTool():
            return NamedTool(choice)
        case FlatAllowedTools():
            tools = [AllowedTool(tool) for tool in choice.tools]
            return AllowedToolChoice(AllowedTools(tools, choice.mode))
    return choice


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise invalid("metadata", f"must have at most {MAX_METADATA} keys")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            lengths = f"{MAX_METADATA_KEY} characters, values {MAX_METADATA_VALUE}"
            raise invalid("metadata", f"keys must have at most {lengths}")


def drop_oldest_turns(
    messages: Sequence[Message], fits: Callable[[list[Message]], bool]
) -> list[Message]:
    """Return a conversation without the oldest turns that prevent it from fitting.

    A turn begins with a user's message, so calls stay together with their results. System messages
    and the last turn always stay.

    Args:
        messages: the whole conversation.
        fits: whether a conversation fits. The function tries the end of the conversation first, and
            never more than about twice of what fits, because tokenising a long text takes seconds.
    """
    starts = [index for index, message in enumerate(messages) if message.role == "user"]

    def last(turns: int) -> list[Message]:
        begin = starts[-turns] if turns < len(starts) else 0
        return [
            message
            for index, message in enumerate(messages)
            if index >= begin or ROLES.get(message.role) == "system"
        ]

    kept, most = 1, len(starts)
    while kept < most and fits(last(min(2 * kept, most))):
        kept = min(2 * kept, most)
    between = range(kept + 1, min(2 * kept, most))
    return last(kept + bisect_left(between, True, key=lambda turns: not fits(last(turns))))
