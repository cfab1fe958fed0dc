"""The rest of a stream that an upstream has broken off, as a request and as events.

The prompt of the request for the rest ends with the output so far: a completion as text or as
tokens, and a chat as the last message of the assistant, which vLLM and SGLang continue with
`continue_final_message`. llama.cpp continues a last message of the assistant without being asked.

Nothing here runs for a stream that ends as it should.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from draftgate.backends.base import TokenUsage
from draftgate.backends.openai.events import data_of_events
from draftgate.backends.openai.stream_output import (
    NotContinuable,
    StreamOutput,
    count_in,
    is_count,
    read_chunk,
    read_object,
    text_of,
)

CHATS: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
TOKENIZE: Final = "/tokenize"
CONTINUED: Final = frozenset({CHATS, COMPLETIONS})
"""The endpoints whose streams can be continued."""

_HARMLESS_FIELDS: Final = (
    "model messages prompt stream stream_options max_tokens max_completion_tokens min_tokens "
    "temperature top_p top_k min_p typical_p seed user metadata store service_tier priority "
    "logit_bias repetition_penalty stop_token_ids ignore_eos skip_special_tokens "
    "spaces_between_special_tokens add_generation_prompt continue_final_message add_special_tokens "
    "chat_template chat_template_kwargs documents return_token_ids request_id cache_salt "
    "prompt_cache_key safety_identifier cache_prompt speculation"
)
_HARMLESS: Final = frozenset(_HARMLESS_FIELDS.split())
"""The fields of a request that do not depend on what is prompt and what is output.

A frequency penalty, for example, counts the tokens of the output, and a stop text may begin in the
text so far. vLLM's repetition penalty counts prompt and output alike."""

_NEUTRAL: Final[Mapping[str, object]] = {
    "n": 1,
    "best_of": 1,
    "response_format": {"type": "text"},
    "tool_choice": "none",
}
"""Values of other fields that are equal to no value. Values such as null and 0 are for any field,
but for those of `_COUNTS`."""

_COUNTS: Final = frozenset({"logprobs", "prompt_logprobs"})
"""Fields whose value 0 asks for something."""

_COUNTED: Final = ("prompt", "completion")
_LIMITS: Final = ("max_tokens", "max_completion_tokens", "min_tokens")


class RestOfStream(NamedTuple):
    """What the rest of a stream needs.

    Attributes:
        body: the fields of the request.
        output: the output so far.
        is_chat: whether it is a chat, or else a completion.
        limits: the token limits of the request.
        skipped: white space at the end of the text that the request lacks.
    """

    body: dict[str, Any]
    output: StreamOutput
    is_chat: bool
    limits: Mapping[str, int]
    skipped: str = ""

    @property
    def text(self) -> str:
        """The text that the request contains."""
        text = self.output.text
        return text[: len(text) - len(self.skipped)]

    @property
    def includes_usage(self) -> bool:
        """Whether the client wants the usage at the end."""
        options = self.body.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    def is_complete(self, tokens: int) -> bool:
        """Return whether an output of this many tokens has reached its limit."""
        most = [limit for name, limit in self.limits.items() if name != "min_tokens"]
        return bool(most) and tokens >= min(most)

    def request(self, tokens: int) -> bytes:
        """Return the body of the request for the rest.

        Args:
            tokens: number of tokens of `text`.
        """
        limits = {name: max(limit - tokens, 0) for name, limit in self.limits.items()}
        body, output = {**self.body, **limits}, self.output
        if not self.text:
            pass  # the whole output is the rest
        elif self.is_chat:
            body |= _continued_chat(body["messages"], self.text)
        elif isinstance(body["prompt"], str) and not (output.ids and output.prompt_ids):
            body["prompt"] += self.text
        else:
            prompt = body["prompt"] if isinstance(body["prompt"], list) else output.prompt_ids
            body["prompt"] = [*(prompt or ()), *(output.ids or ())]
        return msgspec.json.encode(body)


