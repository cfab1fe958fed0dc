"""The acceptance of simulated drafts, with a constant probability or as recorded.

If a text repeats itself, right drafts follow each other, so replayed acceptance is autocorrelated
like real acceptance. With independent draws, drafts would gain more than they do.
"""

from __future__ import annotations

from itertools import takewhile
from random import Random
from typing import Final, Protocol

from draftgate.backends.core.sequence import Sequence
from draftgate.backends.recording import Guess, Text
from draftgate.backends.sim.recording import Recording
from draftgate.backends.sim.tokens import SimulatedTokens

CLASS_SEPARATOR: Final = "/"
"""Separator in a request id, after the name of the class whose recorded texts are replayed."""


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


class ReplayedAcceptance:
    """Replays a recorded text for each sequence, from a random position on and past its end.

    The text wraps around at its end. The request id begins with the class and `CLASS_SEPARATOR`.
    The seed and the choice select the text and the position, so they are the same on every worker
    and under every policy.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        # Text, its length and the first position, by sequence key.
        self._places: dict[int, tuple[Text, int, int]] = {}

    def guess(self, proposer: str, sequence: Sequence, most: int) -> Guess:
        """See `Acceptance`."""
        place = self._places.get(sequence.key)
        if place is None:
            place = self._places[sequence.key] = self._chosen(sequence)
        text, length, first = place
        return text.guess(proposer, (first + sequence.output_tokens) % length).first(most)

    def forget(self, sequence: Sequence) -> None:
        """See `Acceptance`."""
        self._places.pop(sequence.key, None)

    def _chosen(self, sequence: Sequence) -> tuple[Text, int, int]:
        request = sequence.request
        class_name = request.request_id.partition(CLASS_SEPARATOR)[0]
        texts = self._recording.texts(class_name, request.sampling.temperature)
        random = Random(f"{request.sampling.seed}/{sequence.choice}")
        text = texts[random.randrange(len(texts))]
        return text, text.length, random.randrange(text.length)
