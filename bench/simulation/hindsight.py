"""When everybody could have started, had all that came been known."""

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
        at_s: when it entered the line: was let in, or told to come back.
        priority: its class.
        service_s: how long it took a seat; 0 of one that was not served in its turn.
    """

    at_s: float
    priority: int
    service_s: float


def starts_s(stays: Sequence[Stay], seats: int) -> list[float]:
    """Return when each would have started before so many seats.

    Better classes first, in a class who entered first; but of each `OVERDUE_EVERY` takings one is
    for the classes behind the best that waits, and by the same rule of those, one in as many again:
    the share that `fair` leaves to those who would starve. So a client waits behind all of better
    classes who enter before it starts. With one class it is first come, first served.
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
    """Return how many classes the next taking passes over."""
    behind = 0
    while takings % OVERDUE_EVERY == OVERDUE_EVERY - 1:
        takings //= OVERDUE_EVERY
        behind += 1
    return behind
