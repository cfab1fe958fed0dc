"""The interfaces between the gateway and the backends that run its requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple, Protocol

from draftgate.backends.kv_transfer.exchange import BlockCount
from draftgate.backends.kv_transfer.format import KvChunk
from draftgate.backends.prompt_blocks import PromptBlocks
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import (
    Delta,
    GenerationRequest,
    ModelCard,
    Pace,
    SpeculationOutcome,
)
from draftgate.policies.routing.types import CachedPrefix
from draftgate.policies.types import WorkerLoad


class WorkerHandle(Protocol):
    """The interface that `Backend` and `Upstream` share.

    The gateway calls `start` once, then runs any number of concurrent requests, and calls `stop` at
    the end. It calls all methods on the event loop's thread.
    """

    @property
    def card(self) -> ModelCard:
        """The model that the worker serves. The value is valid after `start`."""

    @property
    def progress(self) -> float:
        """The completed share of loading, 0 to 1. The value is valid at any time."""

    async def start(self) -> None:
        """Load and warm up. The worker is ready when this method returns.

        Raises:
            CheckpointError: the model cannot be loaded.
        """

    async def stop(self) -> None:
        """Stop immediately. Open streams end with `BackendFailed`. The call is idempotent."""

    def load(self) -> WorkerLoad:
        """Return the current load, at the cost of reading a few numbers."""

    @property
    def failure(self) -> str | None:
        """The reason for which the worker serves no requests now, or None."""

    @property
    def recovers(self) -> bool:
        """Whether a failed worker checks in the background if it can run again."""


class DeltaSink(Protocol):
    """What takes the deltas of a request, on the event loop's thread.

    A worker does not wait for a sink. The gateway slows a request down with its pace.
    """

    def put(self, delta: Delta) -> None:
        """Take a delta. If the method raises an error, the request is cancelled."""

    def fail(self, error: Exception) -> None:
        """End with an error, usually `BackendFailed`. No delta follows."""


class Backend(WorkerHandle, Protocol):
    """Runs requests of token ids, on a real or simulated device."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. The value is valid after `start`."""

    def check(self, request: GenerationRequest) -> None:
        """Check that the worker can run the request. The method may be called in any thread.

        The first check of a grammar takes long, because it compiles the grammar.

        Raises:
            RequestRejected: the worker can never run the request, for example because it is longer
                than the context.
        """

    def submit(self, request: GenerationRequest, sink: DeltaSink) -> None:
        """Run a request that passed `check`, and put the deltas of its choices into a sink.

        The method does not check the request again, because a check of half a million tokens takes
        10 ms of the event loop (one core, Zen 4, 2026-11-21).

        The request ends after the `finish_reason` of the last choice, or with an error.

        Raises:
            BackendFailed: the worker has failed.
        """

    def cancel(self, request_id: str) -> None:
        """Cancel a request, which frees its KV memory within one step.

        Its sink gets nothing more. The method ignores unknown ids and requests that have ended.
        """

    def set_pace(self, request_id: str, pace: Pace, tpot_s: float = 0.0) -> None:
        """Set the pace of a request, which takes effect within the next steps.

        The pace does not change the output. The method ignores unknown ids and requests that have
        ended.

        Args:
            tpot_s: seconds in which the client of a sparing request can take one token of each
                choice, or 0 if unknown.
        """


