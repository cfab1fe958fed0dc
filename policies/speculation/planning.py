"""Functions that all speculation policies share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

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


def choose_proposer(request: RequestView, load: WorkerLoad) -> tuple[str | None, str]:
    """Return the named or cheapest proposer of a request, or None with a reason."""
    if request.mode is SpeculationMode.OFF or request.max_draft_tokens == 0:
        return None, "the request asked for no speculation"
    if not load.proposers:
        return None, "the worker has no proposer"
    if request.mode in PROPOSER_MODES:
        if request.mode.value not in load.proposers:
            return None, f"the worker has no proposer {request.mode.value!r}"
        return request.mode.value, ""
    return load.proposers[0], ""


def choose_proposer_or_any(request: RequestView, load: WorkerLoad) -> tuple[str | None, str]:
    """Return the proposer of a request, or `ANY_PROPOSER` if several are possible."""
    proposer, why_not = choose_proposer(request, load)
    if proposer and request.mode is SpeculationMode.AUTO and len(load.proposers) > 1:
        return ANY_PROPOSER, ""
    return proposer, why_not


def capped(draft_tokens: int, request: RequestView) -> int:
    """Return the draft length, limited to the client's cap."""
    cap = request.max_draft_tokens
    return draft_tokens if cap is None else min(draft_tokens, cap)


def no_speculation(
    policy: str, request: RequestView, reason: str, price: float | None = None
) -> SpeculationPlan:
    """Return a plan without drafts."""
    return SpeculationPlan(policy, request.mode, None, 0, reason, price)


def plan_up_to(
    policy: str, draft_tokens: int, request: RequestView, load: WorkerLoad, reason: str
) -> SpeculationPlan:
    """Return a plan to draft up to `draft_tokens` tokens per step, limited to the client's cap.

    Args:
        reason: reason of the plan, in which `{cap}` is replaced by the length.
    """
    proposer, why_not = choose_proposer(request, load)
    if proposer is None:
        return no_speculation(policy, request, why_not)
    cap = capped(draft_tokens, request)
    return SpeculationPlan(policy, request.mode, proposer, cap, reason.format(cap=cap))


def within_budget(wanted: Sequence[int], budget: int) -> list[int]:
    """Grant the requested lengths in order until the budget is spent."""
    granted = []
    for length in wanted:
        granted.append(min(length, max(budget, 0)))
        budget -= granted[-1]
    return granted


def unweighted(step: StepView) -> StepView:
    """Return the step with a weight of 1 for every token (`weights`)."""
    equal_weights = tuple([replace(candidate, weight=1.0) for candidate in step.candidates])
    return replace(step, candidates=equal_weights, weight=None)
