"""The requests for which `draftgate plan` plans, from a trace or a built-in workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from draftgate.gateway.cli.simulate.conversion import job_of
from draftgate.gateway.cli.simulate.trace_load import Recorded
from draftgate.gateway.dispatch.job import Job
from draftgate.loadgen.planning.arrivals import parse_arrival
from draftgate.loadgen.planning.plan import Load, make_plan
from draftgate.loadgen.planning.traces import read_trace
from draftgate.loadgen.types import PlannedRequest, Slo
from draftgate.policies.planning.histogram import PlannedLength

RECORDED: Final = "recorded"
"""The arrivals of a trace as recorded, scaled to the rate."""


@dataclass(frozen=True, slots=True)
class PlanLoad:
    """Requests that arrive at a mean rate of one per second.

    Attributes:
        requests: in order of arrival.
        lengths: the length of each request.
        job: a function that returns the job of a request.
    """

    requests: tuple[PlannedRequest, ...]
    lengths: tuple[PlannedLength, ...]
    job: Callable[[PlannedRequest], Job]

    def planned(self, rate_rps: float) -> list[PlannedRequest]:
        """Return the requests at a mean rate."""
        return [replace(one, at_s=(one.at_s or 0.0) / rate_rps) for one in self.requests]


def plan_load(
    trace: Path | None,
    workload: str | None,
    requests: int,
    most_tokens: int,
    slo: Slo,
    *,
    arrival: str | None = None,
    class_name: str | None = None,
    seed: int = 0,
) -> PlanLoad:
    """Return the first requests of a trace, or requests of a workload.

    Args:
        requests: number of requests. A shorter trace is used whole.
        most_tokens: context of the model. Requests of a trace that are longer are left out.
        arrival: arrival process, by default `RECORDED` for a trace and `poisson` for a workload.
        class_name: class of the requests of a trace that names none.

    Raises:
        OSError: the trace cannot be read.
        ValueError: there is not exactly one source, or it has too few requests.
    """
    if (trace is None) == (workload is None):
        raise ValueError("give either --trace or --workload")
    if trace is None:
        load = Load(
            workload=workload, rate_rps=1.0, arrival=arrival, requests=requests, slo=slo, seed=seed
        )
        return _of_workload(load, most_tokens)
    rows = read_trace(trace)
    fitting = sum(row.prompt_tokens + row.output_tokens <= most_tokens for row in rows)
    recorded = Recorded.of(rows, min(requests, fitting), most_tokens, class_name or "trace")
    if len(recorded.rows) < 2:
        raise ValueError(f"{trace} has fewer than two requests that fit the context")
    if arrival not in {None, RECORDED}:
        times_s = parse_arrival(arrival or "").arrival_times(1.0, seed)
        spread = zip(recorded.rows, times_s, strict=False)
        recorded = replace(recorded, rows=tuple(replace(row, at_s=at_s) for row, at_s in spread))
    planned = recorded.planned(1.0, slo, seed)
    return _load(planned, [row.prompt_tokens for row in recorded.rows], recorded.job)


def _of_workload(load: Load, most_tokens: int) -> PlanLoad:
    planned = list(make_plan(load, max_model_len=most_tokens).requests)
    jobs = [job_of(one) for one in planned]
    prompts = [len(job.prompts[0]) for job in jobs]
    return _load(planned, prompts, lambda one: jobs[one.index])


def _load(
    planned: Sequence[PlannedRequest],
    prompt_tokens: Sequence[int],
    job: Callable[[PlannedRequest], Job],
) -> PlanLoad:
    lengths = tuple(
        PlannedLength(
            one.at_s or 0.0, max(tokens, 1), one.request.max_tokens, one.request.class_name
        )
        for one, tokens in zip(planned, prompt_tokens, strict=True)
    )
    return PlanLoad(tuple(planned), lengths, job)
