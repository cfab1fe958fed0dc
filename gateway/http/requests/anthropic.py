"""The request bodies of `/v1/messages`, Anthropic's API, and their conversion to chats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw

from draftgate.gateway.errors import invalid
from draftgate.gateway.http.requests.decoding import RenamedParams, decode
from draftgate.gateway.http.requests.headers import Sender
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
    SharedFields,
    TextPart,
    Tool,
    ToolCallMessage,
    Wire,
)
from draftgate.gateway.http.requests.structured_outputs import FORMAT_PARAMS
from draftgate.gateway.http.requests.validation import (
    ParsedRequest,
    parse_decoded_chat,
    with_grammar_param,
)
from draftgate.gateway.served_model import ServedModel


class TextBlock(Wire, tag_field="type", tag="text"):
    """A text."""

    text: str


class ToolUseBlock(Wire, tag_field="type", tag="tool_use"):
    """A call of a tool by the assistant."""

    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(Wire, tag_field="type", tag="thinking"):
    """The reasoning of the assistant. The server neither signs it nor checks a signature."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Wire, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning of another server, which does not become part of the prompt."""

    data: str


class ToolResultBlock(Wire, tag_field="type", tag="tool_result"):
    """The result of a call. Chat templates do not distinguish errors from other results."""

    tool_use_id: str
    content: str | list[TextPart] | None = None
    is_error: bool | None = None


class UserMessage(Wire, tag_field="role", tag="user"):
    """A message of the user, which has the results of the assistant's calls."""

    content: str | list[TextBlock | ToolResultBlock]


AssistantBlock = TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock


class AssistantMessage(Wire, tag_field="role", tag="assistant"):
    """An earlier message of the assistant."""

    content: str | list[AssistantBlock]


class SystemMessage(Wire, tag_field="role", tag="system"):
    """A system message in the middle of a conversation."""

    content: str | list[TextPart]


ConversationMessage = UserMessage | AssistantMessage | SystemMessage


class CustomTool(Wire):
    """A tool that the client executes. The server has no tools of its own."""

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None


class ToolChoice(Wire):
    """The field `tool_choice`.

    The type `any` forces a call of any tool, and `tool` a call of the named tool.
    """

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Wire):
    """The field `thinking`.

    With `adaptive`, the chat template decides. The budget has no effect.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class JsonSchemaOutput(Wire, tag_field="type", tag="json_schema"):
    """The `output_config.format` for a JSON value that satisfies a schema."""

    schema: Raw


class OutputConfig(Wire):
    """The field `output_config`.

    The effort is for templates that read `reasoning_effort`.
    """

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonSchemaOutput | None = None


class MessageMetadata(Wire):
    """The field `metadata`, which has no effect."""

    user_id: str | None = None


class CountTokensBody(SharedFields):
    """Body of `POST /v1/messages/count_tokens`."""

    messages: list[ConversationMessage] | None = None
    system: str | list[TextPart] | None = None
    tools: list[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountTokensBody):
    """Body of `POST /v1/messages`. Most fields of `SharedFields` are extensions."""

    max_tokens: int | None = None
    stop_sequences: list[str] | None = None


_MODES: Final = {"auto": "auto", "any": "required", "none": "none"}
"""The types of `tool_choice` that name no tool, and their names in chats."""

INVALID_JSON: Final = "INVALID_JSON"
"""The key under which the input of a call has arguments that are not a JSON object. Anthropic
recommends this form for inputs that `max_tokens` cuts short."""

PARAMS: Final = {
    "messages": "messages",
    ".function": "",
    "tool_choice.function": "tool_choice",
    "reasoning_effort": "output_config.effort",
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
    parsed = _parse(*read_messages(body), served, sender)
    # The first event of a stream has the usage so far.
    return replace(parsed, include_usage=True, continuous_usage=True)


def parse_count_tokens(body: bytes, served: ServedModel, sender: Sender) -> ParsedRequest:
    """Return the parsed form of the body of `/v1/messages/count_tokens`, as `parse_messages`."""
    return _parse(*read_count_tokens(body), served, sender)


def read_messages(body: bytes) -> tuple[ChatBody, Mapping[str, str]]:
    """Return the chat that a body of `/v1/messages` is equivalent to, and its names of parameters.

    Raises:
        InvalidRequest: the request is malformed.
    """
    wire = decode(body, _messages_decoder)
    if wire.max_tokens is None:
        raise invalid("max_tokens", "must be given")
    if wire.stop and wire.stop_sequences:
        raise invalid("stop", "cannot be combined with stop_sequences, which has the same meaning")
    return _chat(wire, stop=wire.stop or wire.stop_sequences, max_tokens=wire.max_tokens)


def read_count_tokens(body: bytes) -> tuple[ChatBody, Mapping[str, str]]:
    """Return the chat of a body of `/v1/messages/count_tokens`, as `read_messages` does."""
    return _chat(decode(body, _count_decoder))


def _parse(
    chat: ChatBody, names: Mapping[str, str], served: ServedModel, sender: Sender
) -> ParsedRequest:
    with RenamedParams(names):
        return with_grammar_param(parse_decoded_chat(chat, served, sender), names)


def _chat(wire: CountTokensBody, **fields: Any) -> tuple[ChatBody, Mapping[str, str]]:
    """Return the chat that a body is equivalent to, with further fields of chats."""
    messages, paths = _messages(wire)
    output, choice = wire.output_config or OutputConfig(), wire.tool_choice
    if output.format is not None and wire.response_format is not None:
        raise invalid("response_format", "cannot be combined with output_config.format")
    wanted = wire.response_format if output.format is None else _format(output.format)
    shared = {name: getattr(wire, name) for name in SharedFields.__struct_fields__}
    chat = ChatBody(
        messages=messages,
        tools=_tools(wire.tools or ()),
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        thinking=None if wire.thinking is None else _thinking(wire.thinking),
        reasoning_effort=output.effort,
        chat_template_kwargs=wire.chat_template_kwargs,
        # The client has written the beginning of the response.
        continue_final_message=messages[-1].role == "assistant",
        **{**shared, "response_format": wanted, **fields},
    )
    names = {}
    if wire.stop is None:
        names["stop"] = "stop_sequences"
    if wire.response_format is None:
        names |= dict.fromkeys(FORMAT_PARAMS, "output_config.format")
    return chat, {**paths, **names}


def _messages(wire: CountTokensBody) -> tuple[list[Message], Mapping[str, str]]:
    """Return the messages of the equivalent chat, and the paths of their parts in the request."""
    sent = wire.messages
    if not sent:
        raise invalid("messages", "must be given and must not be empty")
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
    """Return the input of a call whose arguments the model has written, as far as it did."""
    if not arguments:
        return {}
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
    return JsonSchemaFormat(JsonSchemaOptions(wanted.schema))