class KvEndpoint(Protocol):
    """A worker that exchanges KV blocks with other workers of its format.

    A backend with a `ModelCard.kv_format` also implements this protocol. All methods raise
    `BackendFailed` if the worker has failed.
    """

    async def held_blocks(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of a hash chain the worker holds."""

    def pull_blocks(
        self, hashes: Sequence[bytes], *, urgent: bool = False
    ) -> AsyncGenerator[KvChunk, None]:
        """Yield the blocks of a part of a hash chain, up to the first that the worker lacks.

        The worker copies a block when its turn comes, and keeps no block for the caller. Closing
        the generator ends the transfer.

        Args:
            urgent: whether the copies may delay sequences noticeably.
        """

    async def begin_import(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of a hash chain the worker holds.

        The worker keeps them while the rest of the chain arrives, for a bounded time.
        """

    def adopt_blocks(
        self, chunk: KvChunk, parent: bytes, *, urgent: bool = False
    ) -> Awaitable[BlockCount]:
        """Begin to store the blocks of a chunk in the prefix cache, and hold them for a request.

        The worker takes only memory that no sequence and no other import uses.

        Args:
            parent: hash before those of the chunk, or empty.
            urgent: as for `pull_blocks`.

        Returns:
            The leading blocks of the chunk that the worker holds now.
        """


class CallTranslation(Protocol):
    """A request in the form for upstreams that do not have its endpoint.

    Attributes:
        path: the path of the other endpoint.
    """

    path: ClassVar[str]

    def is_missing(self, status: int, body: bytes) -> bool:
        """Return whether a response means that an upstream does not have the endpoint."""

    async def translate(self, model: str, *, continuous_usage: bool) -> bytes:
        """Return the body for the other endpoint.

        Args:
            model: the upstream's name of the model.
            continuous_usage: whether the upstream can report the usage in each chunk of a stream.
        """

    def convert(self, body: bytes) -> bytes:
        """Return the whole response for the client.

        Raises:
            Exception: the upstream's response has another form.
        """

    def read_events(self, events: bytes) -> bytes:
        """Return the client's events for complete events of the upstream, possibly none.

        Raises:
            Exception: an event has another form, or is an error.
        """

    def end_events(self) -> bytes:
        """Return the events after those of a complete stream."""

    def name_param(self, param: str) -> str:
        """Return the client's name of a parameter of the other endpoint."""


class UpstreamCall(NamedTuple):
    """A client's request in the form that an upstream receives.

    Attributes:
        path: path with the query, such as `/v1/chat/completions`.
        headers: its headers without its id. Most requests of a client have equal headers.
        sequences: number of choices that it generates.
        request_id: the id that the upstream gets, or empty for none.
        model: the name of the model in the body, or an empty string without one.
        renamed: the body with each other name that an upstream has for the model, by this name.
        translation: the form for upstreams without the endpoint, or None if there is no other form.
        rewrite: changes the body for its phase, after its model and form have been chosen, or None
            to send it unchanged (`draftgate.backends.openai.kv_transfer_params`).
        stream: whether the client has asked for a stream of events.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    sequences: int = 1
    request_id: str = ""
    model: str = ""
    renamed: Mapping[str, bytes] = MappingProxyType({})
    translation: CallTranslation | None = None
    rewrite: Callable[[bytes], bytes] | None = None
    stream: bool = False


BYTES_PER_TOKEN: Final = 4
"""Approximate bytes of a token in English text in JSON, for estimates only."""


class TokenUsage(NamedTuple):
    """The token counts of a response, as in OpenAI's `usage`.

    Attributes:
        cached: number of prompt tokens that were not computed again.
    """

    prompt: int
    cached: int
    output: int


DENIED: Final = frozenset({401, 403, 407})
"""Statuses about the key of the gateway. The upstream does not get the key of the client, which
would take the status for a verdict on its own key."""


class UpstreamPause(NamedTuple):
    """A time during which the gateway must not call an upstream.

    Attributes:
        remaining_s: remaining seconds, more than 0.
        status: HTTP status for clients meanwhile: 429 if the upstream is overloaded, 503 if it is
            out.
        denied: the status with which the upstream denied access to this gateway, or 0.
        late: whether the upstream has not responded in time to its latest requests.
    """

    remaining_s: float
    status: int
    reason: str
    denied: int = 0
    late: bool = False


class Exchange(Protocol):
    """An upstream's response, of which the first bytes have arrived.

    The caller ends it with `finish` or `close`.

    Attributes:
        status: HTTP status.
        headers: HTTP headers, except those of the connection and the encoding.
        streaming: whether the response is a stream of events.
        body: the whole body if it has arrived, or None. `read` must be called if it is None.
    """

    status: int
    headers: Mapping[str, str]
    streaming: bool
    body: bytes | None

    @property
    def translation(self) -> CallTranslation | None:
        """`UpstreamCall.translation` if the upstream got it, or None.

        Streams then have the client's events, and the caller converts a whole response.
        """

    @property
    def outputs(self) -> int:
        """Number of events with output so far, or 0 without a stream."""

    async def read(self) -> bytes:
        """Return the next bytes of the body as they arrive, or nothing at its end.

        A stream is returned in complete events. Unread parts stay at the upstream. Nothing follows
        `[DONE]` or an error event of the upstream (see `error_sent`).

        Raises:
            BackendFailed: the body is incomplete.
        """

    @property
    def error_sent(self) -> bool:
        """Whether the stream ended with an error event of the upstream."""

    def usage(self) -> TokenUsage:
        """Return the reported token counts, or else count one token per event with output."""

    def drafts(self) -> SpeculationOutcome | None:
        """Return the drafts that the upstream reports about the request so far, or None."""

    async def finish(self) -> None:
        """End a response of which everything has been read."""

    def close(self) -> None:
        """Cancel the response at the upstream, unless it has ended. The call is idempotent."""


class Upstream(WorkerHandle, Protocol):
    """Forwards requests to a server with OpenAI's API."""

    @property
    def pause(self) -> UpstreamPause | None:
        """The pause of the upstream, or None if the gateway may call it."""

    @property
    def models(self) -> Mapping[str, Mapping[str, Any]] | None:
        """Descriptions of its models, as in `/v1/models`, by name, or None while unknown."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of its models, with the name that it has for each of them."""

    def serves(self, model: str) -> bool:
        """Return whether it has a model of this name, as far as is known."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of its models, or None if it is not configured."""

    def cached(self, prompt: PromptBlocks, model: str) -> CachedPrefix | None:
        """Return what it has cached of a prompt by its events, or None if that is not known.

        Args:
            model: the name by which the client calls the model.
        """

    def may_abort(self, call: UpstreamCall) -> bool:
        """Return whether the gateway may abort a call for another one, which then has capacity."""

    def await_start(self, seconds: float, on_start: Callable[[], None]) -> None:
        """Probe it often for some time although it is out, and call a function once it responds."""

    async def forward(self, call: UpstreamCall) -> Exchange:
        """Forward a request, and return the response, which the caller ends.

        Raises:
            UpstreamUnreachable: the upstream sent no response.
        """
