"""`adaptive_verification`: draft as deep as it goes, then verify the likeliest slots.

vLLM's adaptive verification (pull requests 47808 and 52228): all sequences draft their full
length; then B* = argmax (sampling sequences + the B largest survivals) / T(tokens + B), and the
slots behind it are dropped. What drafting costs has no part in it, nor what a sequence's tokens are
worth.

Kinder than the original: survivals are this worker's calibrated ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.speculation.allocation import allocate
from draftgate.policies.speculation.planning import (
    MAX_DRAFT_TOKENS,
    plan_up_to,
    unweighted,
    within_budget,
)
from draftgate.policies.types import RequestView, SpeculationPlan, StepView, WorkerLoad


@dataclass(frozen=True, slots=True)
class AdaptiveVerification:
    """Drafts everything, verifies the top slots."""

    max_draft_tokens: int = MAX_DRAFT_TOKENS
    name: str = "adaptive_verification"

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Plan full drafts."""
        reason = "{cap} draft tokens, of which the likeliest of the batch are verified"
        return plan_up_to(self.name, self.max_draft_tokens, request, load, reason)

    def least_survival(self, step: StepView, cost: StepCost) -> float | None:
        """Draft all there is."""
        del step, cost
        return None

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        """Draft in full first; what is drafted is trimmed when the worker asks again."""
        if any(candidate.depth_s > 0.0 for candidate in step.candidates):
            wanted = [candidate.max_draft_tokens for candidate in step.candidates]
            return within_budget(wanted, step.slot_budget)
        return allocate(replace(unweighted(step), prefill_tokens=0), cost)
