"""How fast the line of a priority class drains.

New requests of better classes overtake waiting ones. Let F be the work that they bring per second,
in seconds of the pool. The last request of a line starts at the earliest of

    after all / (1 - F)         all better classes before it and all that arrive are done
          all + F x T           the same, if that flow ends T from now
          own / product of q    at worst: each better class leaves at least q to worse ones,
                                or 1 less its flow, if that is more and it has no bookings

where `all` is the work before it, and `own` the part of that in its class. `fair` keeps q, one of
`OVERDUE_EVERY` requests, for pressing requests of worse classes; so these take at most q.

How long a flow will last is unknown. Seen at a random moment, its rest is at most r times the
elapsed part with probability r / (1 + r) (Gott, Nature 363, 1993).
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Final

from draftgate.policies.ordering.fair import OVERDUE_EVERY

FLOW_S: Final = 20.0
"""Time constant of the rate of a flow: a flow whose requests take a tenth of a second of the pool
is known within 5%."""

LEAST_FLOW_S: Final = 2.0
"""Least time over which the first work of a class is spread: one request is not a flow."""

NO_FLOW: Final = 0.01
"""A class that brings less than this share of the pool is ignored."""

MEMORY_S: Final = 600.0
"""Time constant of the age of a flow, which is its work over its rate. (Chosen.)"""

LASTS: Final = 1.5
"""Flows are expected to last for this multiple of their age; three in five end sooner. With 2,
worse classes keep slightly more appointments, and their clients wait a quarter longer (simulated,
tests/policies/overload.py, 2026-11-21)."""

_LEAST: Final = 1.0 / OVERDUE_EVERY

_PRIORITIES: Final = 8
"""Classes beyond this many on either side of 0 count as the last."""


@dataclass(slots=True)
class _Flow:
    """Recent and total work of new requests of a class, both discounted."""

    since_s: float
    at_s: float
    recent_s: float = 0.0
    total_s: float = 0.0

    def add(self, work_s: float, now_s: float) -> None:
        self.recent_s = self.recent_s * math.exp((self.at_s - now_s) / FLOW_S) + work_s
        self.total_s = self.total_s * math.exp((self.at_s - now_s) / MEMORY_S) + work_s
        self.at_s = now_s

    def rate(self, now_s: float) -> float:
        """Return the work per second, as if it had been constant since the start."""
        seen_s = max(now_s - self.since_s, LEAST_FLOW_S)
        left_s = self.recent_s * math.exp((self.at_s - now_s) / FLOW_S)
        return left_s / (FLOW_S * -math.expm1(-seen_s / FLOW_S))


@dataclass(frozen=True, slots=True)
class Drain:
    """How fast the line of a class drains, as shares of the pool.

    Attributes:
        strict: after all better classes; 0 if their new requests fill the pool.
        least: whatever better classes do.
        worse: the part of either that worse classes leave.
        coming_s: work that better classes will bring until their flow ends.
    """

    strict: float = 1.0
    least: float = 1.0
    worse: float = 1.0
    coming_s: float = math.inf

    def wait_s(self, all_s: float, own_s: float, pressing_s: float) -> float:
        """Return how long the work ahead takes.

        Args:
            all_s, own_s: the work ahead in all classes, and in the own class.
            pressing_s: the wait after which the request presses better classes.
        """
        if self.least >= 1.0:
            return all_s
        strict_s = all_s / self.strict if self.strict > 0.0 else math.inf
        return min(strict_s, max(own_s / self.least, pressing_s), all_s + self.coming_s)


WHOLE: Final = Drain()
"""A pool with one class."""


class ClassFlows:
    """The work that new requests of each class bring."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._flows: dict[int, _Flow] = {}

    def add_request(self, priority: int, work_s: float, now_s: float) -> None:
        """Count the work of a new request."""
        priority = _clamp(priority)
        if self._since_s is None:
            self._since_s = now_s
        self._flows.setdefault(priority, _Flow(self._since_s, now_s)).add(work_s, now_s)

    def drain(self, priority: int, now_s: float, booked: Container[int] = ()) -> Drain:
        """Return how fast the line of a class drains.

        Args:
            booked: the classes with bookings.
        """
        priority = _clamp(priority)
        rates = {level: flow.rate(now_s) for level, flow in self._flows.items()}
        better = [level for level in rates if level < priority and rates[level] > NO_FLOW]
        worse = sum(rate for level, rate in rates.items() if level > priority)
        left = [_LEAST if level in booked else max(1.0 - rates[level], _LEAST) for level in better]
        return Drain(
            max(1.0 - sum(rates[level] for level in better), 0.0),
            math.prod(left),
            1.0 - min(worse, _LEAST),
            LASTS * sum(self._flows[level].total_s for level in better),
        )


def _clamp(priority: int) -> int:
    return min(max(priority, -_PRIORITIES), _PRIORITIES)
