"""The earliest possible start of each request when all arrivals are known."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from draftgate.policies.ordering.fair import OVERDUE_EVERY


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request with its known service time.

    Attributes:
        at_s: time at which the request entered the queue, at its admission or its refusal.
        priority: class of the request.
        service_s: seconds for which the request occupied a sequence, or 0 if it was not served.
    """

    at_s: float
    priority: int
    service_s: float


def earliest_starts_s(requests: Sequence[QueuedRequest], capacity: int) -> list[float]:
    """Return the start time of each request with a fixed sequence capacity.

    More urgent classes start first, and within a class the earlier request starts first. Every
    `OVERDUE_EVERY`-th start goes to a class below the most urgent waiting class, by the same rule.
    This share equals the share that `fair` leaves to starving classes. A request therefore waits
    for all requests of more urgent classes that enter before it starts. With a single class the
    order is first come, first served.
    """
    order = deque(sorted(range(len(requests)), key=lambda index: requests[index].at_s))
    waiting: dict[int, deque[int]] = {request.priority: deque() for request in requests}
    free, found, starts, now_s = [0.0] * capacity, [0.0] * len(requests), 0, 0.0
    for _ in requests:
        now_s = max(now_s, free[0])
        if not any(waiting.values()):
            now_s = max(now_s, requests[order[0]].at_s)
        while order and requests[order[0]].at_s <= now_s:
            index = order.popleft()
            waiting[requests[index].priority].append(index)
        classes = [priority for priority in sorted(waiting) if waiting[priority]]
        index = waiting[classes[min(_skipped_classes(starts), len(classes) - 1)]].popleft()
        found[index] = now_s
        starts += requests[index].service_s > 0
        heapq.heapreplace(free, now_s + requests[index].service_s)
    return found


def _skipped_classes(starts: int) -> int:
    """Return the number of classes that the next start skips."""
    skipped = 0
    while starts % OVERDUE_EVERY == OVERDUE_EVERY - 1:
        starts //= OVERDUE_EVERY
        skipped += 1
    return skipped
