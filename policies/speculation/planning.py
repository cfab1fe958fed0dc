"""Functions that all speculation policies share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from draftgate.policies.speculation.plan_reason import (
    NO_FIGURES,
    PlanCause,
    PlanFigures,
    render_reason,
)
from draftgate.policies.types import (
    ANY_PROPOSER,
    PROPOSER_MODES,
    RequestView,
    SpeculationMode,
    SpeculationPlan,
    StepView,
    WorkerLoad,
)

MAX_DRAFT_TOKENS: Final = 16
"""Longest planned draft: the rows of a CPU tile, and the minimum of a GPU tile."""


def choose_proposer(request: RequestView, load: WorkerLoad) -> str | None:
    """Return the named or cheapest proposer of a request, or None if no proposer may draft."""
    if request.mode is SpeculationMode.OFF or request.max_draft_tokens == 0 or not load.proposers:
        return None
    if request.mode in PROPOSER_MODES:
        return request.mode.value if request.mode.value in load.proposers else None
    return load.proposers[0]


def choose_proposer_or_any(request: RequestView, load: WorkerLoad) -> str | None:
    """Return the proposer of a request, or `ANY_PROPOSER` if several are possible."""
    proposer = choose_proposer(request, load)
    several = request.mode is SpeculationMode.AUTO and len(load.proposers) > 1
    return ANY_PROPOSER if proposer and several else proposer


def capped(draft_tokens: int, request: RequestView) -> int:
    """Return the draft length, limited to the client's cap."""
    cap = request.max_draft_tokens
    return draft_tokens if cap is None else min(draft_tokens, cap)


def no_speculation(
    policy: str,
    request: RequestView,
    cause: PlanCause,
    figures: PlanFigures = NO_FIGURES,
    price: float | None = None,
) -> SpeculationPlan:
    """Return a plan without drafts."""
    reason = render_reason(cause, figures, 0)
    return SpeculationPlan(policy, request.mode, None, 0, reason, price, cause, figures)


def no_proposer(
    policy: str, request: RequestView, load: WorkerLoad, price: float | None = None
) -> SpeculationPlan:
    """Return a plan without drafts for a request for which `choose_proposer` is None."""
    cause, figures = PlanCause.MISSING_PROPOSER, PlanFigures(wanted=request.mode.value)
    if request.mode is SpeculationMode.OFF or request.max_draft_tokens == 0:
        cause, figures = PlanCause.REQUESTED_OFF, NO_FIGURES
    elif not load.proposers:
        cause, figures = PlanCause.NO_PROPOSER, NO_FIGURES
    return no_speculation(policy, request, cause, figures, price)


def plan_up_to(
    policy: str,
    draft_tokens: int,
    request: RequestView,
    load: WorkerLoad,
    reason: PlanCause | str,
) -> SpeculationPlan:
    """Return a plan to draft up to `draft_tokens` tokens per step, limited to the client's cap.

    Args:
        reason: cause of the plan, or a reason in words, in which `{cap}` is replaced by the length.
    """
    proposer = choose_proposer(request, load)
    if proposer is None:
        return no_proposer(policy, request, load)
    cap = capped(draft_tokens, request)
    if isinstance(reason, PlanCause):
        cause, figures = reason, NO_FIGURES
    else:
        cause, figures = PlanCause.OTHER, PlanFigures(words=reason.format(cap=cap))
    if not cap:
        return no_speculation(policy, request, cause, figures)
    words = render_reason(cause, figures, cap)
    return SpeculationPlan(policy, request.mode, proposer, cap, words, None, cause, figures)


def within_budget(wanted: Sequence[int], budget: int) -> list[int]:
    """Grant the requested lengths in order until the budget is spent."""
    granted = []
    for length in wanted:
        granted.append(min(length, max(budget, 0)))
        budget -= granted[-1]
    return granted


def unweighted(step: StepView) -> StepView:
    """Return the step with a weight of 1 for every token (`weights`)."""
    if step.weight is None and all(candidate.weight == 1.0 for candidate in step.candidates):
        return step
    equal_weights = tuple([replace(candidate, weight=1.0) for candidate in step.candidates])
    return replace(step, candidates=equal_weights, weight=None)