def rest_of(body: bytes, output: StreamOutput, *, is_chat: bool) -> RestOfStream:
    """Return what the rest of a stream needs.

    Args:
        body: the body of the client's request.

    Raises:
        NotContinuable: the rest would not be what an undisturbed stream would have had.
    """
    fields = read_object(body)
    for name, value in fields.items():
        _check_field(name, value)
    limits = {name: fields[name] for name in _LIMITS if is_count(fields.get(name))}
    skipped = ""
    if is_chat:
        _check_messages(fields)
        # Chat templates may remove white space at the end of the message.
        skipped = output.text[len(output.text.rstrip()) :]
    else:
        if "max_tokens" not in limits:
            raise NotContinuable("the request has no max_tokens, whose default is the server's")
        _check_prompt(fields.get("prompt"), output)
    if "\ufffd" in output.text:
        raise NotContinuable("the text has a replacement character")
    return RestOfStream(fields, output, is_chat, limits, skipped)


def _check_field(name: str, value: object) -> None:
    if name in _HARMLESS or value == _NEUTRAL.get(name):
        return
    asks = value is not None and value is not False if name in _COUNTS else bool(value)
    if asks:
        raise NotContinuable(f"the request has {name}")


def _check_messages(fields: Mapping[str, Any]) -> None:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise NotContinuable("the messages cannot be read")
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else ()
        if not all(isinstance(part, dict) and _is_repeatable(part) for part in parts):
            raise NotContinuable("a message refers to a file outside the request")
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and not (
        fields.get("continue_final_message") and isinstance(last.get("content"), str)
    ):
        raise NotContinuable("the last message is the assistant's")


def _is_repeatable(part: Mapping[str, Any]) -> bool:
    """Return whether a part of a message is text, or an image within the request."""
    if part.get("type") == "text":
        return True
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    return part.get("type") == "image_url" and isinstance(url, str) and url.startswith("data:")


def _check_prompt(prompt: object, output: StreamOutput) -> None:
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list) or not all(map(is_count, prompt)):
        raise NotContinuable("the request has several prompts")
    if output.text and output.ids is None:
        raise NotContinuable("the prompt has tokens, and those of the output are not known")


def _continued_chat(messages: list[dict[str, Any]], text: str) -> dict[str, Any]:
    """Return the fields of a chat whose last message the model continues."""
    if messages and messages[-1].get("role") == "assistant":  # which the client wants continued
        last = {**messages[-1], "content": messages[-1]["content"] + text}
        messages = messages[:-1]
    else:
        last = {"role": "assistant", "content": text}
    return {
        "messages": [*messages, last],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }


