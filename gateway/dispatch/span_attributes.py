"""The attributes of spans for a request, its decisions and its outcome."""

from __future__ import annotations

from draftgate.backends.types import SpeculationOutcome, Task
from draftgate.gateway.dispatch.admission import Entry
from draftgate.gateway.dispatch.decisions import Decision
from draftgate.gateway.dispatch.flows import Hop
from draftgate.gateway.dispatch.job import FlowTag, Job
from draftgate.gateway.dispatch.kv_pulls import KvFetch
from draftgate.gateway.dispatch.routing import Routed
from draftgate.gateway.dispatch.run import Move, Resume
from draftgate.gateway.state.values import Reservation
from draftgate.gateway.tracing import Attributes, AttributeValue, Span
from draftgate.policies.speculation.revision import PlanRevision
from draftgate.policies.types import SpeculationPlan


def job_attributes(job: Job) -> Attributes:
    """Return the parameters of a request, without any of its text except its stop texts."""
    found: dict[str, AttributeValue] = {
        "draftgate.priority": job.service.priority,
    }
    if job.tenant:
        found["draftgate.tenant"] = job.tenant
    if job.service.ttft_s is not None:
        found["draftgate.slo.ttft_s"] = job.service.ttft_s
    if job.service.tpot_s is not None:
        found["draftgate.slo.tpot_s"] = job.service.tpot_s
    if job.task is Task.GENERATE:
        found |= {
            "gen_ai.request.temperature": job.sampling.temperature,
            "gen_ai.request.top_p": job.sampling.top_p,
            "gen_ai.request.seed": str(job.sampling.seed),  # a seed may exceed an attribute's int64
            "gen_ai.request.choice.count": job.n,
            "gen_ai.request.frequency_penalty": job.sampling.frequency_penalty,
            "gen_ai.request.presence_penalty": job.sampling.presence_penalty,
            "draftgate.request.repetition_penalty": job.sampling.repetition_penalty,
            "draftgate.speculation.mode": job.mode.value,
        }
        if job.sampling.top_k:
            found["gen_ai.request.top_k"] = job.sampling.top_k
        if job.sampling.stop:
            found["gen_ai.request.stop_sequences"] = list(job.sampling.stop)
    return found


def decision_attributes(decision: Decision) -> Attributes:
    """Return the limit and the speculation plan of a new prompt."""
    limit = {"gen_ai.request.max_tokens": decision.request.max_tokens}
    return {**limit, **plan_attributes(decision.plan)}


def plan_attributes(plan: SpeculationPlan) -> Attributes:
    """Return the attributes of a speculation plan."""
    found: dict[str, AttributeValue] = {
        "draftgate.policy": plan.policy,
        "draftgate.proposer": plan.proposer or "none",
        "draftgate.max_draft_tokens": plan.max_draft_tokens,
        "draftgate.cause": plan.cause.value,
        "draftgate.reason": plan.reason,
    }
    return found if plan.price is None else {**found, "draftgate.price": plan.price}


def admission_attributes(entry: Entry) -> Attributes:
    """Return the predictions for an admitted request."""
    return {
        "draftgate.predicted_wait_s": entry.predicted.wait_s,
        "draftgate.predicted_ttft_s": entry.predicted.ttft_s,
        "draftgate.admission.reason": entry.predicted.reason,
    }


def flow_attributes(tag: FlowTag, hop: Hop | None) -> Attributes:
    """Return the flow of a request, with its place and budget unless the flow is unknown."""
    found: dict[str, AttributeValue] = {"draftgate.flow.id": tag.flow_id}
    if hop is not None:
        found["draftgate.flow.hop"] = hop.place.number
        found["draftgate.flow.remaining_s"] = hop.place.remaining_s
        if hop.division is not None:
            found["draftgate.flow.budget_s"] = hop.division.budget_s
    return found


def record_route(parent: Span, routed: Routed) -> None:
    """Record the span of a routing decision, which has already been made."""
    span = parent.child("route", start_s=routed.begun_s)
    if span.recording:
        _describe_route(span, routed)
        span.end(routed.ended_s)


def _describe_route(span: Span, routed: Routed) -> None:
    """Set the chosen worker on a span, and the candidates if several were available."""
    span.set({"draftgate.worker_id": routed.worker.worker_id})
    if routed.phases is not None:
        span.set(
            {
                "draftgate.phases.policy": routed.phases.policy,
                "draftgate.phases.reason": routed.phases.reason,
                "draftgate.phases.decode_worker_id": routed.phases.decode_worker_id,
            }
        )
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


