"""Values that the parts of the load generator exchange. Units are in the names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Slo:
    """The service-level objective of a request. None sets no limit.

    Attributes:
        ttft_s: time to the first text, from the scheduled instant.
        tpot_s: mean time per token after the first.
        latency_s: the deadline: time to the end of the answer, from the scheduled instant.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    latency_s: float | None = None

    @classmethod
    def of_ms(
        cls, ttft_ms: float | None, tpot_ms: float | None, latency_ms: float | None = None
    ) -> Slo:
        """Return an SLO from limits in milliseconds."""
        limits = (ttft_ms, tpot_ms, latency_ms)
        return cls(*(None if limit is None else limit / 1e3 for limit in limits))


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request to send: a completion, a chat completion or embeddings.

    Attributes:
        prompt: the text to continue; None when `messages` or `inputs` are given.
        messages: the chat so far; empty when `prompt` is given.
        inputs: the texts to embed; empty for completions and chats.
        class_name: the workload's class of request, by which reports group.
        tenant: the tenant that sends the request.
        session: requests of one session share a prefix or are turns of one conversation.
        extra: further fields of the body, sent as they are (temperature, speculation, ...).
        hop: the name of this request in its flow; empty for a flow of one request.
        facts: outcomes that a flow knows when it builds the request and reports count, by name.
            They are never sent.
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
        asked: dict[str, Any] = {"prompt": self.prompt}
        if self.prompt is None:
            asked = {"messages": [{"role": m.role, "content": m.content} for m in self.messages]}
        return {
            "model": model,
            **asked,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "n": self.n,
            "stream": True,
            "stream_options": {"include_usage": True},
            **dict(self.extra),
        }


@runtime_checkable
class Flow(Protocol):
    """Builds the requests that serve one user action, each from the answers before it.

    A flow holds no state, so that a plan can be sent again.
    """

    def next(
        self, request: RequestSpec, answered: Sequence[Record], elapsed_s: float
    ) -> RequestSpec | None:
        """Return the next request, or None when the flow is complete.

        Args:
            request: the planned request, which states what the user asks.
            answered: the records of the requests so far, in order, failed ones included.
            elapsed_s: seconds since the user asked.
        """
        ...


class Single:
    """The flow of one request: the planned request itself."""

    def next(
        self, request: RequestSpec, answered: Sequence[Record], elapsed_s: float
    ) -> RequestSpec | None:
        """Return the request once."""
        return None if answered else request


SINGLE: Final = Single()


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A user action in the plan. Most are one HTTP request.

    Attributes:
        index: its position in the plan, from 0.
        at_s: when to send it, in seconds from the start of the run. None in a closed loop, where a
            client sends its next request when it has an answer.
        request: what the user asks, and the user's SLO.
        flow: builds the HTTP requests that answer it.
    """

    index: int
    at_s: float | None
    request: RequestSpec
    flow: Flow = SINGLE


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A chunk that carried content.

    Attributes:
        at_s: when it was read, in seconds from the start of the run.
        tokens: how many tokens it carried, if the server reports usage continuously.
        characters: length of its text over all choices; 0 for embeddings.
    """

    at_s: float
    tokens: int | None
    characters: int


@dataclass(frozen=True, slots=True)
class Record:
    """The outcome of a planned request. Instants are seconds from the start of the run.

    For a flow of several requests the answer is that of the last one, the verdict is the first
    fault of any, and `hops` holds a record of each.

    Attributes:
        scheduled_s: when it was due; latencies count from here. In a closed loop, when its client
            became free; for a later hop, when the hop before it ended.
        sent_s: when its first byte was handed to the network.
        chunks: the chunks with content, in order.
        end_s: when the answer ended.
        verdict: a `loadgen.checking.audit.Verdict`: `ok` or the first fault.
        detail: the fault in words.
        texts, finish_reasons: one per choice.
        usage, metrics: what the server reported, if it did.
        status: the HTTP status, if there was an answer.
        connect_s: time spent on opening a connection before sending; 0 if one was open.
        stream_id: the last id that the chunks carried; empty if none did.
        vectors: embeddings as little-endian float32, one per input; not kept in `hops`.
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
        """One record per HTTP request."""
        return self.hops or (self,)


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """How well the load generator kept up with its schedule.

    Attributes:
        max_lag_s, p99_lag_s: how far requests were sent behind schedule.
        cpu_share: CPU seconds of the process per second of the run.
        loop_stall_s: longest time for which the event loop did not run.
        processes: with several processes, the health of each, None for one that died. The values
            above are then the worst of them.
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
        settings: the command's flags, and what the server reported (model, version).
        records: in order of their end.
        duration_s: from the start to the end of the last request.
        scheduled_duration_s: length of the schedule; None in a closed loop.
        health: None if the run ended before it was known.
        interrupted: whether the run stopped before its plan was complete.
        lost: a description of each sending process that died.
    """

    settings: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    duration_s: float = 0.0
    scheduled_duration_s: float | None = None
    health: ClientHealth | None = None
    interrupted: bool = False
    lost: Sequence[str] = ()
