"""`/v1/responses`: what clients send, turned into the chat that it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from draftgate.gateway.errors import InvalidRequest, Unsupported
from draftgate.gateway.http.requests.decoding import ALSO_NEUTRAL, decode, reject_changing
from draftgate.gateway.http.requests.limits import (
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    check_ranges,
)
from draftgate.gateway.http.requests.messages import Place
from draftgate.gateway.http.requests.schemas import (
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
    SpeculationOptions,
    TextFormat,
    Tool,
    ToolCallMessage,
)
from draftgate.gateway.http.requests.validation import Call, call_of_chat
from draftgate.gateway.served import Served
from draftgate.policies.types import ANYTIME, ServiceLevel


class SchemaTextFormat(Struct, tag_field="type", tag="json_schema"):
    """`text.format`: a JSON value that satisfies a schema."""

    name: str
    schema: Raw
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct):
    """`text`."""

    format: TextFormat | JsonObjectFormat | SchemaTextFormat | RegexFormat | None = None
    verbosity: str | None = None


class FlatTool(Struct, tag_field="type", tag="function"):
    """A function on offer, as this endpoint writes it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatNamedTool(Struct, tag_field="type", tag="function"):
    """`tool_choice` that names one function."""

    name: str


class InputPart(ContentPart):
    """A part of an item's content."""


class InputItem(Struct):
    """A message, a call that was made, or what the function answered."""

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class ResponsesBody(Struct):
    """Body of `POST /v1/responses`; the last five are extensions."""

    model: str | None = None
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    tools: list[FlatTool] | None = None
    tool_choice: str | FlatNamedTool | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    user: str | None = None
    background: Any = None
    conversation: Any = None
    include: Any = None
    max_tool_calls: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    reasoning: Any = None
    top_logprobs: Any = None
    truncation: Any = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    speculation: SpeculationOptions | None = None
    priority: int | None = None


UNSUPPORTED: Final = (
    "background",
    "conversation",
    "include",
    "max_tool_calls",
    "previous_response_id",
    "prompt",
    "reasoning",
    "top_logprobs",
    "truncation",
)
"""Fields that change what is answered and cannot be honoured: only neutral values pass."""

ITEM_TYPES: Final = ("message", "function_call", "function_call_output")
PART_TYPES: Final = ("input_text", "output_text")

PARAMS: Final = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    ".function": "",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
"""What this endpoint calls the parameters of chats."""

_decoder: Final = msgspec.json.Decoder(ResponsesBody)


def responses_call(
    body: bytes, served: Served, request_id: str, service: ServiceLevel = ANYTIME
) -> Call:
    """Return the call of a response's body.

    Raises:
        InvalidRequest: something is wrong with it; the parameter is named.
        RequestRejected: the model's template refuses the messages.
    """
    wire = decode(body, _decoder)
    served.check_name(wire.model)
    check_ranges(wire)
    reject_changing(wire, UNSUPPORTED, ALSO_NEUTRAL)
    if wire.text is not None and wire.text.verbosity not in {None, "medium"}:
        raise Unsupported("text.verbosity")
    _check_metadata(wire.metadata or {})
    messages, places = _messages(wire)
    chat = ChatBody(
        messages=messages,
        max_completion_tokens=wire.max_output_tokens,
        temperature=wire.temperature,
        top_p=wire.top_p,
        stream=wire.stream,
        response_format=_format(wire.text),
        tools=None if wire.tools is None else [_tool(tool) for tool in wire.tools],
        tool_choice=_choice(wire.tool_choice),
        parallel_tool_calls=wire.parallel_tool_calls,
        seed=wire.seed,
        top_k=wire.top_k,
        min_p=wire.min_p,
        speculation=wire.speculation,
        priority=wire.priority,
    )
    call = call_of_chat(chat, served, request_id, service, places)
    return replace(call, include_usage=True, asked=wire)


def _messages(wire: ResponsesBody) -> tuple[list[Message], list[Place]]:
    """Return the chat that the input means, and what each message is called by the client."""
    if not wire.input:
        raise InvalidRequest("input: must be given and not be empty", "input")
    messages: list[Message] = []
    places: list[Place] = []
    if wire.instructions is not None:
        messages.append(Message("system", wire.instructions))
        places.append(Place("instructions"))
    if isinstance(wire.input, str):
        return [*messages, Message("user", wire.input)], [*places, Place("input")]
    for index, item in enumerate(wire.input):
        where = f"input[{index}]"
        message = _message(item, where)
        if item.type == "function_call" and messages and messages[-1].role == "assistant":
            # Calls of one answer are one message to templates.
            messages[-1].tool_calls = [
                *(messages[-1].tool_calls or ()),
                *(message.tool_calls or ()),
            ]
            places[-1].calls.append(where)
            continue
        messages.append(message)
        calls = [where] if item.type == "function_call" else []
        content = "output" if item.type == "function_call_output" else "content"
        places.append(Place(where, calls, content))
    return messages, places


def _message(item: InputItem, where: str) -> Message:
    match item.type:
        case "message":
            if item.role is None:
                raise InvalidRequest(f"{where}.role: must be given", f"{where}.role")
            return Message(item.role, _content(item.content))
        case "function_call":
            name, arguments = _given(item, where, "name"), _given(item, where, "arguments")
            call = ToolCallMessage(_given(item, where, "call_id"), CalledFunction(name, arguments))
            return Message("assistant", tool_calls=[call])
        case "function_call_output":
            call_id = _given(item, where, "call_id")
            return Message("tool", _content(item.output), tool_call_id=call_id)
    raise Unsupported(f"{where}.type", f" {item.type!r}")


def _given(item: InputItem, where: str, name: str) -> str:
    value = getattr(item, name)
    if value is None:
        raise InvalidRequest(f"{where}.{name}: must be given", f"{where}.{name}")
    return str(value)


def _content(content: str | list[InputPart] | None) -> str | list[ContentPart] | None:
    """Return content in the words of chats."""
    if not isinstance(content, list):
        return content
    return [ContentPart("text" if p.type in PART_TYPES else p.type, p.text) for p in content]


def _format(
    text: TextOptions | None,
) -> TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | None:
    wanted = None if text is None else text.format
    if not isinstance(wanted, SchemaTextFormat):
        return wanted
    return JsonSchemaFormat(JsonSchemaOptions(wanted.name, wanted.schema))


def _tool(tool: FlatTool) -> Tool:
    return Tool(Function(tool.name, tool.description, tool.parameters, tool.strict))


def _choice(choice: str | FlatNamedTool | None) -> str | NamedTool | None:
    return NamedTool(NamedFunction(choice.name)) if isinstance(choice, FlatNamedTool) else choice


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(f"metadata: at most {MAX_METADATA} keys", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise InvalidRequest(
                f"metadata: keys have at most {MAX_METADATA_KEY} characters, values "
                f"{MAX_METADATA_VALUE}",
                "metadata",
            )