class JoinedStream:
    """Makes the events of the rest of a stream those of one stream."""

    def __init__(
        self, rest: RestOfStream, tokens: int, metrics: Mapping[str, Any], prompt_tokens: int
    ) -> None:
        """Continue a stream.

        Args:
            tokens: number of tokens of the text in the request for the rest.
            metrics: fields for `metrics` at the end of the stream.
            prompt_tokens: number of tokens of the client's prompt, or 0 to subtract from those of
                the request for the rest.
        """
        self._rest = rest
        self._tokens = tokens
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._skipped = rest.skipped

    def convert(self, events: bytes) -> bytes:
        """Return the events of the client's stream for complete events of the rest."""
        return b"".join(map(self._event, data_of_events(events, keeps_done=True)))

    def closing(self) -> bytes:
        """Return the events after the output, which is complete or has reached its limit."""
        rest, output = self._rest, self._rest.output
        events = b""
        if not output.has_finished:
            text: dict[str, Any] = {"delta": {}} if rest.is_chat else {"text": ""}
            choice = {"index": 0, **text, "logprobs": None, "finish_reason": "length"}
            events = self._end({"choices": [choice]})
        if rest.includes_usage and not output.has_usage:
            usage = {"prompt_tokens": 0, "completion_tokens": 0}
            events += self._end({"choices": [], "usage": self._sum(usage)})
        return events + b"data: [DONE]\n\n"

    def usage(self, found: TokenUsage) -> TokenUsage:
        """Return the tokens of the stream, from those of the request for the rest."""
        prompt = self._prompt_tokens or max(found.prompt - self._tokens, 0)
        return TokenUsage(prompt, min(found.cached, prompt), self._tokens + found.output)

    def _end(self, chunk: dict[str, Any]) -> bytes:
        return _event({**self._rest.output.names, **chunk})

    def _event(self, data: bytes) -> bytes:
        if data == b"[DONE]":
            return b"data: [DONE]\n\n"
        chunk = read_chunk(data)
        chunk |= {name: value for name, value in self._rest.output.names.items() if name in chunk}
        chunk.pop("prompt_token_ids", None)
        choices, usage = chunk.get("choices"), chunk.get("usage")
        if usage:
            chunk["usage"] = self._sum(usage)
        kept = [choice for choice in choices or () if self._keep(choice)]
        if choices and not kept:
            return b""
        ends = any(choice.get("finish_reason") is not None for choice in kept)
        if not choices if self._rest.includes_usage else ends:
            theirs = chunk.get("metrics")
            chunk["metrics"] = {**(theirs if isinstance(theirs, dict) else {}), **self._metrics}
        return _event(chunk)

    def _keep(self, choice: dict[str, Any]) -> bool:
        """Remove what the client has from a choice, and return whether anything is left."""
        choice.pop("prompt_token_ids", None)
        text = text_of(choice)
        if self._skipped and text:
            text = self._without_skipped(text)
        if self._rest.is_chat:
            delta = choice.get("delta") or {}
            delta.pop("role", None)
            choice["delta"] = {**delta, "content": text} if text or "content" in delta else delta
        ends = choice.get("finish_reason") is not None
        return bool(text) or ends or bool(choice.get("token_ids"))

    def _without_skipped(self, text: str) -> str:
        """Return a text without the white space that the client has."""
        while text and self._skipped and text[0] == self._skipped[0]:
            text, self._skipped = text[1:], self._skipped[1:]
        if text:
            self._skipped = ""
        return text

    def _sum(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the usage of the whole stream, from that of the request for the rest."""
        details = usage.get("prompt_tokens_details")
        cached = count_in(details, "cached_tokens") if isinstance(details, dict) else 0
        prompt, output = (count_in(usage, f"{name}_tokens") or 0 for name in _COUNTED)
        prompt, cached, output = self.usage(TokenUsage(prompt, cached or 0, output))
        found = {**usage, "prompt_tokens": prompt, "completion_tokens": output}
        if isinstance(details, dict):
            found["prompt_tokens_details"] = {**details, "cached_tokens": cached}
        return {**found, "total_tokens": prompt + output}


def count_request(model: str, text: str) -> bytes:
    """Return the body of a request to `/tokenize`, in the forms of vLLM, SGLang and llama.cpp."""
    fields = {"prompt": text, "content": text, "add_special_tokens": False}
    return msgspec.json.encode({"model": model, **fields} if model else fields)


def counted_tokens(body: bytes) -> int | None:
    """Return the number of tokens in a response of `/tokenize`, or None without it."""
    try:
        found = read_object(body)
    except NotContinuable:
        return None
    count, tokens = found.get("count"), found.get("tokens")
    if is_count(count):
        return int(count)
    return len(tokens) if isinstance(tokens, list) else None


def is_servers_fault(event: bytes) -> bool:
    """Return whether an error event says that the server has failed, and not the request."""
    try:
        error = read_object(b"".join(data_of_events(event))).get("error")
    except NotContinuable:
        return True
    code = error.get("code") if isinstance(error, dict) else None
    return not (is_count(code) and 400 <= int(code) < 500)


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(chunk)
