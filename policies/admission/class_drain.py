"""The speed at which the queue of a priority class drains.

New requests of higher-priority classes overtake waiting requests. Let F be the work that these new
requests bring per second, in seconds of the pool. The last request of a class starts at the
earliest of three times:

    all / (1 - F)         the pool has done `all` and all work that arrives meanwhile
    all + F x T           the flow ends T seconds from now, and the pool has done all work
    own / product of q    the worst case, in which each higher class leaves at least q to lower
                          classes; a class without bookings leaves 1 - its flow if that is more

`all` is the work ahead of the request, and `own` is the part of `all` in its class. `fair` reserves
q, one of `OVERDUE_EVERY` requests, for pressing requests of lower classes.

The duration of a flow is unknown. At a random moment, the remaining duration is at most r times the
elapsed one with probability r / (1 + r) (Gott, Nature 363, 1993).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from draftgate.policies.ordering.fair import OVERDUE_EVERY
from draftgate.policies.values import immutable, replace

FLOW_S: Final = 20.0
"""Time constant of the rate of a flow, in seconds. If each request takes a tenth of a second of the
pool, the estimated rate is within 5%."""

_LEAST_FLOW_S: Final = 2.0
"""Minimum time over which the first work of a class is spread, because one request is not a flow.
"""

_LEAST_SHARE: Final = 0.01
"""Share of the pool below which the flow of a class is ignored."""

_MEMORY_S: Final = 600.0
"""Time constant of the age of a flow, in seconds. The age is the work divided by the rate.
(Chosen, not tuned.)"""

REMAINING_AGES: Final = 0.1
"""Remaining duration of a flow after which clients of lower classes should return, as a multiple of
its age. One of eleven flows ends sooner.

If the flow lasts longer, a client that returns is refused again. If the flow ends sooner, part of
the pool is idle, because no server can recall its clients. With 0.1, a pool with three classes
leaves 7% of its time unused, and refuses a client 1.2 to 1.5 times. With 0.25, these values are
14% and 1.2 to 1.3 times. With 1.5, they are 49% and 1.1 times (simulated,
tests/policies/overload_servers.py, two seeds, 2026-11-23)."""

LEAST_STRICT: Final = 0.5
"""Share of the pool below which waits vary no more, because `fair` serves pressing requests of
lower classes. Without this limit, goodput is 1 to 4% higher, but half as many clients again are
refused three times (simulated, tests/policies/overload_servers.py, 2026-11-23)."""

_LEAST: Final = 1.0 / OVERDUE_EVERY

_PRIORITIES: Final = 8
"""Maximum distance of a class from 0. Classes farther away count as the last class."""


@dataclass(slots=True)
class _Flow:
    """The recent and the total work of new requests of a class, both discounted."""

    since_s: float
    at_s: float
    recent_s: float = 0.0
    total_s: float = 0.0

    def add(self, work_s: float, now_s: float) -> None:
        self.recent_s = self.recent_s * math.exp((self.at_s - now_s) / FLOW_S) + work_s
        self.total_s = self.total_s * math.exp((self.at_s - now_s) / _MEMORY_S) + work_s
        self.at_s = now_s

    def rate(self, now_s: float) -> float:
        """Return the work per second, assuming a constant rate since the start."""
        seen_s = max(now_s - self.since_s, _LEAST_FLOW_S)
        left_s = self.recent_s * math.exp((self.at_s - now_s) / FLOW_S)
        return left_s / (FLOW_S * -math.expm1(-seen_s / FLOW_S))


@immutable
class Drain:
    """The speed at which the queue of a class drains, as shares of the pool.

    Attributes:
        strict: share after all higher-priority classes, or 0 if their new requests fill the pool.
        least: share in the worst case.
        worse: part of `strict` or `least` that lower classes leave.
        coming_s: work that higher-priority classes will bring until their flow ends, in seconds.
    """

    strict: float = 1.0
    least: float = 1.0
    worse: float = 1.0
    coming_s: float = math.inf

    @property
    def spread(self) -> float:
        """The factor by which the standard deviation of waits exceeds that of a whole pool.

        Each request ahead takes 1 / `strict` of its time, with the requests that overtake meanwhile
        (busy periods: Kleinrock, Queueing Systems I, 1975). `fair` bounds these busy periods.
        """
        return 1.0 if self.least >= 1.0 else 1.0 / max(self.strict, LEAST_STRICT)

    @property
    def lasting(self) -> Drain:
        """The drain if the flows of higher-priority classes do not end.

        An admitted request waits for seconds only, in which a flow rarely ends.
        """
        # `wait_s` ignores the flows of a class that nothing precedes.
        return self if self.least >= 1.0 else replace(self, coming_s=math.inf)

    def wait_s(self, all_s: float, own_s: float, pressing_s: float) -> float:
        """Return the seconds that the work ahead takes.

        Args:
            all_s, own_s: seconds of work ahead in all classes, and in the request's own class.
            pressing_s: wait in seconds after which the request counts as pressing.
        """
        if self.least >= 1.0:
            return all_s
        strict_s = all_s / self.strict if self.strict > 0.0 else math.inf
        return min(strict_s, max(own_s / self.least, pressing_s), all_s + self.coming_s)


WHOLE: Final = Drain()
"""The drain of a pool with one class."""


_ALONE: Final = Drain(coming_s=0.0)
"""The drain of a class while no other class has work."""


class ClassFlows:
    """The flows of new work by class."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._flows: dict[int, _Flow] = {}

    def add_request(self, priority: int, work_s: float, now_s: float) -> None:
        """Add the work of a new request to the flow of its class."""
        priority = _clamp(priority)
        if self._since_s is None:
            self._since_s = now_s
        flow = self._flows.get(priority)
        if flow is None:
            flow = self._flows[priority] = _Flow(self._since_s, now_s)
        flow.add(work_s, now_s)

    def drain(self, priority: int, now_s: float, booked: Collection[int] = ()) -> Drain:
        """Return the drain of the queue of a class.

        Args:
            booked: classes that have bookings.
        """
        priority = _clamp(priority)
        if not booked and (not self._flows or self._flows.keys() == {priority}):
            return _ALONE
        booked = {level for level in map(_clamp, booked) if level < priority}
        rates = {
            level: flow.rate(now_s) for level, flow in self._flows.items() if level != priority
        }
        better = {
            level: rate for level, rate in rates.items() if level < priority and rate > _LEAST_SHARE
        }
        worse = sum(rate for level, rate in rates.items() if level > priority)
        shares = [
            _LEAST if level in booked else max(1.0 - better[level], _LEAST)
            for level in booked.union(better)
        ]
        return Drain(
            max(1.0 - sum(better.values()), 0.0),
            math.prod(shares),
            1.0 - min(worse, _LEAST),
            REMAINING_AGES * sum(self._flows[level].total_s for level in better),
        )


def _clamp(priority: int) -> int:
    if -_PRIORITIES <= priority <= _PRIORITIES:
        return priority  # the usual case
    return _PRIORITIES if priority > 0 else -_PRIORITIES
