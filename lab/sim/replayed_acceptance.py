"""Acceptance of drafts as it was recorded.

If a text repeats itself, right drafts follow each other, so replayed acceptance is autocorrelated
like real acceptance. With independent draws, drafts would gain more than they do.
"""

from __future__ import annotations

from random import Random
from typing import Final

from draftgate.backends.core.sequence import Sequence
from draftgate.backends.recording import Guess, Text
from draftgate.lab.sim.recording import Recording

CLASS_SEPARATOR: Final = "/"
"""Separator in a request id, after the name of the class whose recorded texts are replayed."""


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
