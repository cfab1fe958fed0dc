"""What a command asks for, and the requests that follow from it. Pure: simulators use it, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, islice
from math import inf
from pathlib import Path
from typing import Any, Final

from draftgate.loadgen.planning.arrivals import parse_arrival
from draftgate.loadgen.planning.traces import TraceRow, at_rate, scaled
from draftgate.loadgen.types import PlannedRequest, RequestSpec, Slo
from draftgate.loadgen.workloads import (
    ApproximateCounter,
    Endpoint,
    Rag,
    Retriever,
    TokenCounter,
    make_workload,
    replay,
    through,
)

PROMPT: Final = "def fibonacci(n):"
PROMPT_MAX_TOKENS: Final = 64
REQUESTS: Final = 32
CONCURRENCY: Final = 4
ARRIVAL: Final = "poisson"

AHEAD: Final = 512
"""Requests made before a closed loop of unknown length starts. Making one may read a document,
which stalls the loop (185 ms were seen on an AMD EPYC Zen 4, 2026-11-21); 512 take 0.1 to 4 s, and
after them most documents are read."""


@dataclass(frozen=True, slots=True)
class Load:
    """What to send, in the words of the command line; None is what was not said.

    Attributes:
        workload, trace, prompt: what to ask, by one of them.
        arrival, rate_rps: the process by which requests come; of a trace, its mean rate.
        duration_s, requests: where to end; the first one reached.
        concurrency: of a closed loop.
        time_scale: how many times faster than recorded a trace is replayed.
        speculation: `MODE` or `MODE:K`, the request's mode and longest draft.
        endpoint: where to ask; None is the workload's own.
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

    def __post_init__(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            ValueError: two flags exclude each other, one needs another, or one cannot be read.
        """
        said = {name for name in self.__slots__ if getattr(self, name) is not None}
        if len(both := sorted(said & {"workload", "trace", "prompt"})) > 1:
            raise ValueError(f"what to ask is said twice: {', '.join(both)}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"{_flag(name)} must be positive, not {value}")
        if self.concurrency is not None and (open_loop := said & _OPEN):
            raise ValueError(f"a closed loop (concurrency) has no {_flag(min(open_loop))}")
        if self.arrival is not None and (self.rate_rps is None or self.trace is not None):
            raise ValueError("arrival needs a rate, and a trace has its own arrivals")
        if self.time_scale is not None and (self.trace is None or self.rate_rps is not None):
            raise ValueError("time-scale is for a trace, and its rate says the same otherwise")
        if self.rate_rps is not None and self.trace is None:
            parse_arrival(self.arrival or ARRIVAL)
        self.extra()

    @property
    def clients(self) -> int | None:
        """How many clients a closed loop has; None is an open loop."""
        if self.rate_rps is not None or (self.trace is not None and self.concurrency is None):
            return None
        return self.concurrency or CONCURRENCY

    @property
    def longest(self) -> int | None:
        """Most requests to plan; None leaves it to the duration, or to the trace."""
        if self.requests is None and self.duration_s is None and self.trace is None:
            return REQUESTS
        return self.requests

    def extra(self) -> tuple[tuple[str, Any], ...]:
        """Return the fields of requests that the flags set beside the workload's.

        Raises:
            ValueError: the speculation cannot be read.
        """
        fields: list[tuple[str, Any]] = []
        if self.temperature is not None:
            fields.append(("temperature", self.temperature))
        if self.speculation is not None:
            mode, limited, drafts = self.speculation.partition(":")
            if not mode or (limited and not drafts.isdecimal()):
                raise ValueError(f"speculation is MODE or MODE:K, not {self.speculation!r}")
            wanted = {"mode": mode} | ({"max_draft_tokens": int(drafts)} if limited else {})
            fields.append(("speculation", wanted))
        return tuple(fields)


_OPEN: Final = {"rate_rps", "arrival", "time_scale"}
_POSITIVE: Final = ("rate_rps", "duration_s", "requests", "concurrency", "time_scale", "max_tokens")


@dataclass(frozen=True, slots=True)
class Part:
    """What one of several processes sends of a plan: of `of` equal parts the `index`-th, from 0.

    Of an open loop these are the requests at every `of`-th place, of a closed one those of every
    `of`-th client, if clients took requests by turns. So the parts of a plan are the plan, whatever
    their number.
    """

    index: int = 0
    of: int = 1

    def takes(self, place: int) -> bool:
        """Whether the request, or the client, at a place from 0 is of this part."""
        return place % self.of == self.index


WHOLE: Final = Part()


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests, and how to send them. `schedule_s` and `total` are of all parts together.

    Attributes:
        requests: made beforehand, if not asked for lazily; without end, and made as they are needed
            beyond `AHEAD`, if only the duration of a closed loop ends them.
        concurrency: clients of a closed loop; None is an open one.
        schedule_s: how long an open loop's schedule is: the duration, or if the number of requests
            ends it, to the instant at which the next one would have come. So requests over
            `schedule_s` is the offered rate, without the bias of counting N requests over N - 1
            intervals. Of a trace that ended it is the instant of its last request.
        total: how many requests; None if only a duration ends them.
    """

    requests: Iterable[PlannedRequest]
    concurrency: int | None
    schedule_s: float | None
    total: int | None


def make_plan(
    load: Load,
    *,
    rows: Sequence[TraceRow] = (),
    counter: TokenCounter | None = None,
    max_model_len: int | None = None,
    retriever: Retriever | None = None,
    lazily: bool = False,
    part: Part = WHOLE,
) -> Plan:
    """Return the requests of a load; the same for the same arguments.

    Args:
        rows: of the trace, if one is replayed.
        counter: measures prompts.
        max_model_len: what the server holds, if that is known.
        retriever: finds passages for `rag`; without it each question has them at hand.
        lazily: make each question as it is taken: for simulations, whose clock waits, and whose
            texts together may be more than memory holds.
        part: of the plan, if several processes send it; only its questions are made.

    Raises:
        OSError: the text file cannot be read.
        ValueError: there is no such workload, no text, or the trace is empty; or a closed loop has
            fewer clients than parts.
    """
    if load.trace is not None and not rows:
        raise ValueError(f"{load.trace} has no requests")
    rows = _sped(rows, load)
    planned = _planner(load, rows, counter or ApproximateCounter(), max_model_len, retriever)
    if (clients := load.clients) is not None:
        if clients < part.of:
            raise ValueError(f"{clients} clients cannot be divided among {part.of} processes")
        total = load.longest
        if load.trace is not None:
            total = len(rows) if total is None else min(total, len(rows))
        places = count() if total is None else range(total)
        asked = (planned(i, None) for i in places if part.takes(i % clients))
        made = [] if lazily else list(islice(asked, AHEAD if total is None else total))
        return Plan(chain(made, asked), sum(map(part.takes, range(clients))), None, total)
    instants, schedule_s = _schedule(load, rows)
    scheduled = (planned(i, at_s) for i, at_s in enumerate(instants) if part.takes(i))
    return Plan(scheduled if lazily else list(scheduled), None, schedule_s, len(instants))


def _schedule(load: Load, rows: Sequence[TraceRow]) -> tuple[list[float], float]:
    """Return the instants of an open loop, and the length of its schedule."""
    if load.trace is not None:
        source = iter([row.at_s for row in rows])
    else:
        assert load.rate_rps is not None
        source = iter(parse_arrival(load.arrival or ARRIVAL).instants(load.rate_rps, load.seed))
    instants = list[float]()
    for at_s in source:
        if load.duration_s is not None and at_s >= load.duration_s:
            return instants, load.duration_s
        if len(instants) == load.longest:
            return instants, at_s
        instants.append(at_s)
    return instants, instants[-1]


def _sped(rows: Sequence[TraceRow], load: Load) -> Sequence[TraceRow]:
    if load.trace is None or load.clients is not None:
        return rows
    if load.rate_rps is not None:
        return at_rate(rows, load.rate_rps)
    return scaled(rows, load.time_scale or 1.0)


def _planner(
    load: Load,
    rows: Sequence[TraceRow],
    counter: TokenCounter,
    max_model_len: int | None,
    retriever: Retriever | None,
) -> Callable[[int, float | None], PlannedRequest]:
    """Return what to ask, by its place in the plan and its instant."""
    if load.workload is None and load.trace is None:
        asked = _plain(_prompts(load))
    else:
        given: Any = {
            "seed": load.seed,
            "counter": counter,
            "max_tokens": load.max_tokens,
            "max_model_len": max_model_len,
            "slo": load.slo,
            "text_file": load.text_file,
        }
        made = (
            replay(rows, **given)
            if load.workload is None
            else make_workload(load.workload, **given)
        )
        if retriever is not None and isinstance(made, Rag):
            asked = partial(made.planned, retriever=retriever)
        else:
            asked = _plain(made.request)
    extra = load.extra()

    def planned(index: int, at_s: float | None) -> PlannedRequest:
        plain = asked(index, at_s)
        question = plain.request
        wanted = question if load.endpoint is None else through(question, load.endpoint)
        return replace(plain, request=replace(wanted, extra=(*wanted.extra, *extra)))

    return planned


def _plain(question: Callable[[int], RequestSpec]) -> Callable[[int, float | None], PlannedRequest]:
    return lambda index, at_s: PlannedRequest(index, at_s, question(index))


def _prompts(load: Load) -> Callable[[int], RequestSpec]:
    prompt, max_tokens = load.prompt or PROMPT, load.max_tokens or PROMPT_MAX_TOKENS

    def question(index: int) -> RequestSpec:
        return RequestSpec(prompt, (), max_tokens, load.seed + index, slo=load.slo)

    return question


def _flag(name: str) -> str:
    return name.removesuffix("_rps").removesuffix("_s").replace("_", "-")
