"""Chat messages: checked, and turned into a prompt by the model's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from backends.tokenizer import Tokenizer
from gateway.errors import InvalidRequest, Unsupported
from gateway.http.requests.schemas import ContentPart, Message, ToolCallMessage
from gateway.http.tools.dialects import dialect_of

_ROLES: Final = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name for it; templates know the older
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def chat_prompt(
    messages: Sequence[Message] | None,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[int, ...]:
    """Return the token ids of the prompt for these messages.

    Args:
        messages: as they came.
        tokenizer: with the model's template.
        tools: functions on offer, as templates expect them.

    Raises:
        InvalidRequest: a message is malformed; the parameter is named.
        RequestRejected: the model has no template, or its template refuses.
    """
    if not messages:
        raise InvalidRequest("messages: must be given and not be empty", "messages")
    plain = [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if dialect_of(tokenizer.tool_template) is None:
        _check_no_calls(plain)
    # The template writes the special tokens itself.
    ids = tokenizer.encode(tokenizer.render_chat(plain, tools), add_special_tokens=False)
    if not ids:
        raise InvalidRequest("messages: the chat template makes an empty prompt", "messages")
    return tuple(ids)


def _plain(message: Message, where: str) -> dict[str, Any]:
    """Return the message as templates expect it."""
    if message.role == "function":
        raise Unsupported(f"{where}.role", f" {message.role!r}")
    if message.role not in _ROLES:
        known = ", ".join(_ROLES)
        raise InvalidRequest(
            f"{where}.role: must be one of {known}, not {message.role!r}", f"{where}.role"
        )
    if message.function_call:
        raise Unsupported(f"{where}.function_call")
    plain: dict[str, Any] = {"role": _ROLES[message.role], "content": _text(message, where)}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        plain["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _call(call: ToolCallMessage, where: str) -> dict[str, Any]:
    """Return a call as templates expect it, which write its arguments as JSON themselves."""
    param = f"{where}.function.arguments"
    try:
        arguments = msgspec.json.decode(call.function.arguments, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param}: must be a JSON object: {error}", param) from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _check_no_calls(plain: Sequence[Mapping[str, Any]]) -> None:
    """Return if no message is of a call: this model's template would drop or misread it."""
    for i, message in enumerate(plain):
        if message["role"] == "tool":
            raise Unsupported(f"messages[{i}].role", " 'tool': with this model it")
        if "tool_calls" in message:
            raise Unsupported(f"messages[{i}].tool_calls", " with this model")


def _text(message: Message, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            return ""
        raise InvalidRequest(f"{where}.content: must be given", f"{where}.content")
    return "".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _part(part: ContentPart, where: str) -> str:
    if part.type != "text":
        raise Unsupported(f"{where}.type", f" {part.type!r}")
    if part.text is None:
        raise InvalidRequest(f"{where}.text: must be given", f"{where}.text")
    return part.text
