"""The validation of chat messages, and their conversion to a prompt by the model's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from draftgate.backends.chat_template import RawJson
from draftgate.backends.token_ids import TokenIds, compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.errors import Unsupported, invalid
from draftgate.gateway.http.requests.prompt_encoding import encode_prompt
from draftgate.gateway.http.requests.schemas import ContentPart, Message, ToolCallMessage
from draftgate.gateway.http.tools.dialects import dialect_of

ROLES: Final = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name, which templates do not know
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

PART_TYPES: Final = ("text", "refusal")
"""The types of content parts. Each type is also the name of the field with the text."""


def chat_prompt(
    messages: Sequence[Message] | None,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    *,
    most_tokens: int | None = None,
    keep_tokens: int | None = None,
    add_special_tokens: bool = False,
) -> TokenIds:
    """Return the token ids of the prompt for a chat.

    Args:
        messages: the messages as received.
        tokenizer: the tokenizer with the model's template.
        tools: functions on offer, in the form that templates expect.
        variables: further variables of the template (`reasoning.template_variables`).
        most_tokens: the length of the context, or None without a limit.
        keep_tokens: the number of tokens at the end that are needed, or None for all.
        add_special_tokens: whether to add special tokens to those that the template writes.

    Raises:
        InvalidRequest: a message is malformed, or the prompt cannot fit.
        RequestRejected: the model has no template, or its template rejects the messages.
    """
    text = tokenizer.render_chat(template_messages(messages, tokenizer), tools, variables)
    ids = encode_prompt(
        tokenizer,
        text,
        most_tokens,
        "messages",
        keep_tokens=keep_tokens,
        add_special_tokens=add_special_tokens,
    )
    if not ids:
        raise invalid("messages", "the chat template makes an empty prompt")
    return compact(ids)


def template_messages(
    messages: Sequence[Message] | None, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Return messages in the form that the model's template expects.

    Raises:
        InvalidRequest: a message is malformed.
    """
    if not messages:
        raise invalid("messages", "must be given and must not be empty")
    plain = [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]
    dialect = dialect_of(tokenizer.tool_template)
    if dialect is None:
        for i, message in enumerate(messages):
            _check_no_call(message, f"messages[{i}]")
    elif dialect.between is None:
        plain = [part for message in plain for part in _single_calls(message)]
    return plain


def _plain(message: Message, where: str) -> dict[str, Any]:
    """Return a message in the form that templates expect."""
    if message.role == "function":
        raise Unsupported(f"{where}.role", f" {message.role!r}")
    if message.role not in ROLES:
        raise invalid(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {message.role!r}")
    if message.function_call is not None:
        raise Unsupported(f"{where}.function_call")
    text = _text(message, where)
    plain: dict[str, Any] = {"role": ROLES[message.role], "content": text}
    if message.name is not None:
        plain["name"] = message.name
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _call(call: ToolCallMessage) -> dict[str, Any]:
    """Return a call for the template, which itself writes the arguments as JSON.

    Models also write arguments that are not a JSON object, and `max_tokens` truncates arguments.
    An agent must be able to continue after such a call.
    """
    arguments: dict[str, Any] | RawJson
    try:
        arguments = msgspec.json.decode(call.function.arguments, type=dict[str, Any])
    except (ValueError, RecursionError):
        arguments = RawJson(call.function.arguments)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _single_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a message as messages with at most one call each."""
    first, *others = message.get("tool_calls") or [None]
    if not others:
        return [message]
    further = {"role": message["role"], "content": ""}
    return [
        {**message, "tool_calls": [first]},
        *({**further, "tool_calls": [call]} for call in others),
    ]


def _check_no_call(message: Message, where: str) -> None:
    # This model's template would drop or misread a call.
    if message.role == "tool":
        raise Unsupported(f"{where}.role", " 'tool' with this model")
    if message.tool_calls:
        raise Unsupported(f"{where}.tool_calls", " with this model")


def _text(message: Message, where: str) -> str:
    """Return the text of a message, which ends with the assistant's refusal, if any."""
    refusal = message.refusal or ""
    if refusal and message.role != "assistant":
        raise Unsupported(f"{where}.refusal", f" in a message of the role {message.role!r}")
    content = message.content
    if content is None:
        if message.role == "assistant":
            return refusal
        raise invalid(f"{where}.content", "must be given")
    return _content_text(content, message.role, f"{where}.content") + refusal


def _content_text(content: str | Sequence[ContentPart], role: str, where: str) -> str:
    """Return the text of a content, which is a text or a list of parts.

    Args:
        role: the role of the author, which decides on the allowed types of parts.
        where: path of the content in the request.

    Raises:
        InvalidRequest: a part is no text.
    """
    if isinstance(content, str):
        return content
    return "".join(_part(part, role, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: ContentPart, role: str, where: str) -> str:
    if part.type not in PART_TYPES or (part.type == "refusal" and role != "assistant"):
        raise Unsupported(f"{where}.type", f" {part.type!r}")
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise invalid(f"{where}.{part.type}", "must be given")
    return text