def describe_claim(span: Span, worker_id: str | None) -> None:
    """Set the worker that a request had claimed on a span, or nothing without a claim."""
    if span.recording and worker_id is not None:
        span.set({"draftgate.claimed_worker_id": worker_id})


def describe_reservation(span: Span, found: Reservation) -> None:
    """Set the lease on a span, or the reason for the store's refusal."""
    attributes: dict[str, str | int] = {
        "draftgate.state": "degraded" if found.degraded else "fresh"
    }
    if found.lease is not None:
        attributes["draftgate.worker_id"] = found.lease.worker_id
        attributes["draftgate.lease.tokens"] = found.lease.tokens
        attributes["draftgate.lease.behind_tokens"] = found.behind_tokens
    if found.refusal is not None:
        attributes["draftgate.lease.refusal"] = found.refusal.value
    span.set(attributes)


def describe_decision(span: Span, decision: Decision) -> None:
    """Set the inputs of a speculation decision on a span."""
    view, load = decision.request, decision.load
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
    """Return the old and new worker of a prompt, and the number of kept tokens."""
    return {
        "draftgate.prompt": resume.index,
        "draftgate.resume.cause": resume.cause.value,
        "draftgate.resume.from": resume.source,
        "draftgate.resume.to": resume.sink,
        "draftgate.resume.kept_tokens": resume.kept_tokens,
        "draftgate.resume.same_numerics_class": resume.same_numerics_class,
    }


def describe_kv_fetch(span: Span, fetch: KvFetch) -> None:
    """Set the decision about a transfer of KV blocks, and its result, on a span."""
    if not span.recording:
        return
    if fetch.end is not None:
        span.set(
            {
                "draftgate.kv.end": fetch.end.value,
                "draftgate.kv.blocks": fetch.blocks,
                "draftgate.kv.bytes": fetch.num_bytes,
                "draftgate.kv.chunks": fetch.chunks,
            }
        )
    span.set(
        {
            "draftgate.kv.cause": fetch.cause.value,
            "draftgate.kv.from": fetch.source,
            "draftgate.kv.to": fetch.sink,
            "draftgate.kv.reason": fetch.decision.reason.value,
            "draftgate.kv.predicted_pull_s": fetch.decision.pull_s,
            "draftgate.kv.predicted_compute_s": fetch.decision.compute_s,
            "draftgate.kv.known_blocks": fetch.known_blocks,
        }
    )


def describe_move(span: Span, move: Move) -> None:
    """Set the workers and the result of a move on a span."""
    if not span.recording:
        return
    span.set(
        {
            "draftgate.prompt": move.index,
            "draftgate.move.reason": move.reason.value,
            "draftgate.move.end": move.end.value,
            "draftgate.move.from": move.source,
            "draftgate.move.to": move.sink,
            "draftgate.move.stages": move.stages,
            "draftgate.move.blocks": move.blocks,
            "draftgate.move.bytes": move.num_bytes,
            "draftgate.move.verified_tokens": move.verified_tokens,
        }
    )
    if move.gap_s is not None:
        span.set({"draftgate.move.gap_s": move.gap_s})
    if move.chosen is not None:
        span.set(
            {
                "draftgate.move.policy": move.chosen.policy,
                "draftgate.move.gain": move.chosen.gain,
                "draftgate.move.threshold": move.chosen.threshold,
                "draftgate.move.explanation": move.chosen.explanation,
            }
        )


def revision_attributes(revision: PlanRevision) -> Attributes:
    """Return the attributes of a revised plan."""
    return {
        "draftgate.drafting": "on" if revision.on else "off",
        "draftgate.cause": revision.cause.value,
        "draftgate.reason": revision.reason,
        "draftgate.output_tokens": revision.output_tokens,
        "draftgate.price": revision.worth.price,
    }


def outcome_attributes(outcome: SpeculationOutcome) -> Attributes:
    """Return the outcome of speculation."""
    return {
        "draftgate.spec_steps": outcome.num_spec_steps,
        "draftgate.drafted_tokens": outcome.num_drafted_tokens,
        "draftgate.accepted_tokens": outcome.num_accepted_tokens,
        "draftgate.acceptance_histogram": outcome.acceptance_histogram,
    }
