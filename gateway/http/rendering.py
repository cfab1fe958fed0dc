"""Answers in the two shapes of OpenAI's API: one `Rendering` each, one generation path for both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from backends.tokenizer import Tokenizer
from backends.types import Delta, FinishReason, TokenLogprob
from gateway.http.replies import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    CompletionChoice,
    CompletionLogprobs,
    Reply,
    ResponseMetrics,
    TokenLogprobReply,
    TopLogprob,
    Usage,
)

encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Frame:
    """What every response and chunk of one request has in common."""

    request_id: str
    created_s: int
    model: str
    tokenizer: Tokenizer
    logprobs: bool


@dataclass(slots=True)
class WholeChoice:
    """A choice collected for a response that is not streamed."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        """Append what a step added."""
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason


class Rendering(Protocol):
    """One request's answer in the shape of one endpoint. Remembers what it has sent."""

    def response(
        self, choices: Sequence[WholeChoice], usage: Usage, metrics: ResponseMetrics
    ) -> bytes:
        """Return the whole answer as JSON."""
        ...

    def chunk(self, delta: Delta, metrics: ResponseMetrics | UnsetType = UNSET) -> bytes:
        """Return the JSON of one streamed chunk."""
        ...

    def usage_chunk(self, usage: Usage, metrics: ResponseMetrics) -> bytes:
        """Return the JSON of the last chunk of a stream that was asked for usage."""
        ...


class ChatRendering:
    """`/v1/chat/completions`."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._begun: set[int] = set()  # choices whose role was sent

    def response(
        self, choices: Sequence[WholeChoice], usage: Usage, metrics: ResponseMetrics
    ) -> bytes:
        """See `Rendering`."""
        rendered = [
            ChatChoice(
                index,
                ChatMessage("".join(choice.texts)),
                self._logprobs(choice.logprobs),
                choice.finish_reason,
            )
            for index, choice in enumerate(choices)
        ]
        return _reply(self._frame, "chatcmpl", "chat.completion", rendered, usage, metrics)

    def chunk(self, delta: Delta, metrics: ResponseMetrics | UnsetType = UNSET) -> bytes:
        """See `Rendering`."""
        role: str | UnsetType = UNSET
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            role = "assistant"
        content: str | UnsetType = delta.text if delta.text or role else UNSET
        choice = ChatChunkChoice(
            delta.choice,
            ChatDelta(role, content),
            self._logprobs(delta.logprobs),
            delta.finish_reason,
        )
        return _reply(self._frame, "chatcmpl", "chat.completion.chunk", [choice], UNSET, metrics)

    def usage_chunk(self, usage: Usage, metrics: ResponseMetrics) -> bytes:
        """See `Rendering`."""
        return _reply(self._frame, "chatcmpl", "chat.completion.chunk", [], usage, metrics)

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if not self._frame.logprobs:
            return None
        return ChatLogprobs([self._entry(entry) for entry in entries])

    def _entry(self, entry: TokenLogprob) -> TokenLogprobReply:
        chosen = self._spelled(entry.token_id, entry.logprob)
        top = [self._spelled(token_id, logprob) for token_id, logprob in entry.top]
        return TokenLogprobReply(chosen.token, chosen.logprob, chosen.bytes, top)

    def _spelled(self, token_id: int, logprob: float) -> TopLogprob:
        token = self._frame.tokenizer.token_text(token_id)
        return TopLogprob(token, logprob, _bytes(token))


class CompletionRendering:
    """`/v1/completions`."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._offsets: dict[int, int] = {}  # characters of tokens sent, by choice

    def response(
        self, choices: Sequence[WholeChoice], usage: Usage, metrics: ResponseMetrics
    ) -> bytes:
        """See `Rendering`."""
        rendered = [
            CompletionChoice(
                index,
                "".join(choice.texts),
                self._logprobs(index, choice.logprobs),
                choice.finish_reason,
            )
            for index, choice in enumerate(choices)
        ]
        return _reply(self._frame, "cmpl", "text_completion", rendered, usage, metrics)

    def chunk(self, delta: Delta, metrics: ResponseMetrics | UnsetType = UNSET) -> bytes:
        """See `Rendering`."""
        choice = CompletionChoice(
            delta.choice,
            delta.text,
            self._logprobs(delta.choice, delta.logprobs),
            delta.finish_reason,
        )
        return _reply(self._frame, "cmpl", "text_completion", [choice], UNSET, metrics)

    def usage_chunk(self, usage: Usage, metrics: ResponseMetrics) -> bytes:
        """See `Rendering`."""
        return _reply(self._frame, "cmpl", "text_completion", [], usage, metrics)

    def _logprobs(self, choice: int, entries: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        if not self._frame.logprobs:
            return None
        text = self._frame.tokenizer.token_text
        reply = CompletionLogprobs([], [], [], [])
        offset = self._offsets.get(choice, 0)
        for entry in entries:
            token = text(entry.token_id)
            reply.tokens.append(token)
            reply.token_logprobs.append(entry.logprob)
            likeliest = {text(i): value for i, value in entry.top}
            reply.top_logprobs.append({**likeliest, token: entry.logprob})
            reply.text_offset.append(offset)
            offset += len(token)
        self._offsets[choice] = offset
        return reply


def _reply(
    frame: Frame,
    prefix: str,
    kind: str,
    choices: list[Any],
    usage: Usage | UnsetType,
    metrics: ResponseMetrics | UnsetType,
) -> bytes:
    return encode(
        Reply(
            f"{prefix}-{frame.request_id}",
            kind,
            frame.created_s,
            frame.model,
            choices,
            usage,
            metrics,
        )
    )


def _bytes(token: str) -> list[int] | None:
    """Return the token's UTF-8 bytes; None for a part of a character."""
    return None if "\ufffd" in token else list(token.encode())
