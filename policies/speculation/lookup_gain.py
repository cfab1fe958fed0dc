"""What look-ups bring.

It is weighed when it is known what was found, so that looking may pay although most finds are of no
use: the chance of a token, found or not, does not tell that. On held-out code (0.8, batch 1, Zen 5,
2026-11-22) `auto` took 0.74 of the time of `off` when it looked where that chance was worth it, and
0.66 with this.
"""

from __future__ import annotations

from typing import Final

from draftgate.policies.speculation.survival import OUTCOME_ROWS

FORGETTING: Final = 0.99
"""Decay per look-up of a row: the last hundred or so decide, as texts change."""

SHRINKAGE: Final = 4.0
"""Look-ups that the mean of all weighs in each row's, and the first guess in that."""

FIRST_GAIN: Final = 1.0
"""Tokens a look-up is taken to bring before any was made: so much that some are made."""


class LookupGains:
    """Running means of what look-ups bring over the price, in tokens, by how the last draft ended.

    Rows are those of `survival.outcome_row`.
    """

    def __init__(self) -> None:
        """Expect much of all."""
        self._sums = [0.0] * OUTCOME_ROWS
        self._counts = [0.0] * OUTCOME_ROWS
        self._sum = self._count = 0.0

    def expected(self, row: int) -> float:
        """Return what a look-up is expected to bring."""
        overall = (self._sum + SHRINKAGE * FIRST_GAIN) / (self._count + SHRINKAGE)
        return (self._sums[row] + SHRINKAGE * overall) / (self._counts[row] + SHRINKAGE)

    def observe(self, row: int, gain: float) -> None:
        """Learn what a look-up brought: what its slots are worth over the price, or 0."""
        self._sums[row] = FORGETTING * self._sums[row] + gain
        self._counts[row] = FORGETTING * self._counts[row] + 1.0
        self._sum = FORGETTING * self._sum + gain
        self._count = FORGETTING * self._count + 1.0
