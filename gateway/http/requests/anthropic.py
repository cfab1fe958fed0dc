"""The request bodies of `/v1/messages`, Anthropic's API, and their conversion to chats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw, Struct

from draftgate.gateway.errors import Unsupported, invalid
from draftgate.gateway.http.requests.decoding import RenamedParams, decode, reject_unsupported
from draftgate.gateway.http.requests.schemas import (
    CalledFunction,
    ChatBody,
    ContentPart,
    Function,
    JsonSchemaFormat,
    JsonSchemaOptions,
    Message,
    NamedFunction,
    NamedTool,
    SpeculationOptions,
    TextPart,
    Tool,
    ToolCallMessage,
)
from draftgate.gateway.http.requests.sender import Sender
from draftgate.gateway.http.requests.validation import ParsedRequest, parse_decoded_chat
from draftgate.gateway.served_model import ServedModel


class TextBlock(Struct, tag_field="type", tag="text"):
    """A text."""

    text: str


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A call of a tool by the assistant."""

    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """The reasoning of the assistant. The server neither signs it nor checks a signature."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning of another server, which does not become part of the prompt."""

    data: str


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    """The result of a call. Chat templates do not distinguish errors from other results."""

    tool_use_id: str
    content: str | list[TextPart] | None = None
    is_error: bool | None = None


class UserMessage(Struct, tag_field="role", tag="user"):
    """A message of the user, which has the results of the assistant's calls."""

    content: str | list[TextBlock | ToolResultBlock]


AssistantBlock = TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock


class AssistantMessage(Struct, tag_field="role", tag="assistant"):
    """An earlier message of the assistant."""

    content: str | list[AssistantBlock]


class SystemMessage(Struct, tag_field="role", tag="system"):
    """A system message in the middle of a conversation."""

    content: str | list[TextPart]


ConversationMessage = UserMessage | AssistantMessage | SystemMessage


class CustomTool(Struct):
    """A tool that the client executes. The server has no tools of its own."""

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None


class ToolChoice(Struct):
    """The field `tool_choice`.

    The type `any` forces a call of any tool, and `tool` a call of the named tool.
    """

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct):
    """The field `thinking`.

    With `adaptive`, the chat template decides. The budget has no effect.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class JsonSchemaOutput(Struct, tag_field="type", tag="json_schema"):
    """The `output_config.format` for a JSON value that satisfies a schema."""

    schema: Raw


class OutputConfig(Struct):
    """The field `output_config`.

    The effort is for templates that read `reasoning_effort`.
    """

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonSchemaOutput | None = None


class MessageMetadata(Struct):
    """The field `metadata`, which has no effect."""

    user_id: str | None = None


class UnsupportedMessageFields(Struct):
    """Fields for tools that run in the server, which has none.

    Only neutral values are accepted.
    """

    container: Any = None
    mcp_servers: Any = None


class CountTokensBody(UnsupportedMessageFields):
    """Body of `POST /v1/messages/count_tokens`."""

    model: str | None = None
    messages: list[ConversationMessage] | None = None
    system: str | list[TextPart] | None = None
    tools: list[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountTokensBody):
    """Body of `POST /v1/messages`.

    The last four fields are extensions.
    """

    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: MessageMetadata | None = None
    seed: int | None = None
    min_p: float | None = None
    speculation: SpeculationOptions | None = None
    priority: int | None = None


_SAME_IN_CHATS: Final = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stream", "speculation",
    "priority",
)  # fmt: skip

_MODES: Final = {"auto": "auto", "any": "required", "none": "none"}
"""The types of `tool_choice` that name no tool, and their names in chats."""

INVALID_JSON: Final = "INVALID_JSON"
"""The key under which the input of a call has arguments that are not a JSON object. Anthropic
recommends this form for inputs that `max_tokens` cuts short."""

PARAMS: Final = {
    "messages": "messages",
    "stop": "stop_sequences",
    ".function": "",
    "tool_choice.function": "tool_choice",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
}
"""This endpoint's names for the parameters of chats."""

_messages_decoder: Final = msgspec.json.Decoder(MessagesBody)
_count_decoder: Final = msgspec.json.Decoder(CountTokensBody)


def parse_messages(body: bytes, served: ServedModel, sender: Sender) -> ParsedRequest:
    """Return the parsed form of the body of `/v1/messages`.

    Raises:
        InvalidRequest: the request is malformed.
        RequestRejected: the model's template rejects the messages.
    """
    wire = decode(body, _messages_decoder)
    if wire.max_tokens is None:
        raise invalid("max_tokens", "must be given")
    same = {name: getattr(wire, name) for name in _SAME_IN_CHATS}
    parsed = _parse(wire, served, sender, stop=wire.stop_sequences, **same)
    # The first event of a stream has the usage so far.
    return replace(parsed, include_usage=True, continuous_usage=True)


def parse_count_tokens(body: bytes, served: ServedModel, sender: Sender) -> ParsedRequest:
    """Return the parsed form of the body of `/v1/messages/count_tokens`, as `parse_messages`."""
    return _parse(decode(body, _count_decoder), served, sender)


