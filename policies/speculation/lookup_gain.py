"""The expected gain of n-gram lookups.

A lookup takes time whether or not it finds a useful draft. Its gain is 0, or the sum of (survival -
price) over the slots of its draft, and is known only afterwards. So lookups may be worth their time
although most drafts are useless. The acceptance of tokens does not show this. On held-out code,
`auto` took 0.74 of the time of `off` with lookups by acceptance, and 0.66 with this estimate
(temperature 0.8, batch 1, Zen 5, 2026-11-22).

The gain depends on the price at the time of the lookup. Gains are therefore learned by price.
Otherwise, a worker whose load falls would expect the small gains of the high price, and would
rarely look up drafts.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from draftgate.policies.speculation.survival import OUTCOME_ROWS

_FORGETTING: Final = 0.99
"""Decay per lookup of a row, which averages about the last hundred, because texts change."""

SHRINKAGE: Final = 4.0
"""Weight of the mean of all rows in each row, and of the initial guess in that mean, in lookups."""

FIRST_GAIN: Final = 1.0
"""Initial gain in tokens, which is enough to try some lookups."""


PRICE_EDGES: Final = (0.02, 0.1, 0.2, 0.35, 0.5, 0.7)
"""Prices that separate the learned gains. A draft of survivals 0.6, 0.36, 0.22, ... gains 1.5 at a
price of 0, and 0.5, 0.26 and 0.1 at prices of 0.2, 0.35 and 0.5. (Chosen so that the gain at most
halves between edges, not tuned, 2026-11-22.)"""


class LookupGains:
    """Running mean gain of lookups in tokens, by price and by the end of the last draft."""

    def __init__(self) -> None:
        self._by_price = [_MeanGains() for _ in range(len(PRICE_EDGES) + 1)]

    def expected(self, row: int, price: float) -> float:
        """Return the expected gain of a lookup.

        Args:
            row: end of the sequence's last draft (`survival.outcome_row`).
            price: survival that a slot must exceed.
        """
        return self._by_price[bisect_right(PRICE_EDGES, price)].expected(row)

    def add_lookup(self, row: int, price: float, gain: float) -> None:
        """Learn the gain of a lookup, which is 0 if no slot was worth its price."""
        self._by_price[bisect_right(PRICE_EDGES, price)].add_lookup(row, gain)


class _MeanGains:
    """Running mean gains at similar prices, by row."""

    def __init__(self) -> None:
        self._sums = [0.0] * OUTCOME_ROWS
        self._counts = [0.0] * OUTCOME_ROWS
        self._sum = self._count = 0.0

    def expected(self, row: int) -> float:
        overall = (self._sum + SHRINKAGE * FIRST_GAIN) / (self._count + SHRINKAGE)
        return (self._sums[row] + SHRINKAGE * overall) / (self._counts[row] + SHRINKAGE)

    def add_lookup(self, row: int, gain: float) -> None:
        self._sums[row] = _FORGETTING * self._sums[row] + gain
        self._counts[row] = _FORGETTING * self._counts[row] + 1.0
        self._sum = _FORGETTING * self._sum + gain
        self._count = _FORGETTING * self._count + 1.0
