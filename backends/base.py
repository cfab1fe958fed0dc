"""The contract between the gateway and whatever runs requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Final, NamedTuple, Protocol

from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, GenerationRequest, ModelCard, Pace
from draftgate.policies.types import WorkerLoad


class WorkerHandle(Protocol):
    """What a `Backend` and an `Upstream` have in common: a life, a load, and what they serve.

    All methods are called on the event loop's thread. Life: `start` once, any number of concurrent
    requests, `stop` once.
    """

    @property
    def card(self) -> ModelCard:
        """What is served. Valid after `start`."""
        ...

    @property
    def progress(self) -> float:
        """The share of loading that is done, 0 to 1. May be read at any time."""
        ...

    async def start(self) -> None:
        """Load and warm up; ready when it returns.

        Raises:
            CheckpointError: the model cannot be loaded.
        """
        ...

    async def stop(self) -> None:
        """Stop at once: open streams end with `BackendFailed`. Idempotent."""
        ...

    def load(self) -> WorkerLoad:
        """Return the current load. Costs no more than reading a few numbers."""
        ...

    @property
    def failure(self) -> str | None:
        """Why it serves nobody now, or None while it is well."""
        ...

    @property
    def recovers(self) -> bool:
        """Whether its failure may pass: it is asked in the background whether it is back."""
        ...


class Backend(WorkerHandle, Protocol):
    """Runs requests of token ids, on a device or as if."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Valid after `start`; its methods may be called in any thread."""
        ...

    def check(self, request: GenerationRequest) -> None:
        """Return if the request can run here; changes nothing. May be called in any thread.

        Of a grammar the first call takes long, and others after it do not.

        Raises:
            RequestRejected: it never can, e.g. it is longer than the context or the KV pool.
        """
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Run a request that passed `check`, yielding deltas of its choices as steps complete.

        It is not checked again: that takes 10 ms for half a million tokens (one core, Zen 4,
        2026-11-21), and this is called on the event loop's thread.

        Ends after every choice had its `finish_reason`. Closing the generator early cancels the
        request and frees its KV within one step.

        Raises:
            BackendFailed: the worker broke; no delta follows.
        """
        ...

    def set_pace(self, request_id: str, pace: Pace) -> None:
        """Change how far the worker goes on with a request, from one of its next steps on.

        No pace changes what is generated. Ids that are unknown, or have ended, are ignored.
        """
        ...

    def unread_tokens(self, request_id: str) -> int:
        """Return how many tokens were delivered that the reader of `generate` has not taken.

        0 for ids that are unknown, and where all tokens were delivered: nobody need slow down any
        more. Costs as much as there are deltas waiting.
        """
        ...


class UpstreamCall(NamedTuple):
    """A client's request as it is passed on.

    Attributes:
        path: with the query, e.g. `/v1/chat/completions`.
        headers: those that concern the upstream.
        sequences: that it takes there: its choices.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    sequences: int = 1


BYTES_PER_TOKEN: Final = 4
"""Of English text in JSON, roughly. Only estimates rest on it."""


class TokenUsage(NamedTuple):
    """Tokens of an answer, as its `usage` says.

    Attributes:
        cached: of the prompt's, those that were not computed anew.
    """

    prompt: int
    cached: int
    output: int


class Rest(NamedTuple):
    """An upstream must be left alone for a while.

    Attributes:
        remaining_s: how long; more than 0.
        status: what to tell clients meanwhile: 429 if it has too much to do, 503 if it is out.
    """

    remaining_s: float
    status: int
    reason: str


class Exchange(Protocol):
    """An upstream's answer, of which the head has come.

    Attributes:
        status: the HTTP status.
        headers: as they came, but for those that concern the connection or the encoding.
        streaming: whether it is a stream of events.
    """

    status: int
    headers: Mapping[str, str]
    streaming: bool

    @property
    def outputs(self) -> int:
        """Events of output that have passed so far; 0 where there are no events."""
        ...

    def blocks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it comes; of a stream of events only complete ones.

        What is not read stays with the upstream. A stream ends with `[DONE]`, or with an error
        event of the upstream (see `error_sent`), and nothing behind.

        Raises:
            BackendFailed: the body ended before it was complete.
        """
        ...

    @property
    def error_sent(self) -> bool:
        """Whether the stream ended with an error event of the upstream's own."""
        ...

    def usage(self) -> TokenUsage:
        """Return the tokens so far: what the answer says, else one for each event of output."""
        ...


class Upstream(WorkerHandle, Protocol):
    """Runs requests as they came, in a server of its own that speaks OpenAI's API."""

    @property
    def rest(self) -> Rest | None:
        """For how long it must not be called, or None when it may be."""
        ...

    def forward(self, call: UpstreamCall) -> AbstractAsyncContextManager[Exchange]:
        """Pass a request on; leaving the context early closes it at the upstream.

        Raises:
            UpstreamUnreachable: on entering: no answer came.
        """
        ...
