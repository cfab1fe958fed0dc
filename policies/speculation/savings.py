"""The time that drafts save on a worker, measured against its steps without drafts.

Every decision about drafts rests on predictions: of survivals, and of the seconds of a step. If one
of them is wrong, a worker may lose time with every draft and not notice. So this module counts what
drafts have brought by the clock. The unit is the time of a step without drafts. A step of n
sequences that emits `tokens` tokens saves

    tokens / n - (seconds of the step) / (seconds of the same step without drafts)

The savings are credited to an account. Every step adds a small share of its time, and drafting
stops while the account is overdrawn. So drafts cost at most that share of the time, plus the most
that the account can hold, over any period. The bound depends on no prediction but that of a step
without drafts, which is corrected by such steps. If a worker drafts in every step, some steps omit
drafts for that purpose.

Cascade (arXiv 2506.20675) bounds the loss by test phases of each request instead.
"""

from __future__ import annotations

from typing import Final

LOSS_SHARE: Final = 0.02
"""Share of the time that drafts may cost in the long run. With `MOST_CREDIT_S`, drafts cost at most
4% of any 30 seconds. (Chosen for a bound of 5%, 2026-11-28.)"""

MOST_CREDIT_S: Final = 0.6
MOST_CREDIT_STEPS: Final = 12.0
"""Most seconds, and most steps, that the account holds. A draft that is worth its time may still
fail often in a row. If a step loses a half with a chance of 0.6 and gains two otherwise, the
account of a worker with short steps is overdrawn less than once in 10^5 steps. (Computed,
2026-11-28.)"""

RESUMED_SHARE: Final = 0.5
"""Share of the largest credit from which a worker drafts again: after 25 times the steps that it
may then lose."""

PLAIN_STEPS: Final = 16
"""Number of steps without drafts in the running ratio of measured to predicted seconds."""

FIRST_PLAIN_STEPS: Final = 4
FIRST_DRAFTED: Final = 2
"""Number of steps without drafts before a worker counts what drafts save, and number of steps with
drafts between them. The costs that it knows at first may be of a machine that was busy. (Chosen,
2026-11-28.)"""

PLAIN_COST: Final = 0.005
"""Share of the time that steps without drafts may cost. The less drafts save, the less such a step
costs, and the more often one is measured: every 20 steps if drafts save 10%, and every 200 steps if
they double the speed. (Chosen, 2026-11-28.)"""

LEAST_DRAFTED: Final = 8
MOST_DRAFTED: Final = 512
"""Least and most steps with drafts before a step omits them."""

GAIN_STEPS: Final = 64
"""Number of steps with drafts in the running means of what they save and of their duration."""

MOST_TIMES: Final = 4.0
"""Largest duration of a step that counts, in steps without drafts. Longer ones are disturbances."""

TRIAL_TOKENS: Final = 2.0
TRIAL_SHARE: Final = 0.02
"""Loss by drafts that a sequence may make: the time of some tokens, and a share of the time of its
output. Accepted tokens pay for further drafts. At a price of 0.3 tokens, the first six failures in
a row end the trial, and then a slot is tried every 15 tokens. With a survival of 0.6, a trial ends
too early in less than 1% of the sequences. (Computed for a random walk, 2026-11-28.)"""


class DraftSavings:
    """The account of a worker.

    Attributes:
        plain_steps: number of steps without drafts so far, at most `PLAIN_STEPS`.
    """

    def __init__(self) -> None:
        self._credit = 1.0
        self._overdrawn = False
        self._ratio = 1.0  # measured / predicted seconds of steps without drafts
        self.plain_steps = 0
        self._drafted_steps = 0  # since the last step without drafts
        self._gain = 0.0  # mean number of steps that a step with drafts saves
        self._times = 1.0  # mean duration of a step with drafts, in steps without drafts

    @property
    def stops_drafts(self) -> bool:
        """Whether drafts have cost more time than they may, and are stopped."""
        return self._overdrawn

    @property
    def omits_drafts(self) -> bool:
        """Whether the next step has no drafts, to measure a step without them."""
        steps: float = LEAST_DRAFTED
        if self.plain_steps < FIRST_PLAIN_STEPS:
            steps = FIRST_DRAFTED
        elif self.plain_steps >= PLAIN_STEPS:
            steps = min(max(steps, self._gain / (PLAIN_COST * self._times)), MOST_DRAFTED)
        return self._drafted_steps >= steps

    def plain_s(self, predicted_s: float) -> float:
        """Return the expected seconds of a step without drafts.

        Args:
            predicted_s: seconds by the cost of a step.
        """
        return self._ratio * predicted_s

    def add_plain_step(self, predicted_s: float, measured_s: float) -> None:
        """Record a step of decodes without drafts, from its planning to the next planning."""
        self._drafted_steps = 0
        if predicted_s <= 0.0:
            return
        ratio = min(measured_s / predicted_s, MOST_TIMES * self._ratio)
        self.plain_steps = min(self.plain_steps + 1, PLAIN_STEPS)
        self._ratio += (ratio - self._ratio) / self.plain_steps
        self._add(0.0, measured_s / max(self.plain_s(predicted_s), 1e-9), predicted_s)

    def add_drafted_step(
        self, tokens_per_sequence: float, predicted_s: float, measured_s: float
    ) -> None:
        """Record a step of decodes with drafts, from its planning to the next planning.

        Args:
            tokens_per_sequence: mean number of tokens that its sequences emitted.
            predicted_s: seconds of the same step without drafts, by the cost of a step.
            measured_s: seconds that it took.
        """
        self._drafted_steps += 1
        plain_s = self.plain_s(predicted_s)
        if plain_s > 0.0 and self.plain_steps >= FIRST_PLAIN_STEPS:
            times = min(measured_s / plain_s, MOST_TIMES)
            self._gain += (tokens_per_sequence - times - self._gain) / GAIN_STEPS
            self._times += (times - self._times) / GAIN_STEPS
            self._add(tokens_per_sequence - times, times, predicted_s)

    def _add(self, saved: float, times: float, predicted_s: float) -> None:
        """Credit the saved steps and the share of the time, and stop or resume drafts.

        The credit is a share of the most that the account holds. Steps of different batches have
        different lengths, and a share needs no conversion.
        """
        most = MOST_CREDIT_STEPS
        plain_s = self.plain_s(predicted_s)
        if plain_s > 0.0:
            most = min(most, MOST_CREDIT_S / plain_s)
        change = (saved + LOSS_SHARE * min(times, MOST_TIMES)) / most
        self._credit = min(max(self._credit + change, -1.0), 1.0)
        if self._credit < 0.0:
            self._overdrawn = True
        elif self._credit >= RESUMED_SHARE:
            self._overdrawn = False
