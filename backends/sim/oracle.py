"""The oracle: a policy for simulations that knows which draft tokens will be accepted.

Its gain over a policy without this knowledge limits the possible gain of better evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, cast

from draftgate.backends.core.drafting import Drafting
from draftgate.backends.core.proposer import DraftOffer, DraftTerms
from draftgate.backends.core.scheduler import Scheduler
from draftgate.backends.core.sequence import Sequence as Tokens
from draftgate.backends.sim.model import SimProposer
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.speculation.allocation import allocate
from draftgate.policies.speculation.baselines import Fixed
from draftgate.policies.speculation.planning import MAX_DRAFT_TOKENS
from draftgate.policies.types import RequestView, SpeculationPlan, StepView, WorkerLoad

NAME: Final = "oracle"


class OracleDrafting(Drafting):
    """Offers only slots that will be accepted, with a survival of 1."""

    def offers(self, sequences: Sequence[Tokens], terms: DraftTerms) -> list[DraftOffer]:
        """Return the offers, each shortened to the tokens that will be accepted."""
        known = []
        for offer in super().offers(sequences, terms):
            proposer = cast(SimProposer, self._proposers[offer.source])
            if offer.draft is None:
                draft = None
                agreed = proposer.agreed(offer.sequence, offer.candidate.max_draft_tokens)
            else:
                draft = proposer.accepted(offer.sequence, offer.draft)
                agreed = len(draft)
            if agreed:
                candidate = offer.candidate._replace(survivals=(1.0,) * agreed)
                known.append(offer._replace(draft=draft, candidate=candidate))
        return known


class OracleScheduler(Scheduler):
    """The production scheduler with the oracle's drafting."""

    drafting_class = OracleDrafting


class Oracle:
    """Allocates slots to tokens that will be accepted, to maximise the rate (`allocate`).

    The oracle uses the worker's believed costs, because it knows tokens in advance but not times.
    """

    name = NAME

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Return a plan with the longest draft, of which each step verifies a part."""
        plan = Fixed(MAX_DRAFT_TOKENS).decide(request, load)
        return replace(plan, policy=self.name, reason=f"oracle: {plan.reason}")

    def least_survival(self, step: StepView, cost: StepCost) -> float | None:
        """Return None to call every proposer, because the oracle's knowledge costs nothing."""
        del step, cost
        return None

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        """Return how many tokens of each draft to verify."""
        return allocate(step, cost)
