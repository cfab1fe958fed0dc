"""Answers in the shape of chat completions."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from draftgate.backends.types import Delta, TokenLogprob
from draftgate.gateway.errors import GatewayError
from draftgate.gateway.http.replies.calls import ChoiceCalls
from draftgate.gateway.http.replies.rendering import (
    DONE,
    ChunkEncoder,
    Frame,
    WholeChoice,
    event,
    reply,
)
from draftgate.gateway.http.replies.shapes import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ResponseMetrics,
    TokenLogprobReply,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from draftgate.gateway.http.requests.validation import Call


class ChatRendering:
    """`/v1/chat/completions`."""

    def __init__(self, frame: Frame, call: Call) -> None:
        self._frame = frame
        self._tools = call.tools
        self._begun: set[int] = set()  # choices whose role was sent
        self._chunks = ChunkEncoder(frame, "chatcmpl", "chat.completion.chunk")
        self._calls: dict[int, ChoiceCalls] = {}  # by choice, where there are tools

    def response(
        self, choices: Sequence[WholeChoice], usage: Usage, metrics: ResponseMetrics
    ) -> bytes:
        """See `Rendering`."""
        rendered = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return reply(self._frame, "chatcmpl", "chat.completion", rendered, usage, metrics)

    def chunk(
        self,
        delta: Delta,
        usage: Usage | UnsetType = UNSET,
        metrics: ResponseMetrics | UnsetType = UNSET,
    ) -> bytes:
        """See `Rendering`."""
        text, calls, reason = self._read(delta)
        if not (text or calls or delta.logprobs or delta.steps or reason):
            return b""  # what may be the beginning of a call is held back
        role: str | UnsetType = UNSET
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            role = "assistant"
        content: str | UnsetType = text if text or (role and not calls) else UNSET
        choice = ChatChunkChoice(
            delta.choice,
            ChatDelta(role, content, calls or UNSET),
            self._logprobs(delta.logprobs),
            reason,
            self._frame.steps(delta),
        )
        if usage is UNSET and metrics is UNSET:
            return event(self._chunks.encode(choice))
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

    def _read(self, delta: Delta) -> tuple[str, list[ToolCallDelta], str | None]:
        """Return what a delta adds to content and calls, and why the choice ended if it did."""
        if self._tools is None:
            return delta.text, [], delta.finish_reason
        calls = self._choice_calls(delta.choice)
        read = calls.add(delta.text, last=delta.finish_reason is not None)
        return read.content, read.calls, calls.reason(delta.finish_reason)

    def _choice(self, index: int, choice: WholeChoice) -> ChatChoice:
        text, logprobs = "".join(choice.texts), self._logprobs(choice.logprobs)
        steps, reason = self._frame.steps(choice), choice.finish_reason
        if self._tools is None:
            return ChatChoice(index, ChatMessage(text), logprobs, reason, steps)
        calls = self._choice_calls(index)
        return ChatChoice(index, calls.whole(text), logprobs, calls.reason(reason), steps)

    def _choice_calls(self, choice: int) -> ChoiceCalls:
        """Return where the calls of a choice are read."""
        if choice not in self._calls:
            assert self._tools is not None
            self._calls[choice] = ChoiceCalls(self._tools, f"{self._frame.request_id}/{choice}")
        return self._calls[choice]

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