def _parse(
    wire: CountTokensBody,
    served: ServedModel,
    sender: Sender,
    **fields: Any,
) -> ParsedRequest:
    """Parse the chat that a body is equivalent to, with further fields of chats."""
    reject_unsupported(wire, UnsupportedMessageFields.__struct_fields__)
    messages, paths = _messages(wire)
    output, choice = wire.output_config or OutputConfig(), wire.tool_choice
    chat = ChatBody(
        model=wire.model,
        messages=messages,
        tools=_tools(wire.tools or ()),
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        thinking=None if wire.thinking is None else _thinking(wire.thinking),
        reasoning_effort=output.effort,
        response_format=None if output.format is None else _format(output.format),
        chat_template_kwargs=wire.chat_template_kwargs,
        **fields,
    )
    with RenamedParams(paths):
        return parse_decoded_chat(chat, served, sender)


def _messages(wire: CountTokensBody) -> tuple[list[Message], Mapping[str, str]]:
    """Return the messages of the equivalent chat, and the paths of their parts in the request."""
    sent = wire.messages
    if not sent:
        raise invalid("messages", "must be given and must not be empty")
    if isinstance(sent[-1], AssistantMessage):
        # A template would begin another turn, but the client expects a continuation of the text.
        raise Unsupported(f"messages[{len(sent) - 1}].role", " 'assistant' in the last message")
    messages, paths = list[Message](), dict[str, str]()
    if wire.system:
        messages.append(Message("system", _text(wire.system)))
    for i, message in enumerate(sent):
        for place, one in _chat_messages(message, f"messages[{i}]"):
            where = f"messages[{len(messages)}]"
            paths |= {where: place, f"{where}.tool_calls": f"{place}.content"}
            messages.append(one)
    return messages, paths


def _chat_messages(message: ConversationMessage, place: str) -> Iterator[tuple[str, Message]]:
    """Yield the messages of a chat that a message is equivalent to, with their places."""
    match message:
        case UserMessage(list(blocks)):
            yield from _user_messages(blocks, place)
        case AssistantMessage(list(blocks)):
            yield place, _assistant_message(blocks)
        case SystemMessage(content):
            yield place, Message("system", _text(content))
        case UserMessage(str(text)):
            yield place, Message("user", text)
        case AssistantMessage(str(text)):
            yield place, Message("assistant", text)


def _user_messages(
    blocks: Sequence[TextBlock | ToolResultBlock], place: str
) -> Iterator[tuple[str, Message]]:
    """Yield a message for each result of a call, and for the texts between them."""
    texts: list[TextBlock] = []
    for j, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block)
            continue
        if texts:
            yield place, Message("user", _text(texts))
            texts = []
        result = Message("tool", _text(block.content or ""), tool_call_id=block.tool_use_id)
        yield f"{place}.content[{j}]", result
    if texts or not blocks:
        yield place, Message("user", _text(texts))


def _assistant_message(blocks: Sequence[AssistantBlock]) -> Message:
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        ToolCallMessage(block.id, CalledFunction(block.name, _arguments(block.input)))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return Message(
        "assistant",
        _text(texts),
        tool_calls=calls or None,
        reasoning_content="".join(thoughts) or None,
    )


def _text(content: str | Sequence[TextBlock | TextPart]) -> str | list[ContentPart]:
    """Return texts in the form of chats."""
    if isinstance(content, str):
        return content
    return [ContentPart("text", block.text) for block in content]


def _arguments(given: dict[str, Any]) -> str:
    """Return the arguments of a call as the model wrote them (`call_input`)."""
    written = given.get(INVALID_JSON)
    if isinstance(written, str) and len(given) == 1:
        return written
    return msgspec.json.encode(given).decode()


def call_input(arguments: str) -> dict[str, Any]:
    """Return the input of a call whose arguments the model has written."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (ValueError, RecursionError):
        return {INVALID_JSON: arguments}


def _tools(tools: Sequence[CustomTool]) -> list[Tool]:
    for i, tool in enumerate(tools):
        if tool.input_schema.get("type", "object") != "object":
            raise invalid(f"tools[{i}].input_schema", "must be the schema of an object")
    return [Tool(Function(tool.name, tool.description, tool.input_schema)) for tool in tools]


def _tool_choice(choice: ToolChoice) -> str | NamedTool:
    """Return the tool choice in the form of chats."""
    if choice.type != "tool":
        return _MODES[choice.type]
    if choice.name is None:
        raise invalid("tool_choice.name", "must be given")
    return NamedTool(NamedFunction(choice.name))


def _thinking(config: ThinkingConfig) -> bool | None:
    """Return whether the response is to have reasoning, or None if the template decides."""
    return None if config.type == "adaptive" else config.type == "enabled"


def _format(wanted: JsonSchemaOutput) -> JsonSchemaFormat:
    return JsonSchemaFormat(JsonSchemaOptions("output", wanted.schema))
