"""Times at which entries of a store expire."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Expiries:
    """The expiry of each key. Each call takes O(log keys)."""

    _until_s: dict[str, float] = field(default_factory=dict)
    _heap: list[tuple[float, str]] = field(default_factory=list)  # an early expiry of each key

    def put(self, key: str, until_s: float) -> None:
        """Set the expiry of a key."""
        # A later expiry needs no new entry, because `pop_due` updates the old entry.
        if until_s < self._until_s.get(key, math.inf):
            heapq.heappush(self._heap, (until_s, key))
        self._until_s[key] = until_s

    def drop(self, key: str) -> None:
        """Forget a key, if it is known."""
        self._until_s.pop(key, None)

    def pop_due(self, now_s: float) -> Sequence[str]:
        """Forget the keys that have expired, and return them."""
        if not self._heap or self._heap[0][0] > now_s:
            return ()
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            key = heapq.heappop(self._heap)[1]
            until_s = self._until_s.get(key)
            if until_s is None:
                continue
            if until_s <= now_s:
                del self._until_s[key]
                due.append(key)
            else:  # the expiry was extended
                heapq.heappush(self._heap, (until_s, key))
        return due
