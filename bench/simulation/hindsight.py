"""The earliest possible start of each request, with all arrivals known."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from draftgate.policies.ordering.fair import OVERDUE_EVERY


@dataclass(frozen=True, slots=True)
class Stay:
    """A request in hindsight.

    Attributes:
        at_s: when it entered the queue, by admission or with a retry time.
        priority: its class.
        service_s: how long it occupied a sequence; 0 if it was not served in its turn.
    """

    at_s: float
    priority: int
    service_s: float


def starts_s(stays: Sequence[Stay], seats: int) -> list[float]:
    """Return the start time of each request with a fixed sequence capacity.

    Higher classes go first, and within a class the earlier request. One in every `OVERDUE_EVERY`
    starts goes to a class below the highest waiting one; among those, the same rule applies again.
    `fair` leaves this share to starving classes. A request therefore waits for all requests of
    higher classes that enter before it starts. With one class the order is first come, first
    served.
    """
    order = deque(sorted(range(len(stays)), key=lambda index: stays[index].at_s))
    waiting: dict[int, deque[int]] = {stay.priority: deque() for stay in stays}
    free, found, takings, now_s = [0.0] * seats, [0.0] * len(stays), 0, 0.0
    for _ in stays:
        now_s = max(now_s, free[0])
        if not any(waiting.values()):
            now_s = max(now_s, stays[order[0]].at_s)
        while order and stays[order[0]].at_s <= now_s:
            index = order.popleft()
            waiting[stays[index].priority].append(index)
        classes = [priority for priority in sorted(waiting) if waiting[priority]]
        index = waiting[classes[min(_behind(takings), len(classes) - 1)]].popleft()
        found[index] = now_s
        takings += stays[index].service_s > 0
        heapq.heapreplace(free, now_s + stays[index].service_s)
    return found


def _behind(takings: int) -> int:
    """Return how many classes the next start passes over."""
    behind = 0
    while takings % OVERDUE_EVERY == OVERDUE_EVERY - 1:
        takings //= OVERDUE_EVERY
        behind += 1
    return behind
