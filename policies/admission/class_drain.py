"""How fast the line of a class drains.

Who comes later in a better class goes before who waits. Let F be the work that newcomers of better
classes bring a second, in seconds of the pool. The last of a line begins, whichever is soonest,

    after all / (1 - F)         when all of better classes before it, and all who come, are done
          all + F x T           the same, if that flow ends T from now
          own / product of q    at worst: each better class leaves q at least to those behind it,
                                or 1 less its flow, if more, while nobody of it is booked

where `all` is the work before it, and `own` what of that is of its class. `fair` keeps q, one in
`OVERDUE_EVERY` takings, for those who press behind better classes; so of either class and the worse
ones behind it, these take q at most.

Nobody knows how long a flow will last. A moment picked at random falls late enough in it that the
rest is at most r times what has passed with the chance r / (1 + r) (Gott, Nature 363, 1993).
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Final

from draftgate.policies.ordering.fair import OVERDUE_EVERY

FLOW_S: Final = 20.0
"""What came so long ago counts 1 / e: a flow of a tenth of the pool for each request is known
within 5%."""

LEAST_FLOW_S: Final = 2.0
"""What a class brought in the first seconds is spread over so many at least: one request is no
flow."""

NO_FLOW: Final = 0.01
"""A class that brings less than this share of the pool is not counted as one."""

MEMORY_S: Final = 600.0
"""So far back what came counts for how long a flow has lasted: its work over its rate. (Chosen.)"""

LASTS: Final = 1.5
"""Flows are taken to last so many times longer than they have: three in five do not. With 2, a few
more appointments of worse classes are kept, and their clients are told to wait a quarter longer
(simulated, tests/policies/overload.py, 2026-11-21)."""


_LEAST: Final = 1.0 / OVERDUE_EVERY

_PRIORITIES: Final = 8
"""So many classes either way of 0 are told apart."""


@dataclass(slots=True)
class _Flow:
    """Work that newcomers of a class brought, lately and so far, discounted to an instant."""

    since_s: float
    at_s: float
    work_s: float = 0.0
    so_far_s: float = 0.0

    def bring(self, work_s: float, now_s: float) -> None:
        self.work_s = self.work_s * math.exp((self.at_s - now_s) / FLOW_S) + work_s
        self.so_far_s = self.so_far_s * math.exp((self.at_s - now_s) / MEMORY_S) + work_s
        self.at_s = now_s

    def rate(self, now_s: float) -> float:
        """Return it a second, as if it had been so from the start."""
        seen_s = max(now_s - self.since_s, LEAST_FLOW_S)
        left_s = self.work_s * math.exp((self.at_s - now_s) / FLOW_S)
        return left_s / (FLOW_S * -math.expm1(-seen_s / FLOW_S))


@dataclass(frozen=True, slots=True)
class Drain:
    """How fast the line of a class drains, as shares of the pool.

    Attributes:
        strict: behind all of better classes; 0 where their newcomers fill the pool.
        least: whatever better classes do.
        worse: the part of either that worse classes leave.
        coming_s: work that newcomers of better classes will bring until their flow ends.
    """

    strict: float = 1.0
    least: float = 1.0
    worse: float = 1.0
    coming_s: float = math.inf

    def wait_s(self, all_s: float, own_s: float, pressing_s: float) -> float:
        """Return how long so much work ahead takes.

        Args:
            all_s, own_s: of all classes, and what of it is of its own.
            pressing_s: wait behind better classes after which it is pressing.
        """
        if self.least >= 1.0:
            return all_s
        strict_s = all_s / self.strict if self.strict > 0.0 else math.inf
        return min(strict_s, max(own_s / self.least, pressing_s), all_s + self.coming_s)


WHOLE: Final = Drain()
"""Of one class."""


class Classes:
    """What newcomers of each class bring."""

    def __init__(self) -> None:
        """Know of nobody."""
        self._since_s: float | None = None
        self._flows: dict[int, _Flow] = {}

    def bring(self, priority: int, work_s: float, now_s: float) -> None:
        """Learn that somebody came for the first time."""
        priority = _clamped(priority)
        if self._since_s is None:
            self._since_s = now_s
        if priority not in self._flows:
            self._flows[priority] = _Flow(self._since_s, now_s)
        self._flows[priority].bring(work_s, now_s)

    def drain(self, priority: int, now_s: float, booked: Container[int] = ()) -> Drain:
        """Return how fast the line of a class drains.

        Args:
            booked: the classes of which somebody is expected.
        """
        priority = _clamped(priority)
        rates = {level: flow.rate(now_s) for level, flow in self._flows.items()}
        better = [level for level in rates if level < priority and rates[level] > NO_FLOW]
        worse = sum(rate for level, rate in rates.items() if level > priority)
        left = [_LEAST if level in booked else max(1.0 - rates[level], _LEAST) for level in better]
        return Drain(
            max(1.0 - sum(rates[level] for level in better), 0.0),
            math.prod(left),
            1.0 - min(worse, _LEAST),
            LASTS * sum(self._flows[level].so_far_s for level in better),
        )


def _clamped(priority: int) -> int:
    return min(max(priority, -_PRIORITIES), _PRIORITIES)
