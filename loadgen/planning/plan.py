"""Builds the requests of a load that the command line or a simulator describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, islice
from math import inf
from pathlib import Path
from typing import Any, Final

from draftgate.loadgen.planning.arrivals import parse_arrival
from draftgate.loadgen.planning.corpus import TextCorpus, open_corpus
from draftgate.loadgen.planning.traces import TraceRow, at_rate, scaled
from draftgate.loadgen.types import PlannedRequest, RequestSpec, Slo
from draftgate.loadgen.workloads import WORKLOADS, make_workload
from draftgate.loadgen.workloads.base import (
    Endpoint,
    TokenEstimator,
    WorkloadSettings,
    to_endpoint,
)
from draftgate.loadgen.workloads.rag import Rag
from draftgate.loadgen.workloads.rag_flow import RagOptions
from draftgate.loadgen.workloads.rag_search import Retriever
from draftgate.loadgen.workloads.replay import Replay

PROMPT: Final = "def fibonacci(n):"
PROMPT_MAX_TOKENS: Final = 64
REQUESTS: Final = 32
CONCURRENCY: Final = 4
ARRIVAL: Final = "poisson"

AHEAD: Final = 512
"""Requests built before a closed loop of unknown length starts. Building a request may read a
document, which stalls the event loop (185 ms on an AMD EPYC Zen 4, 2026-11-21). Building 512
requests takes 0.1 to 4 s and reads most documents."""


@dataclass(frozen=True, slots=True)
class Load:
    """What to send. A value of None means that the command line does not set it.

    Attributes:
        workload, trace, prompt: the source of the requests, at most one of the three. A workload is
            the name of a built-in workload or a file of requests.
        arrival, rate_rps: the arrival process and its mean rate. Without a process, a trace keeps
            its own arrivals, scaled to the mean rate if there is one.
        duration_s, requests: the end of the load, whichever is reached first.
        concurrency: the clients of a closed loop.
        time_scale: how many times faster than recorded to replay a trace.
        speculation: `MODE` or `MODE:K`, the requested mode and longest draft.
        endpoint: the endpoint, or None for the workload's own.
        rag: the options of the workload `rag`.
    """

    workload: str | None = None
    trace: Path | None = None
    prompt: str | None = None
    arrival: str | None = None
    rate_rps: float | None = None
    duration_s: float | None = None
    requests: int | None = None
    concurrency: int | None = None
    time_scale: float | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    speculation: str | None = None
    endpoint: Endpoint | None = None
    slo: Slo = field(default_factory=Slo)
    seed: int = 0
    text_file: Path | None = None
    rag: RagOptions = field(default_factory=RagOptions)

    def __post_init__(self) -> None:
        """Check the flags.

        Raises:
            ValueError: two flags exclude each other, or a flag is missing or malformed.
        """
        given = {name for name in self.__slots__ if getattr(self, name) is not None}
        if len(sources := sorted(given & {"workload", "trace", "prompt"})) > 1:
            flags = ", ".join(f"--{name}" for name in sources)
            raise ValueError(f"only one of these flags is allowed: {flags}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"{_flag(name)} must be positive, not {value}")
        if self.concurrency is not None and (open_loop := given & _OPEN_LOOP):
            raise ValueError(f"--concurrency (a closed loop) excludes {_flag(min(open_loop))}")
        if self.arrival is not None and self.rate_rps is None:
            raise ValueError("--arrival requires --rate")
        if self.time_scale is not None and (self.trace is None or self.rate_rps is not None):
            raise ValueError("--time-scale requires --trace, and excludes --rate")
        if self.rag != RagOptions() and self.workload != Rag.name:
            raise ValueError(f"flags of retrieval require --workload {Rag.name}")
        if self.rate_rps is not None:
            parse_arrival(self.arrival or ARRIVAL)
        self.extra()

    @property
    def clients(self) -> int | None:
        """The clients of a closed loop, or None for an open loop."""
        if self.rate_rps is not None or (self.trace is not None and self.concurrency is None):
            return None
        return self.concurrency or CONCURRENCY

    @property
    def longest(self) -> int | None:
        """The largest number of requests to plan, or None if the duration or the trace sets it."""
        if self.requests is None and self.duration_s is None and self.trace is None:
            return REQUESTS
        return self.requests

    def open_corpus(self) -> TextCorpus | None:
        """Return the corpus for prompts, or None if the prompts are given.

        Raises:
            OSError: the text file cannot be read.
            ValueError: the text file holds no text.
        """
        written = self.trace is not None or self.workload in WORKLOADS
        return open_corpus(self.text_file) if written else None

    def extra(self) -> tuple[tuple[str, Any], ...]:
        """Return the fields that the flags add to each request.

        Raises:
            ValueError: the speculation is malformed.
        """
        fields: list[tuple[str, Any]] = []
        if self.temperature is not None:
            fields.append(("temperature", self.temperature))
        if self.speculation is not None:
            mode, limited, drafts = self.speculation.partition(":")
            if not mode or (limited and not drafts.isdecimal()):
                raise ValueError(f"--speculation must be MODE or MODE:K, not {self.speculation!r}")
            wanted = {"mode": mode} | ({"max_draft_tokens": int(drafts)} if limited else {})
            fields.append(("speculation", wanted))
        return tuple(fields)


_OPEN_LOOP: Final = {"rate_rps", "arrival", "time_scale"}
_POSITIVE: Final = ("rate_rps", "duration_s", "requests", "concurrency", "time_scale", "max_tokens")


@dataclass(frozen=True, slots=True)
class PlanPart:
    """The part of a plan that process `index` (from 0) of `of` processes sends.

    A part of an open loop has every `of`-th request. A part of a closed loop has every `of`-th
    client, where clients take requests in turn. The parts together are the plan, for any `of`.
    """

    index: int = 0
    of: int = 1

    def takes(self, position: int) -> bool:
        """Whether the request, or the client, at a position from 0 belongs to this part."""
        return position % self.of == self.index


WHOLE: Final = PlanPart()


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests and their schedule. `schedule_s` and `total` cover all parts together.

    Attributes:
        requests: built in advance, unless built lazily. If only a duration ends a closed loop, the
            requests are endless, and those beyond `AHEAD` are built when needed.
        concurrency: the clients of a closed loop, or None for an open loop.
        schedule_s: the length of an open loop's schedule. This is its duration or, for a limited
            number of requests, the time at which the next request would be due. Requests over
            `schedule_s` is then the offered rate, without the bias of counting N requests over
            N - 1 intervals. For a complete trace the length ends with its last request.
        total: the number of requests, or None if only a duration ends them.
    """

    requests: Iterable[PlannedRequest]
    concurrency: int | None
    schedule_s: float | None
    total: int | None


