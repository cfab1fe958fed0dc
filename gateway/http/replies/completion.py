"""Answers in the shape of completions."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from draftgate.backends.types import Delta, TokenLogprob
from draftgate.gateway.errors import GatewayError
from draftgate.gateway.http.replies.rendering import (
    DONE,
    ChunkEncoder,
    Frame,
    WholeChoice,
    event,
    reply,
)
from draftgate.gateway.http.replies.shapes import (
    CompletionChoice,
    CompletionLogprobs,
    ResponseMetrics,
    Usage,
)
from draftgate.gateway.http.requests.validation import Call


class CompletionRendering:
    """`/v1/completions`."""

    def __init__(self, frame: Frame, call: Call) -> None:
        self._frame = frame
        self._offsets: dict[int, int] = {}  # characters of tokens sent, by choice
        self._chunks = ChunkEncoder(frame, "cmpl", "text_completion")

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
                self._frame.steps(choice),
            )
            for index, choice in enumerate(choices)
        ]
        return reply(self._frame, "cmpl", "text_completion", rendered, usage, metrics)

    def chunk(
        self,
        delta: Delta,
        usage: Usage | UnsetType = UNSET,
        metrics: ResponseMetrics | UnsetType = UNSET,
    ) -> bytes:
        """See `Rendering`."""
        choice = CompletionChoice(
            delta.choice,
            delta.text,
            self._logprobs(delta.choice, delta.logprobs),
            delta.finish_reason,
            self._frame.steps(delta),
        )
        if usage is UNSET and metrics is UNSET:
            return event(self._chunks.encode(choice))
        return event(reply(self._frame, "cmpl", "text_completion", [choice], usage, metrics))

    def ending(
        self, usage: Usage | UnsetType = UNSET, metrics: ResponseMetrics | UnsetType = UNSET
    ) -> bytes:
        """See `Rendering`."""
        if usage is UNSET:
            return DONE
        last = reply(self._frame, "cmpl", "text_completion", [], usage, metrics)
        return event(last) + DONE

    def failure(self, error: GatewayError) -> bytes:
        """See `Rendering`."""
        return event(error.body())

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
