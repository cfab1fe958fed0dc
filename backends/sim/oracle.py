"""The oracle: a policy that knows how much of each draft will be accepted. For simulation only.

What it gains over speculating without foresight is the most that better evidence could.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, cast

from draftgate.backends.core.drafting import Drafting
from draftgate.backends.core.proposer import DraftOffer, DraftTerms
from draftgate.backends.core.scheduler import Scheduler
from draftgate.backends.core.sequence import Sequence as Tokens
from draftgate.backends.sim.proposer import SimProposer
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.speculation.allocation import allocate
from draftgate.policies.speculation.baselines import Fixed
from draftgate.policies.speculation.planning import MAX_DRAFT_TOKENS
from draftgate.policies.types import RequestView, SpeculationPlan, StepView, WorkerLoad

NAME: Final = "oracle"


class OracleDrafting(Drafting):
    """Tells survivals of 1 for slots that will be accepted, and leaves out all others."""

    def offers(self, sequences: Sequence[Tokens], terms: DraftTerms) -> list[DraftOffer]:
        """Return what can be verified and will be accepted."""
        return list(self._predicted(super().offers(sequences, terms)))

    def _predicted(self, offers: Iterable[DraftOffer]) -> Iterator[DraftOffer]:
        for offer in offers:
            most = offer.candidate.max_draft_tokens
            proposer = cast(SimProposer, self._proposers[offer.source])
            agreed = proposer.agreed(offer.sequence, most)
            if agreed:
                candidate = replace(offer.candidate, survivals=(1.0,) * agreed)
                yield replace(offer.first(agreed), candidate=candidate)


class OracleScheduler(Scheduler):
    """The production scheduler with the oracle's drafting."""

    drafting_class = OracleDrafting


class Oracle:
    """Gives slots to drafts that will be accepted, as many as maximise the rate (`allocate`).

    The costs are what the worker believes: it predicts tokens, not times.
    """

    name = NAME

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Plan the longest draft: steps decide."""
        plan = Fixed(MAX_DRAFT_TOKENS).decide(request, load)
        return replace(plan, policy=self.name, reason=f"predicted: {plan.reason}")

    def least_survival(self, step: StepView, cost: StepCost) -> float | None:
        """Ask everybody: what is predicted costs nothing."""
        del step, cost
        return None

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        """Return how much of each draft to verify."""
        return allocate(step, cost)
