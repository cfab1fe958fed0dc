"""The validation of chat messages, and their conversion to a prompt by the model's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from draftgate.backends.chat_template import PromptEnding, RawJson
from draftgate.backends.errors import RequestRejected
from draftgate.backends.token_ids import TokenIds, compact
from draftgate.gateway.errors import Unsupported, invalid
from draftgate.gateway.http.requests.prompt_encoding import encode_prompt
from draftgate.gateway.http.requests.schemas import (
    ChatBody,
    ContentPart,
    Message,
    TokenizeBody,
    ToolCallMessage,
)
from draftgate.gateway.http.requests.tools import OfferedTools
from draftgate.gateway.served_model import ServedModel
from draftgate.gateway.tools.described import instructions, placements, without_calls
from draftgate.gateway.tools.dialects import DESCRIBED

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
    served: ServedModel,
    tools: OfferedTools | None = None,
    variables: Mapping[str, Any] | None = None,
    *,
    most_tokens: int | None = None,
    keep_tokens: int | None = None,
    add_special_tokens: bool = False,
    ending: PromptEnding = PromptEnding.RESPONSE,
) -> TokenIds:
    """Return the token ids of the prompt for a chat.

    Args:
        messages: the messages as received.
        served: the model, with its template.
        tools: functions on offer.
        variables: further variables of the template (`reasoning.template_variables`).
        most_tokens: the length of the context, or None without a limit.
        keep_tokens: the number of tokens at the end that are needed, or None for all.
        add_special_tokens: whether to add special tokens to those that the template writes.
        ending: the end of the prompt.

    Raises:
        InvalidRequest: a message is malformed, or the prompt cannot fit.
        RequestRejected: the model has no template, or its template rejects the messages.
    """
    shown = template_messages(messages, served)
    if ending is PromptEnding.OPEN and messages and messages[-1].tool_calls:
        where = f"messages[{len(messages) - 1}].tool_calls"
        raise invalid(where, "must not be part of a message to continue")
    text = _rendered(shown, served, tools, variables, ending)
    ids = encode_prompt(
        served.tokenizer,
        text,
        most_tokens,
        "messages",
        keep_tokens=keep_tokens,
        add_special_tokens=add_special_tokens,
    )
    if not ids:
        raise invalid("messages", "the chat template makes an empty prompt")
    return compact(ids)


def prompt_ending(wire: ChatBody | TokenizeBody) -> PromptEnding:
    """Return the end of the prompt that a request wants, as in vLLM.

    Raises:
        InvalidRequest: the request wants two ends.
    """
    if wire.continue_final_message:
        if wire.add_generation_prompt:
            words = "cannot be combined with add_generation_prompt: true"
            raise invalid("continue_final_message", words)
        return PromptEnding.OPEN
    begins = wire.add_generation_prompt is not False
    return PromptEnding.RESPONSE if begins else PromptEnding.MESSAGE


def continued_text(wire: ChatBody) -> str | None:
    """Return the text of the last message if the response continues it, or else None."""
    if not wire.continue_final_message or not wire.messages:
        return None
    return _text(wire.messages[-1], f"messages[{len(wire.messages) - 1}]")


def _rendered(
    messages: Sequence[Mapping[str, Any]],
    served: ServedModel,
    tools: OfferedTools | None,
    variables: Mapping[str, Any] | None,
    ending: PromptEnding,
) -> str:
    """Return the prompt that the template writes.

    Raises:
        RequestRejected: the model has no template, or its template rejects the messages.
        Unsupported: the template writes tools nowhere.
    """
    render = partial(served.tokenizer.render_chat, ending=ending)
    if tools is None or tools.dialect is not DESCRIBED:
        return render(messages, None if tools is None else tools.shown, variables)
    text = instructions(tools.shown, several=tools.several)
    failure: RequestRejected | None = None
    for some in placements(messages, text):
        try:
            prompt = render(some, None, variables)
        except RequestRejected as error:
            failure = error
        else:
            if text in prompt:
                return prompt
    raise failure or Unsupported("tools", " by this model's chat template")


def template_messages(
    messages: Sequence[Message] | None, served: ServedModel
) -> list[dict[str, Any]]:
    """Return messages in the form that the model's template expects.

    Raises:
        InvalidRequest: a message is malformed.
    """
    if not messages:
        raise invalid("messages", "must be given and must not be empty")
    plain = [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]
    dialect = served.dialect
    if dialect is DESCRIBED:
        plain = without_calls(plain)
    elif dialect is None:
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
