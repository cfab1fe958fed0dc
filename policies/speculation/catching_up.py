"""The cost of catching up, spread over the steps that benefit from it.

A draft model must read a sequence before it can draft for it. It pays for this once, and benefits
in each later step in which it drafts. If n-gram drafts are better in most of these steps, catching
up hardly pays. So the cost is divided by the expected number of drafts: the number of steps until
the sequence ends, multiplied by the share of such steps in which the proposer is chosen.

The share is learned only from sequences that the proposer has caught up with. It would otherwise
fall with every sequence that is not worth catching up with, and never recover.

On the shipped model with a batch of 1 and depths of 1 ms, where drafts of the draft model hardly
pay, `auto` takes 0.5% longer than with n-grams alone, and 3 to 4% longer without the share. With
depths of 0.5 ms, it takes up to 16% less time, with and without the share (model time of held-out
code and prose, 2026-11-22).
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

FIRST_TOKENS: Final = 64
"""Expected remaining length of a new sequence: half the shortest output length in use."""

FIRST_SHARE: Final = 0.5
"""Initial share of steps in which the proposer is chosen."""

SHARE_RATE: Final = 1 / 64
"""Weight of the latest offer in the share, which averages about the last 64. (Chosen, not tuned,
2026-11-22.)"""


def expected_tokens(output_tokens: int, most_tokens: int) -> int:
    """Return the expected number of remaining tokens of a sequence, at most `most_tokens`.

    If the distribution of lengths is unknown, the expected remainder equals the past (Lindy's law).
    `FIRST_TOKENS` is added, because the past contains little information early on.
    """
    return min(most_tokens, FIRST_TOKENS + output_tokens)


class CatchingUp:
    """The cost of catching up with sequences, for one proposer."""

    def __init__(self) -> None:
        self._share = FIRST_SHARE
        self._offered: list[int] = []  # caught-up sequences of the step, by key

    def step_s(self, catch_up_s: float, tokens: float, tokens_per_step: float) -> float:
        """Return the seconds of catching up that one step is charged.

        Args:
            catch_up_s: seconds to catch up with the sequence.
            tokens: expected number of its remaining tokens.
            tokens_per_step: expected tokens of a step with a draft.
        """
        return catch_up_s / max(self._share * tokens / tokens_per_step, 1.0)

    def add_offer(self, key: int) -> None:
        """Record that the proposer could draft for a caught-up sequence in this step."""
        self._offered.append(key)

    def end_step(self, chosen: Container[int]) -> None:
        """Learn from the offers of a step, of which the proposer drafted for `chosen`."""
        for key in self._offered:
            self._share += SHARE_RATE * ((key in chosen) - self._share)
        self._offered.clear()
