"""The contract between the gateway and whatever runs requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Final, NamedTuple, Protocol

from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, GenerationRequest, ModelCard, Pace
from draftgate.policies.types import WorkerLoad


class WorkerHandle(Protocol):
    """What a `Backend` and an `Upstream` have in common.

    `start` is called once, then any number of concurrent requests run, and `stop` ends it. All
    methods are called on the event loop's thread.
    """

    @property
    def card(self) -> ModelCard:
        """What is served. Valid after `start`."""

    @property
    def progress(self) -> float:
        """The share of loading that is done, 0 to 1. Valid at any time."""

    async def start(self) -> None:
        """Load and warm up; the worker is ready when this returns.

        Raises:
            CheckpointError: the model cannot be loaded.
        """

    async def stop(self) -> None:
        """Stop at once: open streams end with `BackendFailed`. Idempotent."""

    def load(self) -> WorkerLoad:
        """Return the current load, at the cost of reading a few numbers."""

    @property
    def failure(self) -> str | None:
        """Why it serves no requests now; None while it is well."""

    @property
    def recovers(self) -> bool:
        """Whether it may recover from a failure, which it then checks in the background."""


class Backend(WorkerHandle, Protocol):
    """Runs requests of token ids, on a device or simulated."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Valid after `start`."""

    def check(self, request: GenerationRequest) -> None:
        """Return if the request can run here. May be called in any thread.

        The first check of a grammar takes long, since it compiles the grammar.

        Raises:
            RequestRejected: it can never run; for example, it is longer than the context.
        """

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Run a request that passed `check`, and yield the deltas of its choices.

        The request is not checked again here, on the event loop: that takes 10 ms for half a
        million tokens (one core, Zen 4, 2026-11-21).

        The generator ends after every choice had its `finish_reason`. Closing it early cancels the
        request and frees its KV memory within one step.

        Raises:
            BackendFailed: the worker broke; no delta follows.
        """

    def set_pace(self, request_id: str, pace: Pace) -> None:
        """Set the pace of a request, from one of its next steps on.

        The pace does not change the output. Unknown ids are ignored, and so are requests that have
        ended.
        """

    def unread_tokens(self, request_id: str) -> int:
        """Return how many delivered tokens the reader of `generate` has not taken.

        It is 0 for unknown ids, and once all tokens have been delivered, when no pace would help.
        The cost is linear in the waiting deltas.
        """


class UpstreamCall(NamedTuple):
    """A client's request as an upstream gets it.

    Attributes:
        path: with the query, such as `/v1/chat/completions`.
        sequences: choices that it generates.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    sequences: int = 1


BYTES_PER_TOKEN: Final = 4
"""Of English text in JSON, roughly. It is used for estimates only."""


class TokenUsage(NamedTuple):
    """Tokens of an answer, as in OpenAI's `usage`.

    Attributes:
        cached: tokens of the prompt that were not computed again.
    """

    prompt: int
    cached: int
    output: int


class UpstreamPause(NamedTuple):
    """A time during which an upstream must not be called.

    Attributes:
        remaining_s: more than 0.
        status: for clients meanwhile: 429 if it is overloaded, 503 if it is out.
    """

    remaining_s: float
    status: int
    reason: str


class Exchange(Protocol):
    """An upstream's answer whose head has arrived.

    Attributes:
        status: the HTTP status.
        headers: without those that concern the connection or the encoding.
        streaming: whether it is a stream of events.
    """

    status: int
    headers: Mapping[str, str]
    streaming: bool

    @property
    def outputs(self) -> int:
        """Events with output so far; 0 if it is not a stream."""

    def blocks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives; a stream in complete events only.

        Unread parts stay at the upstream. Nothing follows `[DONE]` or an error event of the
        upstream (see `error_sent`).

        Raises:
            BackendFailed: the body is incomplete.
        """

    @property
    def error_sent(self) -> bool:
        """Whether the stream ended with an error event of the upstream."""

    def usage(self) -> TokenUsage:
        """Return the tokens so far: as reported, or else one per event with output."""


class Upstream(WorkerHandle, Protocol):
    """Passes requests on to a server that speaks OpenAI's API."""

    @property
    def pause(self) -> UpstreamPause | None:
        """How long it must not be called; None if it may be called."""

    def forward(self, call: UpstreamCall) -> AbstractAsyncContextManager[Exchange]:
        """Pass a request on; leaving the context early cancels it at the upstream.

        Raises:
            UpstreamUnreachable: on entering: there was no answer.
        """
