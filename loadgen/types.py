"""What the parts of the load generator hand each other. Pure values; units are in the names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request was promised; None promises nothing.

    Attributes:
        ttft_s: most seconds to the first text, from the scheduled instant.
        tpot_s: most mean seconds per token after the first.
        latency_s: most seconds to the end of the answer, from the scheduled instant: the deadline.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    latency_s: float | None = None

    @classmethod
    def of_ms(
        cls, ttft_ms: float | None, tpot_ms: float | None, latency_ms: float | None = None
    ) -> Slo:
        """Return what flags name in milliseconds."""
        limits = (ttft_ms, tpot_ms, latency_ms)
        return cls(*(None if limit is None else limit / 1e3 for limit in limits))


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What to ask: a prompt for completions, the messages of a chat, or vectors of texts.

    Attributes:
        prompt: the text to continue; None when `messages` or `inputs` are given.
        messages: the chat so far; empty when `prompt` is given.
        inputs: the texts of which embeddings are wanted; empty where an answer is.
        class_name: the workload's class of request, by which figures are grouped.
        tenant: whose request it is.
        session: requests of one session share a beginning, or follow each other as turns.
        slo: what was promised.
        extra: further fields of the request's body, as they are (temperature, speculation, ...).
        hop: which request of a flow it is; empty where it is the only one.
        facts: what its flow knows when it asks and reports count, by name; never sent.
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
        """The endpoint's."""
        if self.inputs:
            return "/v1/embeddings"
        return "/v1/chat/completions" if self.prompt is None else "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        """Return the request's body."""
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
    """How a question is answered: by one request after the other, made of the answers so far.

    Holds no state, so that a plan can be sent again.
    """

    def next(
        self, question: RequestSpec, answered: Sequence[Record], elapsed_s: float
    ) -> RequestSpec | None:
        """Return the next request; None if there is none.

        Args:
            question: of the plan: what the user asks.
            answered: what became of the requests so far, in order; failed ones, too.
            elapsed_s: since the instant at which the user asked.
        """
        ...


class Single:
    """The plain flow: the question is the request."""

    def next(
        self, question: RequestSpec, answered: Sequence[Record], elapsed_s: float
    ) -> RequestSpec | None:
        """Return the question, once."""
        return None if answered else question


SINGLE: Final = Single()


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A user's question in the plan; most are one request, the question itself.

    Attributes:
        index: its place in the plan, from 0; unique.
        at_s: when it is to be sent, in seconds from the start of the run; None in a closed loop,
            where the next is sent when an answer is complete.
        request: what is asked, and what the user was promised.
        flow: the requests that answer it.
    """

    index: int
    at_s: float | None
    request: RequestSpec
    flow: Flow = SINGLE


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A chunk with content, as it came.

    Attributes:
        at_s: seconds from the start of the run.
        tokens: how many tokens it brought, if the server tells (continuous usage); else None.
        characters: of text, over all choices; of vectors 0.
    """

    at_s: float
    tokens: int | None
    characters: int


@dataclass(frozen=True, slots=True)
class Record:
    """What became of a user's question. Instants are seconds from the start of the run.

    Where it took several requests, the answer is that of the last one, the verdict the first fault
    of any, and `hops` are the records of them all: what became of each by itself.

    Attributes:
        scheduled_s: when it was meant to be sent: latencies count from here. In a closed loop, when
            its client turned to it; of a later hop, when the one before it was over.
        sent_s: when its first byte was handed to the network.
        chunks: the chunks with content, in order.
        end_s: when it was over.
        verdict: `loadgen.checking.audit.Verdict` as text: `ok`, or the first thing that went wrong.
        detail: the fault in words.
        texts: text by choice.
        finish_reasons: by choice.
        usage, metrics: what the server reported, if it did.
        status: HTTP status, if there was an answer.
        connect_s: time spent on setting up a connection before sending; 0 if one stood.
        stream_id: the id that the chunks carried last; empty if none did.
        vectors: embeddings, as little-endian float32, one for each input; not kept in `hops`.
        empty_s: when chunks came whose text was empty. No figure of ours counts them; other tools'
            do (`loadgen.other_tools`).
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
    def requests(self) -> tuple[Record, ...]:
        """The records of all requests it took."""
        return self.hops or (self,)


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """How well the generator itself kept up.

    Attributes:
        max_lag_s, p99_lag_s: sending behind schedule.
        cpu_share: CPU seconds of this process per second of the run.
        loop_stall_s: longest time the event loop did not answer.
        processes: of a generator of several, each one's own; None of one that died. Each figure
            above is then the worst of them.
    """

    max_lag_s: float
    p99_lag_s: float
    cpu_share: float
    loop_stall_s: float
    processes: tuple[ClientHealth | None, ...] = ()


@dataclass(slots=True)
class LoadRun:
    """Everything a run gave.

    Attributes:
        settings: the command's flags, and what was found out about the server (model, version).
        records: in order of their end.
        duration_s: from the start to the end of the last request.
        scheduled_duration_s: length of the schedule; None in a closed loop.
        interrupted: whether it was stopped before its plan was done.
        lost: of a generator of several processes, those that died, in words.
    """

    settings: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    duration_s: float = 0.0
    scheduled_duration_s: float | None = None
    health: ClientHealth | None = None
    interrupted: bool = False
    lost: Sequence[str] = ()