def make_plan(
    load: Load,
    *,
    rows: Sequence[TraceRow] = (),
    counter: TokenEstimator | None = None,
    max_model_len: int | None = None,
    retriever: Retriever | None = None,
    lazily: bool = False,
    part: PlanPart = WHOLE,
) -> Plan:
    """Return the requests of a load. The same arguments give the same requests.

    Args:
        rows: the rows of the trace to replay, if any.
        counter: the estimator for the lengths of prompts.
        max_model_len: the server's context in tokens, if known.
        retriever: finds passages for `rag`. Without a retriever each prompt holds its passages.
        lazily: build each request when it is taken. Simulations set this, because their clock waits
            and all texts together may exceed memory.
        part: the part to build, if several processes send the plan.

    Raises:
        OSError: a file cannot be read.
        ValueError: the workload is unknown, its text or the trace is empty, or a closed loop has
            fewer clients than parts.
    """
    if load.trace is not None and not rows:
        raise ValueError(f"{load.trace} has no requests")
    if load.trace is not None and load.clients is None:
        if load.rate_rps is not None and load.arrival is None:
            rows = at_rate(rows, load.rate_rps)
        elif load.rate_rps is None:
            rows = scaled(rows, load.time_scale or 1.0)
    settings = WorkloadSettings(
        load.seed,
        counter or TokenEstimator(),
        open_corpus(load.text_file),
        load.max_tokens,
        max_model_len,
        load.slo,
    )
    planned = _planner(load, rows, settings, retriever)
    if (clients := load.clients) is not None:
        if clients < part.of:
            raise ValueError(f"{clients} clients cannot be divided among {part.of} processes")
        total = load.longest
        if load.trace is not None:
            total = len(rows) if total is None else min(total, len(rows))
        positions = count() if total is None else range(total)
        requests = (planned(i, None) for i in positions if part.takes(i % clients))
        made = [] if lazily else list(islice(requests, AHEAD if total is None else total))
        return Plan(chain(made, requests), sum(map(part.takes, range(clients))), None, total)
    instants, schedule_s = _schedule(load, rows)
    scheduled = (planned(i, at_s) for i, at_s in enumerate(instants) if part.takes(i))
    return Plan(scheduled if lazily else list(scheduled), None, schedule_s, len(instants))


def _schedule(load: Load, rows: Sequence[TraceRow]) -> tuple[list[float], float]:
    """Return the times of an open loop, and the length of its schedule."""
    if load.trace is not None and load.arrival is None:
        source = iter([row.at_s for row in rows])
    else:
        assert load.rate_rps is not None
        source = iter(parse_arrival(load.arrival or ARRIVAL)(load.rate_rps, load.seed))
        if load.trace is not None:
            source = islice(source, len(rows))
    instants = list[float]()
    for at_s in source:
        if load.duration_s is not None and at_s >= load.duration_s:
            return instants, load.duration_s
        if len(instants) == load.longest:
            return instants, at_s
        instants.append(at_s)
    return instants, instants[-1]


def _planner(
    load: Load, rows: Sequence[TraceRow], settings: WorkloadSettings, retriever: Retriever | None
) -> Callable[[int, float | None], PlannedRequest]:
    """Return a function that builds the planned request of a position and a time."""
    if load.trace is not None:
        build = Replay(rows, settings).request
    elif load.workload is not None:
        workload = make_workload(load.workload, settings)
        if retriever is not None and isinstance(workload, Rag):
            planned = partial(workload.planned, retriever=retriever, options=load.rag)
            return _with_flags(load, planned)
        build = workload.request
    else:
        prompt, max_tokens = load.prompt or PROMPT, load.max_tokens or PROMPT_MAX_TOKENS

        def build(index: int) -> RequestSpec:
            return settings.spec("default", index, max_tokens, prompt)

    return _with_flags(load, lambda index, at_s: PlannedRequest(index, at_s, build(index)))


def _with_flags(
    load: Load, plan: Callable[[int, float | None], PlannedRequest]
) -> Callable[[int, float | None], PlannedRequest]:
    """Apply the flags' endpoint and fields to each planned request."""
    extra = load.extra()

    def planned(index: int, at_s: float | None) -> PlannedRequest:
        one = plan(index, at_s)
        request = one.request
        if load.endpoint is not None:
            request = to_endpoint(request, load.endpoint)
        return replace(one, request=replace(request, extra=(*request.extra, *extra)))

    return planned


def _flag(name: str) -> str:
    return "--" + name.removesuffix("_rps").removesuffix("_s").replace("_", "-")
