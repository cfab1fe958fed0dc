"""Answers in the shape of chat completions."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from backends.types import Delta, TokenLogprob
from gateway.errors import GatewayError
from gateway.http.replies.rendering import DONE, Frame, WholeChoice, event, reply
from gateway.http.replies.shapes import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ResponseMetrics,
    TokenLogprobReply,
    TopLogprob,
    Usage,
)


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
        return reply(self._frame, "chatcmpl", "chat.completion", rendered, usage, metrics)

    def chunk(
        self,
        delta: Delta,
        usage: Usage | UnsetType = UNSET,
        metrics: ResponseMetrics | UnsetType = UNSET,
    ) -> bytes:
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
        return event(
            reply(self._frame, "chatcmpl", "chat.completion.chunk", [choice], usage, metrics)
        )

    def ending(
        self, usage: Usage | UnsetType = UNSET, metrics: ResponseMetrics | UnsetType = UNSET
    ) -> bytes:
        """See `Rendering`."""
        if usage is UNSET:
            return DONE
        last = reply(self._frame, "chatcmpl", "chat.completion.chunk", [], usage, metrics)
        return event(last) + DONE

    def failure(self, error: GatewayError) -> bytes:
        """See `Rendering`."""
        return event(error.body())

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


def _bytes(token: str) -> list[int] | None:
    """Return the token's UTF-8 bytes; None for a part of a character."""
    return None if "\ufffd" in token else list(token.encode())
