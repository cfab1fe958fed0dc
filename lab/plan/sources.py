"""The requests of a plan, at any rate, from a trace or a workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from draftgate.gateway.dispatch.job import Job
from draftgate.lab.planning.histogram import PlannedLength
from draftgate.lab.simulate.conversion import job_of
from draftgate.lab.simulate.trace_load import Drawn, Recorded
from draftgate.loadgen.planning.arrivals import parse_arrival
from draftgate.loadgen.planning.plan import Load, make_plan
from draftgate.loadgen.planning.traces import TraceRow, read_trace
from draftgate.loadgen.types import PlannedRequest, Slo

SAMPLE: Final = 2000
"""Requests from which lengths are estimated. The mean of ShareGPT's outputs, with a coefficient of
variation of 0.9, is then within 4% (95% confidence)."""

_RECORDED: Final = "recorded"
"""The arrivals of a trace as recorded, scaled to the rate."""


class Requests(NamedTuple):
    """Planned requests in order, and the function that converts them to jobs."""

    planned: Iterable[PlannedRequest]
    to_job: Callable[[PlannedRequest], Job]

    def kept(self) -> Requests:
        """Return the requests in a form that several simulations can use."""
        return self._replace(planned=tuple(self.planned))

    def lengths(self) -> list[PlannedLength]:
        """Return the lengths of the requests."""
        return [
            PlannedLength(
                one.at_s or 0.0,
                len(self.to_job(one).prompts[0]),
                one.request.max_tokens,
                one.request.class_name,
            )
            for one in self.planned
        ]


class Source(Protocol):
    """Requests with targets, at any rate."""

    def requests(self, rate_rps: float, seed: int, count: int) -> Requests:
        """Return requests that arrive at a mean rate.

        Raises:
            ValueError: the source has too few requests.
        """
        ...


@dataclass(frozen=True, slots=True)
class TraceSource:
    """Requests with lengths from a trace in random order, and the same targets for all.

    Arrivals are Poisson.
    """

    rows: Sequence[TraceRow]
    slo: Slo

    def requests(self, rate_rps: float, seed: int, count: int) -> Requests:
        """See `Source`."""
        drawn = Drawn.from_rows(self.rows, count, seed)
        return Requests(drawn.planned(rate_rps, self.slo), drawn.job)


@dataclass(frozen=True, slots=True)
class RecordedSource:
    """The first requests of a trace in recorded order. A shorter trace is used whole.

    Attributes:
        arrival: an arrival process, or `_RECORDED`.
        class_name: class of the requests whose row names none.
        most_tokens: context of the model. Longer requests are left out.
    """

    rows: Sequence[TraceRow]
    slo: Slo
    arrival: str
    class_name: str
    most_tokens: int

    def requests(self, rate_rps: float, seed: int, count: int) -> Requests:
        """See `Source`."""
        most = self.most_tokens
        fitting = sum(row.prompt_tokens + row.output_tokens <= most for row in self.rows)
        if min(count, fitting) < 2:
            raise ValueError("the trace has fewer than two requests that fit the context")
        recorded = Recorded.from_rows(
            self.rows, min(count, fitting), self.most_tokens, self.class_name
        )
        if self.arrival != _RECORDED:
            times_s = parse_arrival(self.arrival).arrival_times(rate_rps, seed)
            spread = zip(recorded.rows, times_s, strict=False)
            recorded = replace(
                recorded, rows=tuple(replace(row, at_s=at_s) for row, at_s in spread)
            )
        return Requests(recorded.planned(rate_rps, self.slo, seed), recorded.job)


@dataclass(frozen=True, slots=True)
class WorkloadSource:
    """Requests of a built-in workload.

    Attributes:
        load: the workload, whose rate, seed and number of requests are replaced.
        most_tokens: context of the model, if it limits the requests.
    """

    load: Load
    most_tokens: int | None = None

    def requests(self, rate_rps: float, seed: int, count: int) -> Requests:
        """See `Source`."""
        load = replace(self.load, rate_rps=rate_rps, seed=seed, requests=count)
        plan = make_plan(load, max_model_len=self.most_tokens, lazily=True)
        return Requests(plan.requests, job_of)


def source_of(workload: str | None, trace: Path | None, slo: Slo) -> Source:
    """Return the source that two options select, with Poisson arrivals.

    Raises:
        OSError: the trace cannot be read.
        ValueError: neither or both are given, or the trace is malformed.
    """
    _require_one(workload, trace)
    if trace is not None:
        return TraceSource(read_trace(trace), slo)
    return WorkloadSource(Load(workload=workload, slo=slo))


def source_with_arrivals(
    workload: str | None,
    trace: Path | None,
    slo: Slo,
    *,
    arrival: str | None,
    class_name: str | None,
    most_tokens: int,
) -> Source:
    """Return the source that options select, with the arrivals of an option.

    Args:
        arrival: arrival process, by default `_RECORDED` for a trace and `poisson` for a workload.
        class_name: class of the requests of a trace that names none.
        most_tokens: context of the model.

    Raises:
        OSError: the trace cannot be read.
        ValueError: neither or both sources are given, or the trace is malformed.
    """
    _require_one(workload, trace)
    if trace is not None:
        rows = read_trace(trace)
        return RecordedSource(rows, slo, arrival or _RECORDED, class_name or "trace", most_tokens)
    load = Load(workload=workload, rate_rps=1.0, arrival=arrival, slo=slo)
    return WorkloadSource(load, most_tokens)


def _require_one(workload: str | None, trace: Path | None) -> None:
    if (workload is None) == (trace is None):
        raise ValueError("give either --workload or --trace")


def lengths_of(source: Source) -> list[tuple[int, int]]:
    """Return the tokens of prompt and output of a sample of requests."""
    sample = source.requests(1.0, 0, SAMPLE).lengths()
    return [(one.prompt_tokens, one.output_tokens) for one in sample]


def classes_of(source: Source) -> frozenset[str]:
    """Return the classes of a sample of requests, which select their recorded drafts."""
    return frozenset(one.request.class_name for one in source.requests(1.0, 0, SAMPLE).planned)
