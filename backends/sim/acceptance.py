"""The acceptance of simulated drafts."""

from __future__ import annotations

from itertools import takewhile
from typing import Protocol

from draftgate.backends.core.sequence import Sequence
from draftgate.backends.recording import Guess
from draftgate.backends.sim.tokens import SimulatedTokens


class Acceptance(Protocol):
    """Knows which drafts will be accepted. A guess depends on its position alone."""

    def guess(self, proposer: str, sequence: Sequence, most: int) -> Guess:
        """Return the proposer's draft of up to `most` tokens after the sequence's last token."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of the sequence. The call is idempotent."""
        ...


class ConstantAcceptance:
    """Accepts each token with the same probability, so lengths are geometrically distributed."""

    def __init__(self, tokens: SimulatedTokens, chance: float) -> None:
        """Take the random numbers of `tokens`.

        Raises:
            ValueError: the chance is not a probability.
        """
        if not 0.0 <= chance <= 1.0:
            raise ValueError(f"sim_acceptance must be between 0 and 1, not {chance}")
        self._tokens = tokens
        self._chance = chance

    def guess(self, proposer: str, sequence: Sequence, most: int) -> Guess:
        """See `Acceptance`."""
        uniforms = self._tokens.uniforms(sequence, len(sequence.token_ids), most)
        agreed = sum(1 for _ in takewhile(lambda uniform: uniform < self._chance, uniforms))
        return Guess(1, 0, most, agreed)

    def forget(self, sequence: Sequence) -> None:
        """Do nothing, because this acceptance has no state."""
