"""The prompts of forwarded requests, as the tokens that the upstream will compute.

The gateway encodes a prompt as vLLM 0.32 does. It leaves out what only the server knows, such as
images or a template in the request. The upstream's own `/tokenize` would be exact for all requests,
but would delay each of them by a round trip to the process that also streams all responses.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from draftgate.backends.chat_template import PromptEnding, RawJson
from draftgate.backends.errors import RequestRejected
from draftgate.backends.prompt_blocks import PromptBlocks
from draftgate.backends.tokenizer import Tokenizer

ENCODED_INLINE_BYTES: Final = 4 << 10
"""Larger bodies are encoded in a thread. A body of this size takes 1 ms."""

_ITERATES: Final = re.compile(r"in\s+\w+(\[\s*['\"]content['\"]\s*\]|\.content)\s*[|%-]")
"""The loop of a template that renders the parts of a content. Other templates take a text."""


class _Completion(msgspec.Struct):
    prompt: str | list[int]
    add_special_tokens: bool = True
    cache_salt: str | None = None


class _Chat(msgspec.Struct):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    # A request with one of these has a prompt that only the server can render.
    chat_template: str | None = None
    documents: Any = None
    reasoning_effort: Any = None


class _Part(msgspec.Struct):
    text: str = ""


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None


class _Conversation(msgspec.Struct):
    messages: list[_Message]
    system: str | list[_Part] | None = None


_conversations: Final = msgspec.json.Decoder(_Conversation)
_completions: Final = msgspec.json.Decoder(_Completion)
_chats: Final = msgspec.json.Decoder(_Chat)


class _Unknown(Exception):
    """The prompt has a part that the gateway cannot encode."""


def encode_forwarded(path: str, body: bytes, tokenizer: Tokenizer) -> PromptBlocks | None:
    """Return the prompt of a body, or None if the gateway does not know how a server encodes it.

    Args:
        path: path of the endpoint. Only chats and completions with one prompt are known.
    """
    try:
        if path.endswith("/chat/completions"):
            chat = _chats.decode(body)
            text = _rendered(chat, tokenizer)
            ids = tokenizer.encode(text, add_special_tokens=chat.add_special_tokens)
            return PromptBlocks(ids, tokenizer, chat.cache_salt or "")
        if path.endswith("/completions"):
            sent = _completions.decode(body)
            found = sent.prompt
            if isinstance(found, str):
                found = tokenizer.encode(found, add_special_tokens=sent.add_special_tokens)
            return PromptBlocks(found, tokenizer, sent.cache_salt or "")
    except (msgspec.DecodeError, RequestRejected, RecursionError, UnicodeError, _Unknown):
        pass  # the upstream reports what is wrong, if anything is
    return None


def _rendered(chat: _Chat, tokenizer: Tokenizer) -> str:
    """Return the text of a chat's prompt.

    Raises:
        _Unknown: only the server can render it.
        RequestRejected: the model has no template, or its template rejects the messages.
    """
    if chat.chat_template is not None or chat.documents or chat.reasoning_effort is not None:
        raise _Unknown
    takes_parts = _takes_parts(tokenizer.tool_template or "")
    messages = [_message(one, takes_parts=takes_parts) for one in chat.messages]
    ending = PromptEnding.MESSAGE
    if chat.continue_final_message:
        ending = PromptEnding.OPEN
        if not (messages and isinstance(messages[-1]["content"], str)):
            raise _Unknown
    elif chat.add_generation_prompt:
        ending = PromptEnding.RESPONSE
    tools = [_tool(one) for one in chat.tools] if chat.tools else None
    return tokenizer.render_chat(messages, tools, chat.chat_template_kwargs, ending=ending)


@lru_cache(maxsize=16)
def _takes_parts(template: str) -> bool:
    """Return whether a template renders the parts of a content one by one."""
    return _ITERATES.search(template) is not None


def _message(sent: Mapping[str, Any], *, takes_parts: bool) -> dict[str, Any]:
    """Return a message in the form in which vLLM passes it to the template."""
    role = sent.get("role")
    if role not in {"system", "user", "assistant", "tool"}:
        raise _Unknown
    content = sent.get("content")
    texts = [_text(part) for part in content] if isinstance(content, list) else None
    if content is None:
        content = [] if takes_parts and role != "tool" else ""
    elif texts is not None and (role == "tool" or not takes_parts):
        content = "\n".join(texts)
    elif texts is not None:
        content = [{"type": "text", "text": text} for text in texts]
    elif not isinstance(content, str):
        raise _Unknown
    found: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        if sent.get("tool_calls"):
            found["tool_calls"] = [_call(call) for call in sent["tool_calls"]]
        reasoning = sent.get("reasoning")
        if reasoning is not None:
            found["reasoning"] = found["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in sent:
        found["tool_call_id"] = sent["tool_call_id"]
    if isinstance(sent.get("name"), str):
        found["name"] = sent["name"]
    return found


def _text(part: object) -> str:
    """Return the text of a part of a content."""
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise _Unknown
    return text


def _call(call: object) -> dict[str, Any]:
    """Return a call with its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise _Unknown
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            arguments = RawJson(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with the fields that vLLM passes, in its order, because templates write all."""
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _Unknown
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        shown["strict"] = function["strict"]
    return {"type": "function", "function": shown}


def session_id(path: str, body: bytes, tenant: str, stated: str, cache_key: str) -> str:
    """Return the id of a request's session, or an empty text without one.

    Args:
        stated: the header `x-session-id`, which takes precedence, or empty.
        cache_key: the field `prompt_cache_key`, which comes next, or empty.
    """
    if stated or cache_key:
        key = f"id {stated}" if stated else f"cache {cache_key}"
    elif path.endswith("/v1/messages"):
        key = _conversation_key(body)
    else:
        return ""
    # Keys of clients may have any length.
    return key and hashlib.blake2b(f"{tenant}\0{key}".encode(), digest_size=16).hexdigest()


def _conversation_key(body: bytes) -> str:
    """Return what identifies the conversation of a body, or an empty text.

    Clients of this API send no id of a session, but repeat the beginning of the conversation. Only
    its text counts, because clients move their marks (`cache_control`) from message to message.
    """
    try:
        sent = _conversations.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return ""
    if not sent.messages:
        return ""
    parts = [*_parts(sent.system), b"\0", *_parts(sent.messages[0].content)]
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()


def _parts(content: str | list[_Part] | None) -> list[bytes]:
    if isinstance(content, str):
        return [content.encode()]
    return [one.text.encode() for one in content or ()]
