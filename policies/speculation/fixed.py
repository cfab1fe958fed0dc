"""`off` and `fixed:K`: the same whatever the load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.speculation.planning import no_speculation, plan_up_to, within_budget
from draftgate.policies.types import RequestView, SpeculationPlan, StepView, WorkerLoad

MOST_FIXED: Final = 64
"""Longest draft of `fixed:K`: what a verify tile of a GPU kernel holds; metrics count by slot."""


@dataclass(frozen=True, slots=True)
class Off:
    """Never speculate."""

    name: str = "off"

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Plan no drafts."""
        del load
        return no_speculation(self.name, request, "speculation is off on this server")

    def least_survival(self, step: StepView, cost: StepCost) -> float | None:
        """Let offers be looked at: they teach what speculation would bring."""
        del step, cost
        return None

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        """Allow no drafts."""
        del cost
        return [0] * len(step.candidates)


@dataclass(frozen=True, slots=True)
class Fixed:
    """Draft up to K tokens in every step, whatever the load: the baseline of other engines.

    vLLM's `num_speculative_tokens`, TensorRT-LLM's `max_draft_len`.
    """

    draft_tokens: int

    def __post_init__(self) -> None:
        """Check the length.

        Raises:
            ValueError: K is not from 1 to `MOST_FIXED`.
        """
        if not 1 <= self.draft_tokens <= MOST_FIXED:
            raise ValueError(f"fixed:K needs K from 1 to {MOST_FIXED}, not {self.draft_tokens}")

    @property
    def name(self) -> str:
        """`fixed:K`."""
        return f"fixed:{self.draft_tokens}"

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Plan K tokens, or the client's cap if that is less."""
        reason = "fixed at {cap} draft tokens per step"
        return plan_up_to(self.name, self.draft_tokens, request, load, reason)

    def least_survival(self, step: StepView, cost: StepCost) -> float | None:
        """Look at every offer."""
        del step, cost
        return None

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        """Allow K slots each, first come first served within the budget."""
        del cost
        wanted = [min(self.draft_tokens, c.max_draft_tokens) for c in step.candidates]
        return within_budget(wanted, step.slot_budget)
