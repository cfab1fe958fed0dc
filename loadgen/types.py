"""Values that the parts of the load generator exchange. Names end with the unit."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, overload, runtime_checkable

_REFUSALS: Final = frozenset({429, 503})
"""HTTP statuses by which a server refuses requests under load. A refusal is not a broken stream."""


@dataclass(frozen=True, slots=True)
class Slo:
    """The service-level objective of a request. A limit of None is not checked.

    Attributes:
        ttft_s: time to the first text, from the scheduled time.
        tpot_s: mean time per token after the first.
        latency_s: the deadline, the time to the end of the response from the scheduled time.
        chunk_gap_s: longest time between two chunks with text.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    latency_s: float | None = None
    chunk_gap_s: float | None = None

    @classmethod
    def of_ms(
        cls,
        ttft_ms: float | None,
        tpot_ms: float | None,
        latency_ms: float | None = None,
        chunk_gap_ms: float | None = None,
    ) -> Slo:
        """Return an SLO from limits in milliseconds.

        Raises:
            ValueError: a limit is not positive.
        """
        limits = (ttft_ms, tpot_ms, latency_ms, chunk_gap_ms)
        for limit in limits:
            if limit is not None and not limit > 0:
                raise ValueError(f"a latency limit must be positive, not {limit:g} ms")
        return cls(*(None if limit is None else limit / 1e3 for limit in limits))


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A chat message."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request to send: a completion, a chat completion or embeddings.

    Attributes:
        prompt: the text to continue, or None if `messages` or `inputs` are given.
        messages: the chat so far, empty if `prompt` is given.
        inputs: the texts to embed, empty for completions and chats.
        class_name: the workload's class of request, by which reports group.
        tenant: the tenant that sends the request.
        session: requests of one session share a prefix or are turns of one conversation.
        extra: further fields of the body, sent unchanged (temperature, speculation, ...).
        hop: the name of this request in its flow, empty for a flow of one request.
        flow_deadline_s: the deadline that a request of a flow announces, from the flow's first
            request to its last response. None announces neither flow nor deadline.
        flow_id: the announced name of the flow, which is unique and set when the flow is sent.
        facts: outcomes by name that a flow knows when it builds the request. Reports count these
            facts, and the client never sends them.
    """

    prompt: str | None
    messages: tuple[ChatMessage, ...]
    max_tokens: int
    seed: int
    class_name: str = "default"
    tenant: str = ""
    session: str = ""
    slo: Slo = Slo()
    n: int = 1
    extra: tuple[tuple[str, Any], ...] = ()
    inputs: tuple[str, ...] = ()
    hop: str = ""
    flow_deadline_s: float | None = None
    flow_id: str = ""
    facts: tuple[tuple[str, bool], ...] = ()

    @property
    def path(self) -> str:
        """The path of the endpoint."""
        if self.inputs:
            return "/v1/embeddings"
        return "/v1/chat/completions" if self.prompt is None else "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        """Return the body of the HTTP request."""
        if self.inputs:
            wanted = {"input": self.inputs, "encoding_format": "base64"}
            return {"model": model, **wanted, **dict(self.extra)}
        content_fields: dict[str, Any] = {"prompt": self.prompt}
        if self.prompt is None:
            content_fields = {
                "messages": [{"role": m.role, "content": m.content} for m in self.messages]
            }
        return {
            "model": model,
            **content_fields,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "n": self.n,
            "stream": True,
            "stream_options": {"include_usage": True},
            **dict(self.extra),
        }


@runtime_checkable
class Flow(Protocol):
    """Builds the requests of one user action, each from the earlier responses.

    A flow holds no state, so that the client can send a plan again.
    """

    def next(
        self, request: RequestSpec, answered: Sequence[Record], elapsed_s: float
    ) -> RequestSpec | None:
        """Return the next request, or None when the flow is complete.

        Args:
            request: the planned request, which states the user's question.
            answered: the records of the requests so far, in order, including failed requests.
            elapsed_s: seconds since the user sent the question.
        """
        ...


class Single:
    """A flow of one request, the planned request itself."""

    def next(
        self, request: RequestSpec, answered: Sequence[Record], elapsed_s: float
    ) -> RequestSpec | None:
        """Return the request once."""
        return None if answered else request


SINGLE: Final = Single()


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A user action in the plan. Most actions are one HTTP request.

    Attributes:
        index: its position in the plan, from 0.
        at_s: when to send it, in seconds from the start of the run. None in a closed loop, where a
            client sends its next request after the previous response.
        request: the user's question and SLO.
        flow: the builder of the HTTP requests for this action.
    """

    index: int
    at_s: float | None
    request: RequestSpec
    flow: Flow = SINGLE


