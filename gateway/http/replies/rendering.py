"""Answers in the shapes of OpenAI's API: one `Rendering` each, one generation path for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from backends.tokenizer import Tokenizer
from backends.types import Delta, FinishReason, TokenLogprob
from gateway.errors import GatewayError
from gateway.http.replies.shapes import Reply, ResponseMetrics, Usage

encode: Final = msgspec.json.Encoder().encode

DONE: Final = b"data: [DONE]\n\n"
"""The last event of a stream of chunks."""


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
    """One request's answer in the shape of one endpoint. Remembers what it has sent.

    A streamed answer is `chunk` for each delta, and then `ending` or `failure`, once. Each returns
    complete server-sent events, or nothing where there is nothing to tell yet.
    """

    def response(
        self, choices: Sequence[WholeChoice], usage: Usage, metrics: ResponseMetrics
    ) -> bytes:
        """Return the whole answer as JSON."""
        ...

    def chunk(
        self,
        delta: Delta,
        usage: Usage | UnsetType = UNSET,
        metrics: ResponseMetrics | UnsetType = UNSET,
    ) -> bytes:
        """Return what a step added.

        Args:
            usage: so far, where each chunk is to have it.
            metrics: with the last delta of a stream that ends without usage.
        """
        ...

    def ending(
        self, usage: Usage | UnsetType = UNSET, metrics: ResponseMetrics | UnsetType = UNSET
    ) -> bytes:
        """Return the end behind the last delta; with usage and metrics where they are wanted."""
        ...

    def failure(self, error: GatewayError) -> bytes:
        """Return the end of an answer that broke: one error, and nothing may follow."""
        ...


def event(data: bytes) -> bytes:
    """Return a server-sent event."""
    return b"data: " + data + b"\n\n"


def reply(
    frame: Frame,
    prefix: str,
    kind: str,
    choices: list[Any],
    usage: Usage | UnsetType,
    metrics: ResponseMetrics | UnsetType,
) -> bytes:
    """Return the JSON of a response or chunk."""
    return encode(
        Reply[Any](
            f"{prefix}-{frame.request_id}",
            kind,
            frame.created_s,
            frame.model,
            choices,
            usage,
            metrics,
        )
    )
