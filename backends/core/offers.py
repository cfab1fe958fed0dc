"""What sequences could verify in a step, and what it is weighed with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.sequence import Sequence
from draftgate.policies.drafting_cost import NO_DRAFTING_COST, DraftingCost
from draftgate.policies.types import DraftCandidate


class Terms(NamedTuple):
    """What a step's drafts are weighed with.

    Attributes:
        least_survival: weight x survival that the best slot must exceed, and drafting must be worth
            its time; None asks for everything (`SpeculationPolicy`).
        price: what a slot must promise, in weighted tokens.
        step_s: predicted seconds of the step without drafts.
        tokens_per_s: what a second of it is worth, in weighted tokens.
        most_weight: what a token of the weightiest sequence is worth.
        drafting: what drafting takes of the host.
    """

    least_survival: float | None = None
    price: float = 0.0
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    most_weight: float = 1.0
    drafting: DraftingCost = NO_DRAFTING_COST


@dataclass(frozen=True, slots=True)
class DraftOffer:
    """What a sequence could verify in the next step.

    Attributes:
        source: the proposer's name, or `GRAMMAR`.
        draft: the tokens, the best first; None if they are still to be computed.
        candidate: the offer, as a policy sees it.
    """

    sequence: Sequence
    source: str
    draft: Draft | None
    candidate: DraftCandidate

    @property
    def expected(self) -> float:
        """Weighted tokens which the draft is expected to bring; 0 if there is none."""
        return self.candidate.weight * sum(self.candidate.survivals) if self.draft else 0.0

    def first(self, tokens: int) -> DraftOffer:
        """Return the offer of the best tokens of a draft that is there."""
        if self.draft is None or tokens >= len(self.draft):
            return self
        survivals = self.candidate.survivals[:tokens]
        candidate = DraftCandidate(survivals, self.candidate.depth_s, self.candidate.weight)
        return DraftOffer(self.sequence, self.source, self.draft.first(tokens), candidate)
