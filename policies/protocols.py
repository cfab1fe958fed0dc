"""The contracts that policies satisfy. `policies.testing` checks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from policies.step_cost import StepCost
from policies.types import BatchView, RequestView, SpeculationPlan, StepView, WorkerLoad


@runtime_checkable
class SpeculationPolicy(Protocol):
    """Decides whether and how far to speculate: for each request, then for each step.

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

    def least_survival(self, step: StepView, cost: StepCost) -> float | None:
        """Return which weight x survival the best slot must exceed, or none is taken.

        Asked before there are candidates: sequences that are not likely to reach it are asked for
        drafts now and then only, and nobody for drafts that cannot be worth the time of drafting,
        so a policy that will take none costs no time. None asks for all, whatever they are worth.
        Does not mutate.
        """
        ...

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        """Return how many draft tokens each of `step.candidates` may verify in this step.

        Each is between 0 and the candidate's `max_draft_tokens`; their sum is at most
        `step.slot_budget`. No candidates: an empty sequence. Does not mutate.

        Where something has to be computed to draft (`DraftCandidate.depth_s`), the policy is asked
        again when it is: by then drafting costs nothing more, survivals are those of the drafts
        that are there, and each candidate may keep as much as it was given, or less.
        """
        ...


@runtime_checkable
class BatchingPolicy(Protocol):
    """Decides how many prompt tokens join a step."""

    @property
    def name(self) -> str:
        """The name under which it is chosen, e.g. `fixed:512`."""
        ...

    @property
    def stalls_decodes(self) -> bool:
        """Whether decodes wait while there are prompts to be fed."""
        ...

    def prefill_tokens(self, batch: BatchView, cost: StepCost) -> int:
        """Return how many prompt tokens join the step, 0 to `batch.most_prefill_tokens`.

        More than 0 where nobody decodes and something waits. Does not mutate.
        """
        ...