class TextChunk(NamedTuple):
    """A chunk that carried content.

    Attributes:
        at_s: when the client read it, in seconds from the start of the run.
        tokens: the number of its tokens, if the server reports usage continuously.
        characters: the length of its text over all choices, 0 for embeddings.
    """

    at_s: float
    tokens: int | None
    characters: int


class ChunkColumns(Sequence[TextChunk]):
    """Chunks without text, created on access to use a tenth of the memory.

    A simulation has millions of chunks.

    Attributes:
        at_s: times of the chunks.
        tokens: their numbers of tokens.
    """

    __slots__ = ("at_s", "tokens")

    def __init__(self, at_s: array[float], tokens: array[int]) -> None:
        self.at_s, self.tokens = at_s, tokens

    def __len__(self) -> int:
        return len(self.at_s)

    @overload
    def __getitem__(self, place: int) -> TextChunk: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[TextChunk]: ...
    def __getitem__(self, place: int | slice) -> TextChunk | Sequence[TextChunk]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        return TextChunk(self.at_s[place], self.tokens[place], 0)


@dataclass(frozen=True, slots=True)
class Record:
    """The outcome of a planned request. All times are seconds from the start of the run.

    The record of a flow with several requests has the text of the last request and the first fault
    of any request. Its `hops` hold the record of each request.

    Attributes:
        scheduled_s: when the request was due, from which latencies count. In a closed loop this is
            when its client became free, and for a later hop when the previous hop ended.
        sent_s: when the client handed its first byte to the network.
        chunks: the chunks with content, in order.
        end_s: when the response ended.
        verdict: a `loadgen.checking.audit.Verdict`: `ok` or the first fault.
        detail: a description of the fault.
        texts, finish_reasons: one per choice.
        usage, metrics: as the server reported them, or None.
        status: the HTTP status, or None without a response.
        connect_s: time spent on opening a connection before sending, 0 if a connection was open.
        stream_id: the last id in the chunks, or empty.
        vectors: embeddings as little-endian float32, one per input, not kept in `hops`.
        empty_s: when chunks with empty text arrived. Only the metrics of other tools use them.
    """

    planned: PlannedRequest
    scheduled_s: float
    sent_s: float
    end_s: float
    verdict: str
    detail: str = ""
    chunks: Sequence[TextChunk] = ()
    texts: tuple[str, ...] = ()
    finish_reasons: tuple[str | None, ...] = ()
    usage: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    status: int | None = None
    connect_s: float = 0.0
    stream_id: str = ""
    vectors: tuple[bytes, ...] = ()
    hops: tuple[Record, ...] = ()
    empty_s: tuple[float, ...] = ()

    @property
    def http_records(self) -> tuple[Record, ...]:
        """The record of each HTTP request."""
        return self.hops or (self,)

    @property
    def refused(self) -> bool:
        """Whether the server refused the request under load."""
        return self.status in _REFUSALS


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """How well the load generator kept to its schedule.

    Attributes:
        max_lag_s, p99_lag_s: the delay between the scheduled and the actual sending of requests.
        cpu_share: CPU seconds of the process per second of the run.
        loop_stall_s: the longest time for which the event loop did not run.
        processes: the health of each of several processes, None for a process that died. The values
            above are then the worst over all processes.
    """

    max_lag_s: float
    p99_lag_s: float
    cpu_share: float
    loop_stall_s: float
    processes: tuple[ClientHealth | None, ...] = ()


@dataclass(slots=True)
class LoadRun:
    """The result of a run.

    Attributes:
        settings: the command's flags, and the model and version that the server reported.
        records: the records in the order in which the requests ended.
        duration_s: the time from the start to the end of the last request.
        scheduled_duration_s: the length of the schedule, or None in a closed loop.
        health: None if the run ended before its health was known.
        interrupted: whether the run stopped before it was complete.
        lost: a description of each sending process that died.
    """

    settings: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    duration_s: float = 0.0
    scheduled_duration_s: float | None = None
    health: ClientHealth | None = None
    interrupted: bool = False
    lost: Sequence[str] = ()
