"""The requests of a plan, at any rate, from a trace or a workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from draftgate.gateway.cli.simulate.conversion import job_of
from draftgate.gateway.cli.simulate.drawn import Drawn
from draftgate.gateway.dispatch.job import Job
from draftgate.loadgen.planning.plan import Load, make_plan
from draftgate.loadgen.planning.traces import TraceRow, read_trace
from draftgate.loadgen.types import PlannedRequest, Slo

SAMPLE: Final = 2000
"""Requests from which lengths are estimated. The mean of ShareGPT's outputs, with a coefficient of
variation of 0.9, is then within 4% (95% confidence)."""


class Requests(NamedTuple):
    """Planned requests in order, and the function that converts them to jobs."""

    planned: Iterable[PlannedRequest]
    to_job: Callable[[PlannedRequest], Job]


class Source(Protocol):
    """Requests with targets, at any rate."""

    def requests(self, rate_rps: float, seed: int, count: int) -> Requests:
        """Return requests with Poisson arrivals."""
        ...


@dataclass(frozen=True, slots=True)
class TraceSource:
    """Requests with lengths from a trace in random order, and the same targets for all."""

    rows: Sequence[TraceRow]
    slo: Slo

    def requests(self, rate_rps: float, seed: int, count: int) -> Requests:
        """See `Source`."""
        drawn = Drawn.of(self.rows, count, seed)
        return Requests(drawn.planned(rate_rps, self.slo), drawn.job)


@dataclass(frozen=True, slots=True)
class WorkloadSource:
    """Requests of a built-in workload."""

    load: Load

    def requests(self, rate_rps: float, seed: int, count: int) -> Requests:
        """See `Source`."""
        load = replace(self.load, rate_rps=rate_rps, seed=seed, requests=count)
        return Requests(make_plan(load, lazily=True).requests, job_of)


def source_of(workload: str | None, trace: Path | None, slo: Slo) -> Source:
    """Return the source that two options select.

    Raises:
        OSError: the trace cannot be read.
        ValueError: neither or both are given, or the trace is malformed.
    """
    if (workload is None) == (trace is None):
        raise ValueError("give either --workload or --trace")
    if trace is not None:
        return TraceSource(read_trace(trace), slo)
    return WorkloadSource(Load(workload=workload, slo=slo))


def lengths_of(source: Source) -> list[tuple[int, int]]:
    """Return the tokens of prompt and output of a sample of requests."""
    planned, to_job = source.requests(1.0, 0, SAMPLE)
    return [(len(to_job(one).prompts[0]), one.request.max_tokens) for one in planned]


def classes_of(source: Source) -> frozenset[str]:
    """Return the classes of a sample of requests, which select their recorded drafts."""
    return frozenset(one.request.class_name for one in source.requests(1.0, 0, SAMPLE).planned)
