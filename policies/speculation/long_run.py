"""The long-run speedup by drafts, which gives the value of a second.

A second of a proposer is not available to later steps, which earn tokens at the long-run rate. The
rate of a step without drafts is a worse value, because drafts raise the rate. With a fixed value of
a second, the steps that maximise tokens - value x time also maximise the long-run rate, if the
value is that rate (the renewal-reward theorem, and W. Dinkelbach, On Nonlinear Fractional
Programming, 1967).

The value decides which proposers are called. The price of a slot and `allocation` use the rate of
the step instead: choosing slots by the long-run rate took between 2% less and 2% more model time
(1 to 16 streams of held-out texts, on average 0.2% more, 2026-11-22).
"""

from __future__ import annotations

from typing import Final

FORGETTING: Final = 0.98
"""Decay per step, which averages about the last fifty. (Chosen, not tuned, 2026-11-22.)"""


class LongRunSpeedup:
    """Tokens of recent steps, relative to steps of the same duration without drafts.

    The ratio changes less with the batch than the rate does.
    """

    def __init__(self) -> None:
        self._tokens = self._plain_tokens = 0.0

    @property
    def ratio(self) -> float:
        """The speedup, at least 1, because a step may always omit drafts."""
        return max(1.0, self._tokens / self._plain_tokens) if self._plain_tokens else 1.0

    def add_step(self, tokens: float, plain_tokens: float) -> None:
        """Learn from a step.

        Args:
            tokens: expected weighted tokens of the step.
            plain_tokens: weighted tokens of steps without drafts in the same time.
        """
        self._tokens = FORGETTING * self._tokens + tokens
        self._plain_tokens = FORGETTING * self._plain_tokens + plain_tokens
