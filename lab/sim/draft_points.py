"""What drafts gain in recorded texts, for planning.

`auto` verifies the slots whose survival exceeds their price. Each price is therefore a way to
draft, with a mean number of draft tokens and accepted tokens per step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from draftgate.backends.recording import SLOTS, Guess, Text
from draftgate.lab.planning.throughput import DraftPoint
from draftgate.lab.sim.recording import Recording
from draftgate.policies.speculation.survival import evidence_row

PRICES: Final = (0.8, 0.6, 0.45, 0.3, 0.2, 0.1, 0.05)
"""Prices of a slot, from those of a full batch to those of a lone request."""

TEXTS: Final = 32
"""Largest number of texts per class. More texts change the means by less than the differences
between classes, and take more time."""


class RecordedDrafts:
    """The drafts of one proposer for one class of requests."""

    def __init__(self, recording: Recording, proposer: str, class_name: str) -> None:
        texts = recording.texts(class_name, 0.0)
        guesses = [_guesses(text, proposer) for text in texts[:: -(-len(texts) // TEXTS)]]
        survivals = _survivals(guesses)
        self._choices = [_Choice.at(price, guesses, survivals) for price in PRICES]

    def points(self, output_tokens: int, share: float) -> tuple[DraftPoint, ...]:
        """Return the ways to draft that accept any tokens.

        Args:
            output_tokens: length of a response, because few tokens vary more than many.
            share: share of the responses that have at least `DraftPoint.least_tokens`.
        """
        return tuple(
            DraftPoint(
                choice.drafted / choice.steps,
                choice.accepted / choice.steps,
                _quantile(choice.response_tokens(output_tokens), 1.0 - share),
                choice.depth,
            )
            for choice in self._choices
            if choice.accepted
        )


@dataclass(frozen=True, slots=True)
class _Choice:
    """The steps through all texts with the slots that are worth a price.

    Attributes:
        paths: accepted tokens of each step, by text.
        drafted: draft tokens of all steps.
        depth: slots of the longest draft.
    """

    paths: tuple[tuple[int, ...], ...]
    drafted: int
    depth: int

    @classmethod
    def at(
        cls,
        price: float,
        texts: Sequence[Sequence[Guess]],
        survivals: Mapping[int, Sequence[float]],
    ) -> _Choice:
        slots = {row: _slots(chain, price) for row, chain in survivals.items()}
        paths, drafted = [], 0
        for text in texts:
            path, position = [], 0
            while position < len(text):
                draft = _cut(text[position], slots)
                drafted += draft.proposed
                path.append(draft.agreed)
                position += 1 + draft.agreed
            paths.append(tuple(path))
        return cls(tuple(paths), drafted, max(slots.values(), default=0))

    @property
    def steps(self) -> int:
        return sum(map(len, self.paths))

    @property
    def accepted(self) -> int:
        return sum(map(sum, self.paths))

    def response_tokens(self, output_tokens: int) -> list[float]:
        """Return the tokens per step of responses, which are consecutive parts of the texts."""
        ratios = []
        for path in self.paths:
            steps = tokens = 0
            for accepted in path:
                steps += 1
                tokens += 1 + accepted
                if tokens >= output_tokens:
                    ratios.append(tokens / steps)
                    steps = tokens = 0
        return ratios or [1.0 + self.accepted / self.steps]


@cache
def recorded_drafts(recording: Recording, proposer: str, class_name: str) -> RecordedDrafts:
    """Return the drafts of a class, computed once."""
    return RecordedDrafts(recording, proposer, class_name)


def _guesses(text: Text, proposer: str) -> list[Guess]:
    return [text.guess(proposer, position) for position in range(text.length)]


def _survivals(texts: Sequence[Sequence[Guess]]) -> dict[int, list[float]]:
    """Return the survival of each slot by the evidence of the draft (`evidence_row`)."""
    proposed = defaultdict[int, list[int]](lambda: [0] * SLOTS)
    agreed = defaultdict[int, list[int]](lambda: [0] * SLOTS)
    for guess in (guess for text in texts for guess in text if guess.proposed):
        row = evidence_row(guess.evidence, guess.agreement)
        for slot in range(guess.proposed):
            proposed[row][slot] += 1
            agreed[row][slot] += slot < guess.agreed
    return {
        row: [right / max(all_, 1) for right, all_ in zip(agreed[row], counts, strict=True)]
        for row, counts in proposed.items()
    }


def _slots(survivals: Sequence[float], price: float) -> int:
    """Return the number of leading slots that are worth a price."""
    return next((n for n, survival in enumerate(survivals) if survival <= price), len(survivals))


def _cut(guess: Guess, slots: Mapping[int, int]) -> Guess:
    """Return the first tokens of a draft that are worth the price."""
    if not guess.proposed:
        return guess
    return guess.first(slots[evidence_row(guess.evidence, guess.agreement)])


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of the values does not exceed."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
