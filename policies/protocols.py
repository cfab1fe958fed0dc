"""The contracts that policies satisfy. `policies.testing` checks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from policies.step_cost import StepCost
from policies.types import RequestView, SpeculationPlan, StepView, WorkerLoad


@runtime_checkable
class SpeculationPolicy(Protocol):
    """Decides whether and how far to speculate: once per request, then once per step.

    No decision can change the output, only its cost: verification is sampling (design, section 1).
    """

    @property
    def name(self) -> str:
        """The name under which responses and metrics report it, e.g. `fixed:4`."""
        ...

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Decide for one request, at the gateway.

        Must honour `request.mode` (`off`, or a proposer of `load.proposers`) and never exceed
        `request.max_draft_tokens`. Does not mutate.
        """
        ...

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        """Return how many draft tokens each of `step.candidates` may verify in this step.

        Each is between 0 and the candidate's `max_draft_tokens`; their sum is at most
        `step.slot_budget`. No candidates: an empty sequence. Does not mutate.
        """
        ...
