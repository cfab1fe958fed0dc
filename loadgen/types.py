"""What the parts of the load generator hand each other. Pure values; units are in the names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request was promised; None promises nothing.

    Attributes:
        ttft_s: most seconds to the first text, from the scheduled instant.
        tpot_s: most mean seconds per token after the first.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    @classmethod
    def of_ms(cls, ttft_ms: float | None, tpot_ms: float | None) -> Slo:
        """Return what flags name in milliseconds."""
        return cls(
            None if ttft_ms is None else ttft_ms / 1e3, None if tpot_ms is None else tpot_ms / 1e3
        )


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask: a prompt for completions, or the messages of a chat.

    Attributes:
        prompt: the text to continue; None when `messages` are given.
        messages: the chat so far; empty when `prompt` is given.
        class_name: the workload's class of request, by which figures are grouped.
        tenant: whose request it is.
        session: requests of one session share a beginning, or follow each other as turns.
        slo: what was promised.
        extra: further fields of the request's body, as they are (temperature, speculation, ...).
    """

    prompt: str | None
    messages: tuple[Message, ...]
    max_tokens: int
    seed: int
    class_name: str = "default"
    tenant: str = ""
    session: str = ""
    slo: Slo = Slo()
    n: int = 1
    extra: tuple[tuple[str, Any], ...] = ()

    def body(self, model: str) -> dict[str, Any]:
        """Return the request's body."""
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


@dataclass(frozen=True, slots=True)
class Planned:
    """A request of the plan.

    Attributes:
        index: its place in the plan, from 0; unique.
        at_s: when it is to be sent, in seconds from the start of the run; None in a closed loop,
            where the next is sent when an answer is complete.
    """

    index: int
    at_s: float | None
    question: Question


@dataclass(frozen=True, slots=True)
class Arrived:
    """A chunk with content, as it came.

    Attributes:
        at_s: seconds from the start of the run.
        tokens: how many tokens it brought, if the server tells (continuous usage); else None.
        characters: of text, over all choices.
    """

    at_s: float
    tokens: int | None
    characters: int


@dataclass(frozen=True, slots=True)
class Record:
    """What became of one request. Instants are seconds from the start of the run.

    Attributes:
        scheduled_s: when it was meant to be sent: latencies count from here. In a closed loop, when
            its client turned to it.
        sent_s: when its first byte was handed to the network.
        chunks: the chunks with content, in order.
        end_s: when it was over.
        verdict: `loadgen.audit.Verdict` as text: `ok`, or the first thing that went wrong.
        detail: the fault in words.
        texts: text by choice.
        finish_reasons: by choice.
        usage, metrics: what the server reported, if it did.
        status: HTTP status, if there was an answer.
        connect_s: time spent on setting up a connection before sending; 0 if one stood.
        empty_s: when chunks came whose text was empty. No figure of ours counts them; other tools'
            do (`loadgen.dialects`).
    """

    planned: Planned
    scheduled_s: float
    sent_s: float
    end_s: float
    verdict: str
    detail: str = ""
    chunks: Sequence[Arrived] = ()
    texts: tuple[str, ...] = ()
    finish_reasons: tuple[str | None, ...] = ()
    usage: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    status: int | None = None
    connect_s: float = 0.0
    empty_s: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """How well the generator itself kept up.

    Attributes:
        max_lag_s, p99_lag_s: sending behind schedule.
        cpu_share: CPU seconds of this process per second of the run.
        loop_stall_s: longest time the event loop did not answer.
    """

    max_lag_s: float
    p99_lag_s: float
    cpu_share: float
    loop_stall_s: float


@dataclass(slots=True)
class Run:
    """Everything a run gave.

    Attributes:
        settings: the command's flags, and what was found out about the server (model, version).
        records: in order of their end.
        duration_s: from the start to the end of the last request.
        scheduled_duration_s: length of the schedule; None in a closed loop.
        interrupted: whether it was stopped before its plan was done.
    """

    settings: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    duration_s: float = 0.0
    scheduled_duration_s: float | None = None
    health: ClientHealth | None = None
    interrupted: bool = False
