"""The interface of proposers, and the offers that contain their drafts."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Final, NamedTuple, Protocol

from draftgate.backends.core.drafts import NO_DRAFT, Draft
from draftgate.backends.core.sequence import Sequence
from draftgate.policies.costs.drafting_cost import NO_DRAFTING_COST, DraftingCost
from draftgate.policies.types import DraftCandidate
from draftgate.policies.values import immutable


@immutable
class DraftRequest:
    """A sequence that may get a draft of up to `max_tokens` tokens."""

    sequence: Sequence
    max_tokens: int


class Proposer(Protocol):
    """Proposes continuations for the sequences of one worker.

    A proposer keeps its own state for each sequence.
    """

    def depth_s(self, sequences: int) -> float:
        """Return the predicted seconds to draft one token deeper for `sequences` sequences.

        0 for a lookup proposer, which proposes before the policy decides how many slots to verify.
        Other proposers draft the decided number of tokens, because each depth costs a forward pass.
        """
        ...

    def catch_up_s(self, sequence: Sequence) -> float:
        """Return the predicted seconds to process the tokens that the proposer has not seen.

        0 for a proposer without state, and for a lookup proposer.
        """
        ...

    def propose(self, requests: Many[DraftRequest]) -> Many[Draft]:
        """Return one draft per request in order, which is empty if the proposer has no proposal.

        A sequence may appear at any time, also after a pause. The proposer first catches up with
        the sequence. If drafting has a cost, the sequence's block table has space for the drafts
        after its pending tokens.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence. The call is idempotent."""
        ...


class DraftTerms(NamedTuple):
    """The conditions under which the drafts of one step are evaluated.

    Attributes:
        least_survival: weight x survival that the best slot must exceed for drafting to be worth
            its time, or None to call every proposer (`SpeculationPolicy`).
        price: expected tokens that a slot must add, in weighted tokens.
        step_s: predicted seconds of the step without drafts.
        tokens_per_s: value of one second, in weighted tokens: the long-run rate.
        most_weight: largest weight of a sequence in the step.
        drafting: host time of drafting.
    """

    least_survival: float | None = None
    price: float = 0.0
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    most_weight: float = 1.0
    drafting: DraftingCost = NO_DRAFTING_COST


NO_CANDIDATE: Final = DraftCandidate(())
"""The candidate of an empty draft."""


@immutable
class DraftOffer:
    """A draft that a sequence could verify in the next step.

    Attributes:
        source: name of the proposer, or `GRAMMAR`.
        draft: draft tokens, best first, or None if they are not computed yet.
        candidate: the offer from the view of the policy.
    """

    sequence: Sequence
    source: str
    draft: Draft | None
    candidate: DraftCandidate

    @property
    def expected(self) -> float:
        """Expected number of accepted tokens, weighted, or 0 without a draft."""
        draft, candidate = self.draft, self.candidate
        has_draft = draft is not None and draft.token_ids
        return candidate.weight * sum(candidate.survivals) if has_draft else 0.0

    def first(self, tokens: int) -> DraftOffer:
        """Return the offer shortened to the best tokens of its draft."""
        draft, candidate = self.draft, self.candidate
        if draft is None or tokens >= len(draft.token_ids):
            return self
        if not tokens:
            return DraftOffer(self.sequence, self.source, NO_DRAFT, NO_CANDIDATE)
        shorter = DraftCandidate(candidate.survivals[:tokens], candidate.depth_s, candidate.weight)
        return DraftOffer(self.sequence, self.source, draft.first(tokens), shorter)
