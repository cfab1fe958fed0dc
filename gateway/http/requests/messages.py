"""Chat messages: checked, and turned into a prompt by the model's template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from backends.tokenizer import Tokenizer
from gateway.errors import InvalidRequest, Unsupported
from gateway.http.requests.schemas import ContentPart, Message

_ROLES: Final = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name for it; templates know the older
    "user": "user",
    "assistant": "assistant",
}


def chat_prompt(messages: Sequence[Message] | None, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token ids of the prompt for these messages.

    Raises:
        InvalidRequest: a message is malformed; the parameter is named.
        RequestRejected: the model has no template, or its template refuses.
    """
    if not messages:
        raise InvalidRequest("messages: must be given and not be empty", "messages")
    plain = [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]
    # The template writes the special tokens itself.
    ids = tokenizer.encode(tokenizer.render_chat(plain), add_special_tokens=False)
    if not ids:
        raise InvalidRequest("messages: the chat template makes an empty prompt", "messages")
    return tuple(ids)


def _plain(message: Message, where: str) -> dict[str, Any]:
    """Return the message as templates expect it."""
    if message.role in {"tool", "function"}:
        raise Unsupported(f"{where}.role", f" {message.role!r}")
    if message.role not in _ROLES:
        known = ", ".join(_ROLES)
        raise InvalidRequest(
            f"{where}.role: must be one of {known}, not {message.role!r}", f"{where}.role"
        )
    for name in ("tool_calls", "function_call"):
        if getattr(message, name):
            raise Unsupported(f"{where}.{name}")
    plain = {"role": _ROLES[message.role], "content": _text(message, where)}
    return plain if message.name is None else {**plain, "name": message.name}


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
