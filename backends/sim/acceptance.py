"""How good simulated drafts are: at a constant chance, or as recorded."""

from __future__ import annotations

from itertools import takewhile
from random import Random
from typing import Final, NamedTuple, Protocol

from draftgate.backends.core.sequence import Sequence
from draftgate.backends.sim.recording import Recording, Text
from draftgate.backends.sim.truth import Truth

TASK_ENDS: Final = "/"
"""In a request's id: what stands before it is the task whose records are replayed."""


class Guess(NamedTuple):
    """What a proposer has for a sequence.

    Attributes:
        evidence: on the proposer's own scale.
        proposed: tokens; 0 where it has nothing to propose.
        agreed: how many of them, from the first on, are right.
    """

    evidence: int
    proposed: int
    agreed: int


NOTHING: Final = Guess(0, 0, 0)


class Acceptance(Protocol):
    """Knows which drafts will be accepted. A guess depends on its position alone."""

    def guess(self, proposer: str, sequence: Sequence, most: int) -> Guess:
        """Return what the proposer has behind the sequence's last token: up to `most` tokens."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for the sequence. Idempotent."""
        ...


class ConstantAcceptance:
    """Each token is right with one chance, whatever stands before it: the geometric law."""

    def __init__(self, truth: Truth, chance: float) -> None:
        """Take the uniforms of `truth`.

        Raises:
            ValueError: the chance is no probability.
        """
        if not 0.0 <= chance <= 1.0:
            raise ValueError(f"sim_acceptance must be between 0 and 1, not {chance}")
        self._truth = truth
        self._chance = chance

    def guess(self, proposer: str, sequence: Sequence, most: int) -> Guess:
        """See `Acceptance`."""
        uniforms = self._truth.uniforms(sequence, len(sequence.token_ids), most)
        agreed = sum(1 for _ in takewhile(lambda uniform: uniform < self._chance, uniforms))
        return Guess(1, most, agreed)

    def forget(self, sequence: Sequence) -> None:
        """Keep nothing."""


class ReplayedAcceptance:
    """Each sequence follows a recorded text, from a random place on and round again.

    The request's id begins with the task, `TASK_ENDS` behind it; which text it is, and where in it
    the sequence begins, follow from the request's seed and choice. So they are the same on every
    worker and under every policy.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._places: dict[int, tuple[Text, int]] = {}  # by sequence key: text, first position

    def guess(self, proposer: str, sequence: Sequence, most: int) -> Guess:
        """See `Acceptance`."""
        place = self._places.get(sequence.key)
        if place is None:
            place = self._places[sequence.key] = self._chosen(sequence)
        text, first = place
        drafts = text.drafts.get(proposer)
        if drafts is None:  # it was not recorded with such texts
            return NOTHING
        at = (first + sequence.output_tokens) % text.length
        proposed = min(most, drafts.proposed[at])
        return Guess(drafts.evidence[at], proposed, min(proposed, drafts.agreed[at]))

    def forget(self, sequence: Sequence) -> None:
        """See `Acceptance`."""
        self._places.pop(sequence.key, None)

    def _chosen(self, sequence: Sequence) -> tuple[Text, int]:
        request = sequence.request
        task = request.request_id.partition(TASK_ENDS)[0]
        texts = self._recording.texts(task, request.sampling.temperature)
        random = Random(f"{request.sampling.seed}/{sequence.choice}")
        text = texts[random.randrange(len(texts))]
        return text, random.randrange(text.length)
