"""A leaky bucket with exact refunds, the limit of a quota.

The bucket is a meter (the generic cell rate algorithm: ATM Forum, Traffic Management 4.0, 1996).
Unlike windows, buckets have no edges at which twice the limit would fit or a refund would be lost.

The unit is 1 / 60,000,000 of a request or token, so that a quota of `rate` a minute drains `rate`
units in a microsecond. All levels are therefore integers. Below 2^53 units (150 million tokens),
they are also exact in double precision, in which Redis computes them.

Released units leave the bucket as if they had never been reserved. The level of a bucket is the
maximum, over all reservations i, of the units of i and of all later reservations, less what has
drained since i (E. Reich, Waiting times when queues are in tandem, 1957). The units of a
reservation that is not such a maximum no longer matter. So a stack represents the bucket:

- A reservation adds its units at the top.
- Time drains units from the top.
- A reservation releases its own units, and then units of the reservations below. The units above
  are of later reservations, and would be in use even without this reservation.

When a reservation ends, the rest of its units joins the next open reservation, even if time has
drained the units of that reservation. So the stack has at most one entry for each open reservation,
and one for the units that the next reservation will find at the top.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Final

UNITS: Final = 60_000_000
"""Units of one request or token, which are the microseconds of a minute."""


@dataclass(slots=True)
class LeakyBucket:
    """The units of one quota that are in use.

    Attributes:
        rate: units that drain in a microsecond.
        most: size in requests or tokens.
        at_us: the time of the level.
        level: units in use.
        numbers: the numbers of the reservations on the stack, from bottom to top.
        units: the units of each of these reservations.
    """

    rate: int
    most: int
    at_us: int
    level: int = 0
    numbers: list[int] = field(default_factory=list)
    units: dict[int, int] = field(default_factory=dict)

    def wait_us(self, amount: int) -> int | None:
        """Return the microseconds until an amount fits, or None if it never fits."""
        if amount > self.most:
            return None
        excess = self.level - (self.most - amount) * UNITS
        return max(-(-excess // self.rate), 0)

    def level_at(self, now_us: int) -> int:
        """Return the units in use at a time, if nothing is added or released until then."""
        return max(self.level - (now_us - self.at_us) * self.rate, 0)

    def drain(self, now_us: int) -> None:
        """Drain units from the top of the stack until a time."""
        units = (now_us - self.at_us) * self.rate
        self.at_us = now_us
        if units < self.level:
            self._take(units, math.inf)
        elif self.level:
            self.level = 0
            self.numbers.clear()
            self.units.clear()

    def add(self, number: int, units: int) -> None:
        """Add units at the top of the stack."""
        if not units:
            return
        self.level += units
        if number not in self.units:
            self.numbers.append(number)
        self.units[number] = self.units.get(number, 0) + units

    def close(self, number: int, released: int, above: int) -> None:
        """End a reservation and release some of its units.

        Args:
            above: the number of the next open reservation, or the number that it will have.
        """
        self._take(released, number)
        kept = self.units.pop(number, 0)
        if not kept:
            return
        at = bisect_right(self.numbers, number) - 1
        if above in self.units:
            del self.numbers[at]
        else:
            self.numbers[at] = above
        self.units[above] = self.units.get(above, 0) + kept

    def _take(self, units: int, number: float) -> None:
        """Take units of the reservations up to a number, the highest first."""
        begin = end = bisect_right(self.numbers, number)
        left = units
        while left and begin:
            highest = self.numbers[begin - 1]
            taken = min(left, self.units[highest])
            left -= taken
            self.units[highest] -= taken
            if not self.units[highest]:
                del self.units[highest]
                begin -= 1
        del self.numbers[begin:end]
        self.level -= units - left
