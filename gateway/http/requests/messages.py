"""Chat messages: checked, and turned into a prompt by the model's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from draftgate.backends.token_ids import TokenIds, compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.errors import InvalidRequest, Unsupported
from draftgate.gateway.http.requests.schemas import ContentPart, Message, ToolCallMessage
from draftgate.gateway.http.tools.dialects import dialect_of

ROLES: Final = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name for it; templates know the older
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


@dataclass(slots=True)
class Place:
    """What the client calls a message.

    Attributes:
        calls: the same of its calls, where these are no part of it.
        content: the same of its content.
    """

    message: str
    calls: list[str] = field(default_factory=list)
    content: str = "content"


def chat_prompt(
    messages: Sequence[Message] | None,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] | None = None,
    places: Sequence[Place] | None = None,
) -> TokenIds:
    """Return the token ids of the prompt for these messages.

    Args:
        messages: as they came.
        tokenizer: with the model's template.
        tools: functions on offer, as templates expect them.
        places: of the messages in the request; None where they are its `messages`.

    Raises:
        InvalidRequest: a message is malformed; the parameter is named.
        RequestRejected: the model has no template, or its template refuses.
    """
    if not messages:
        raise InvalidRequest("messages: must be given and not be empty", "messages")
    if places is None:
        places = [Place(f"messages[{i}]") for i in range(len(messages))]
    placed = list(zip(messages, places, strict=True))
    plain = [_plain(message, place) for message, place in placed]
    if dialect_of(tokenizer.tool_template) is None:
        for message, place in placed:
            _check_no_call(message, place)
    # The template writes the special tokens itself.
    ids = tokenizer.encode(tokenizer.render_chat(plain, tools), add_special_tokens=False)
    if not ids:
        raise InvalidRequest("messages: the chat template makes an empty prompt", "messages")
    return compact(ids)


def _plain(message: Message, place: Place) -> dict[str, Any]:
    """Return the message as templates expect it."""
    where = place.message
    if message.role == "function":
        raise Unsupported(f"{where}.role", f" {message.role!r}")
    if message.role not in ROLES:
        known = ", ".join(ROLES)
        raise InvalidRequest(
            f"{where}.role: must be one of {known}, not {message.role!r}", f"{where}.role"
        )
    if message.function_call:
        raise Unsupported(f"{where}.function_call")
    text = _text(message, f"{where}.{place.content}")
    plain: dict[str, Any] = {"role": ROLES[message.role], "content": text}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        plain["tool_calls"] = [_call(call, _arguments_place(place, i)) for i, call in calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _arguments_place(place: Place, index: int) -> str:
    if place.calls:
        return f"{place.calls[index]}.arguments"
    return f"{place.message}.tool_calls[{index}].function.arguments"


def _call(call: ToolCallMessage, param: str) -> dict[str, Any]:
    """Return a call as templates expect it, which write its arguments as JSON themselves."""
    try:
        arguments = msgspec.json.decode(call.function.arguments, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param}: must be a JSON object: {error}", param) from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _check_no_call(message: Message, place: Place) -> None:
    """Return if a message is of no call: this model's template would drop or misread it."""
    if message.role == "tool":
        raise Unsupported(f"{place.message}.role", " 'tool': with this model it")
    if message.tool_calls:
        param = place.calls[0] if place.calls else f"{place.message}.tool_calls"
        raise Unsupported(param, " with this model")


def _text(message: Message, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            return ""
        raise InvalidRequest(f"{where}: must be given", where)
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: ContentPart, where: str) -> str:
    if part.type != "text":
        raise Unsupported(f"{where}.type", f" {part.type!r}")
    if part.text is None:
        raise InvalidRequest(f"{where}.text: must be given", f"{where}.text")
    return part.text
