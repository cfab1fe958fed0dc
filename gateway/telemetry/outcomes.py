"""What is told of a decision and of its outcome: attributes of spans, and figures."""

from __future__ import annotations

from draftgate.backends.types import SpeculationOutcome, Task
from draftgate.gateway.dispatch.admission import Entry
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.placement import Placement
from draftgate.gateway.dispatch.routing import Routed
from draftgate.gateway.dispatch.run import Resume
from draftgate.gateway.state.store import Reservation
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.metrics import Metrics
from draftgate.gateway.telemetry.tracing import Attributes, Span
from draftgate.policies.types import RequestView, SpeculationPlan, WorkerLoad


def job_attributes(job: Job) -> Attributes:
    """Return what was asked for; nothing of a text."""
    found: dict[str, str | int | float] = {
        "draftgate.tenant": job.tenant,
        "draftgate.priority": job.service.priority,
    }
    asked = {
        "draftgate.slo.ttft_s": job.service.ttft_s,
        "draftgate.slo.tpot_s": job.service.tpot_s,
    }
    found.update((name, value) for name, value in asked.items() if value is not None)
    return {**found, **_output_attributes(job)} if job.task is Task.GENERATE else found


def _output_attributes(job: Job) -> Attributes:
    """Return what was asked for of the output."""
    sampling = job.sampling
    return {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": str(sampling.seed),  # beyond an attribute's int64
        "gen_ai.request.choice.count": job.n,
        "draftgate.speculation.mode": job.mode.value,
    }


def decision_attributes(placed: Placement) -> Attributes:
    """Return what was decided, and where it runs."""
    return {
        "gen_ai.request.max_tokens": placed.request.sampling.max_tokens,
        "draftgate.worker_id": placed.worker.worker_id,
        **plan_attributes(placed.request.speculation),
    }


def plan_attributes(plan: SpeculationPlan) -> Attributes:
    """Return what was decided about speculation."""
    found: dict[str, str | int | float] = {
        "draftgate.policy": plan.policy,
        "draftgate.proposer": plan.proposer or "none",
        "draftgate.max_draft_tokens": plan.max_draft_tokens,
        "draftgate.reason": plan.reason,
    }
    return found if plan.price is None else {**found, "draftgate.price": plan.price}


def admission_attributes(entry: Entry) -> Attributes:
    """Return what was foreseen of a request that was admitted."""
    return {
        "draftgate.predicted_wait_s": entry.foreseen.wait_s,
        "draftgate.predicted_ttft_s": entry.foreseen.ttft_s,
        "draftgate.admission.reason": entry.foreseen.reason,
    }


def describe_route(span: Span, routed: Routed) -> None:
    """Put which worker was chosen on the span that covers it, and why, if there was a choice."""
    if not span.recording:
        return
    span.set({"draftgate.worker_id": routed.worker.worker_id})
    route = routed.route
    if route is None:
        return
    span.set(
        {
            "draftgate.routing.policy": route.policy,
            "draftgate.routing.reason": route.reason,
            "draftgate.routing.candidates": [offer.worker_id for offer in route.offers],
            "draftgate.routing.scores": [offer.level for offer in route.offers],
            "draftgate.routing.load_ages_s": [offer.age_s for offer in route.offers],
            "draftgate.routing.cached_tokens": route.cached_tokens,
        }
    )
    if route.ttft_s is not None and route.tpot_s is not None:
        span.set(
            {"draftgate.predicted_ttft_s": route.ttft_s, "draftgate.predicted_tpot_s": route.tpot_s}
        )


def describe_reservation(span: Span, found: Reservation) -> None:
    """Put what a worker's capacity was leased for, or why not, on the span that covers it."""
    if not span.recording:
        return
    told: dict[str, str | int] = {"draftgate.state": "degraded" if found.degraded else "fresh"}
    if found.lease is not None:
        told["draftgate.worker_id"] = found.lease.worker_id
        told["draftgate.lease.tokens"] = found.lease.tokens
        told["draftgate.lease.behind_tokens"] = found.behind_tokens
    if found.refusal is not None:
        told["draftgate.lease.refusal"] = found.refusal.value
    span.set(told)


def describe_decision(span: Span, view: RequestView, load: WorkerLoad) -> None:
    """Put what a decision was made from on the span that covers it."""
    if not span.recording:
        return
    span.set(
        {
            "draftgate.load.running": load.running,
            "draftgate.load.waiting": load.waiting,
            "draftgate.load.kv_blocks_free": load.kv_blocks_free,
            "draftgate.load.price": load.price,
            "draftgate.load.acceptance": load.acceptance,
            "draftgate.prompt_tokens": view.prompt_tokens,
        }
    )
    if view.repetition is not None:
        span.set({"draftgate.repetition": view.repetition})


def resume_attributes(resume: Resume) -> Attributes:
    """Return where a prompt was and where it goes on, and from where."""
    return {
        "draftgate.prompt": resume.index,
        "draftgate.resume.cause": resume.cause.value,
        "draftgate.resume.from": resume.lost.worker.worker_id,
        "draftgate.resume.to": resume.placed.worker.worker_id,
        "draftgate.resume.kept_tokens": resume.kept_tokens,
        "draftgate.resume.same_numerics_class": resume.same_numerics_class,
    }


def outcome_attributes(outcome: SpeculationOutcome) -> Attributes:
    """Return what speculation did."""
    return {
        "draftgate.spec_steps": outcome.num_spec_steps,
        "draftgate.drafted_tokens": outcome.num_drafted_tokens,
        "draftgate.accepted_tokens": outcome.num_accepted_tokens,
        "draftgate.acceptance_histogram": outcome.acceptance_histogram,
    }


def count_outcome(metrics: Metrics, outcome: SpeculationOutcome) -> None:
    """Count what speculation did for a request."""
    if not outcome.num_spec_steps:
        return
    metrics.add(metric.SPEC_STEPS, outcome.num_spec_steps)
    metrics.add(metric.DRAFTED, outcome.num_drafted_tokens)
    metrics.add(metric.ACCEPTED, outcome.num_accepted_tokens)
    beyond = sum(outcome.acceptance_histogram)
    for position, steps in enumerate(outcome.acceptance_histogram[:-1]):
        beyond -= steps  # steps that accepted more than `position` tokens
        metrics.add(metric.ACCEPTED_AT, beyond, str(position))
