"""What sequences could verify in a step, and what it is weighed with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from backends.core.drafts import Draft
from backends.core.sequence import Sequence
from policies.types import DraftCandidate


class Terms(NamedTuple):
    """What a step's drafts are weighed with.

    Attributes:
        least_survival: weight x survival that the best slot must exceed, and drafting must be worth
            its time; None asks for everything (`SpeculationPolicy`).
        price: what a slot must promise, in weighted tokens.
        step_s: predicted seconds of the step without drafts.
        weight: what its tokens are worth.
        most_weight: that of the weightiest sequence.
    """

    least_survival: float | None = None
    price: float = 0.0
    step_s: float = 0.0
    weight: float = 1.0
    most_weight: float = 1.0

    @property
    def tokens_per_s(self) -> float:
        """Weighted tokens per second of the step without drafts."""
        return self.weight / self.step_s if self.step_s > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class Offer:
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

    def first(self, tokens: int) -> Offer:
        """Return the offer of the best tokens of a draft that is there."""
        if self.draft is None or tokens >= len(self.draft):
            return self
        survivals = self.candidate.survivals[:tokens]
        candidate = DraftCandidate(survivals, self.candidate.depth_s, self.candidate.weight)
        return Offer(self.sequence, self.source, self.draft.first(tokens), candidate)
