"""The requests of a recorded run as the load of a simulation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Final

from draftgate.backends.recorded_run import seconds_at
from draftgate.backends.types import SamplingParams
from draftgate.gateway.dispatch.job import Job
from draftgate.lab.sim.recorded_run import RecordedRun, RunTokens, request_id
from draftgate.loadgen.planning.plan import Load, Plan
from draftgate.loadgen.types import PlannedRequest, RequestSpec, Slo
from draftgate.policies.speculation.plan_reason import PlanCause

CLASS_NAME: Final = "recorded"


def recorded_plan(run: RecordedRun, load: Load) -> Plan:
    """Return the requests of a run that have output, at their recorded times.

    Args:
        load: the maximum number of requests and the time scale.

    Raises:
        ValueError: no request has output.
    """
    scale, requests = load.time_scale or 1.0, list[PlannedRequest]()
    with_output = (number for number in range(len(run.arrivals)) if run.length(number))
    for number in islice(with_output, load.requests):
        arrival = run.arrivals[number]
        service, most = arrival.request.service, arrival.request.max_tokens
        slo = Slo(service.ttft_s, service.tpot_s)
        request = RequestSpec("", (), most, number, CLASS_NAME, slo=slo)
        requests.append(PlannedRequest(number, seconds_at(arrival.ticks) / scale, request))
    if not requests:
        raise ValueError("no request of the recorded run has output")
    return Plan(requests, None, requests[-1].at_s, len(requests))


def recorded_job_of(run: RecordedRun) -> Callable[[PlannedRequest], Job]:
    """Return the function that converts a recorded request to a job."""
    tokens = RunTokens(run, run.ended)

    def job_of(planned: PlannedRequest) -> Job:
        recorded = run.request(planned.index)
        plan = recorded.plan
        client_cap = plan.max_draft_tokens if plan.cause is PlanCause.CLIENT_CAP else None
        return Job(
            request_id=request_id(CLASS_NAME, planned.index),
            prompts=(tokens.prompt_ids(planned.index),),
            sampling=SamplingParams(recorded.max_tokens, planned.index, recorded.temperature),
            max_tokens=recorded.max_tokens,
            mode=plan.mode,
            max_draft_tokens=client_cap,
            service=recorded.service,
            repetitions=(plan.figures.repetition,),
        )

    return job_of
