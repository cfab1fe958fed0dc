"""A drafter of known quality."""

from __future__ import annotations

from collections.abc import Sequence as Many

from backends.core.drafts import Draft, DraftRequest
from backends.core.sequence import Sequence
from backends.sim.truth import Truth


class SimProposer:
    """Drafts the tokens that will come, each wrong with probability `1 - acceptance`.

    Whether the draft at a position is right depends on the position alone, so drafting it again
    in another step or batch changes nothing.
    """

    def __init__(self, truth: Truth, acceptance: float) -> None:
        """Draft with this chance of being right.

        Raises:
            ValueError: it is no probability.
        """
        if not 0.0 <= acceptance <= 1.0:
            raise ValueError(f"sim_acceptance must be between 0 and 1, not {acceptance}")
        self._truth = truth
        self._acceptance = acceptance

    def depth_s(self, sequences: int) -> float:
        """Return 0: the truth is looked up."""
        return 0.0

    def catch_up_s(self, sequence: Sequence) -> float:
        """Return 0: there is nothing to catch up with."""
        return 0.0

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Return a chain of exactly `max_tokens` tokens for each."""
        return [self._draft(request.sequence, request.max_tokens) for request in requests]

    def _draft(self, sequence: Sequence, max_tokens: int) -> Draft:
        first = len(sequence.token_ids)
        tokens = (self._token(sequence, first + ahead) for ahead in range(max_tokens))
        return Draft(tuple(tokens), evidence=1)

    def forget(self, sequence: Sequence) -> None:
        """Drop the sequence's hash state: it has finished."""
        self._truth.forget(sequence)

    def _token(self, sequence: Sequence, position: int) -> int:
        if self._truth.uniform(sequence, position) < self._acceptance:
            return self._truth.token(sequence, position)
        return self._truth.another_token(sequence, position)
