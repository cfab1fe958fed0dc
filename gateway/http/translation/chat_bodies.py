"""The bodies of chats that upstreams get in place of requests of other APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from draftgate.gateway.http.requests.messages import ROLES
from draftgate.gateway.http.requests.reasoning import SWITCHES
from draftgate.gateway.http.requests.schemas import (
    ChatBody,
    ContentPart,
    Message,
    TextFormat,
    ThinkingOptions,
)

SCHEMA_NAME: Final = "response"
"""The name of a schema without one. OpenAI and vLLM require a name, which has no effect."""

_UNTAGGED: Final = frozenset({"function", "json_schema"})
"""Fields whose objects have no type of their own in chats, unlike in `/v1/responses`."""


def chat_body(chat: ChatBody, model: str, *, continuous_usage: bool) -> bytes:
    """Return the JSON of a chat for an upstream.

    Args:
        model: the upstream's name of the model.
        continuous_usage: whether each chunk of a stream is to have the usage so far, which not
            every server allows.
    """
    fields = {**_prompt_fields(chat), "model": model}
    for name in ("logprobs", "top_logprobs", "thinking", "enable_thinking"):
        fields.pop(name, None)
    most = fields.pop("max_completion_tokens", None)
    if most is not None:  # the older name, which every server knows
        fields["max_tokens"] = most
    if not chat.tools:
        fields.pop("parallel_tool_calls", None)
    wanted = fields.get("response_format")
    if isinstance(chat.response_format, TextFormat):
        del fields["response_format"]
    elif wanted is not None and "json_schema" in wanted:
        wanted["json_schema"].setdefault("name", SCHEMA_NAME)
    if chat.stream:
        options = {"include_usage": True}
        if continuous_usage:
            options["continuous_usage_stats"] = True
        fields["stream_options"] = options
    return msgspec.json.encode(fields)


def tokenize_body(chat: ChatBody, model: str) -> bytes:
    """Return the body of `/tokenize` for the prompt of a chat."""
    names = (
        "messages", "tools", "chat_template_kwargs", "continue_final_message",
        "add_generation_prompt",
    )  # fmt: skip
    fields = _prompt_fields(chat)
    return msgspec.json.encode(
        {"model": model, **{name: fields[name] for name in names if name in fields}}
    )


def _prompt_fields(chat: ChatBody) -> dict[str, Any]:
    """Return the fields of a chat that have values, with those of the prompt as servers expect."""
    fields: dict[str, Any] = _plain(chat)
    fields["messages"] = [_message(message) for message in chat.messages or ()]
    if chat.tools == []:
        del fields["tools"]
    if chat.continue_final_message:
        fields["add_generation_prompt"] = False
    else:
        fields.pop("continue_final_message", None)
    switches = _switches(chat)
    if switches:
        fields["chat_template_kwargs"] = {**switches, **(chat.chat_template_kwargs or {})}
    return fields


def _switches(chat: ChatBody) -> dict[str, bool]:
    """Return the variables of templates that switch reasoning, if the request wants so.

    Servers ignore variables that the template of their model does not have.
    """
    wanted = chat.enable_thinking
    if isinstance(chat.thinking, ThinkingOptions):
        wanted = chat.thinking.type == "enabled"
    elif chat.thinking is not None:
        wanted = chat.thinking
    return {} if wanted is None else dict.fromkeys(SWITCHES, wanted)


def _message(message: Message) -> dict[str, Any]:
    """Return a message whose content is one text, because not every server accepts parts."""
    found: dict[str, Any] = _plain(message)
    found["role"] = ROLES.get(message.role, message.role)
    if isinstance(message.content, list):
        found["content"] = _text(message.content)
    if message.tool_calls and not found.get("content"):
        found["content"] = None
    return found


def _text(parts: Sequence[ContentPart]) -> str:
    return "".join(part.text or part.refusal or "" for part in parts)


def _plain(value: Any, *, tagged: bool = True) -> Any:
    """Return the fields of an object that have a value, and other values as they are."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if not isinstance(value, Struct):
        return value
    config = value.__struct_config__
    found = {config.tag_field: config.tag} if tagged and config.tag_field is not None else {}
    for name in value.__struct_fields__:
        part = getattr(value, name)
        if part is not None:
            found[name] = _plain(part, tagged=name not in _UNTAGGED)
    return found
