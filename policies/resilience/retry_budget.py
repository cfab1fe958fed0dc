"""How many requests may be sent again, so that an outage is not multiplied. Values in, values out.

Retries are a share of the requests of the last seconds, and a few a second beside, without which a
quiet gateway could never retry (Finagle's `RetryBudget`: 20% and 10 a second over 10 s; gRPC's
retry throttling, gRFC A6, and Envoy's `retry_budget`, 20%, are of the same kind). If everything
fails, upstreams get at most that share more than clients ask; without a budget they would get as
many times more as there are attempts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 10.0
"""Requests and retries of so many seconds count (Finagle's). An upstream that is lost while it
works on many is paid for with what all asked meanwhile, and is known to be out within a few."""

RETRY_SHARE: Final = 0.2
"""Retries by requests (Finagle's and Envoy's)."""

LEAST_PER_S: Final = 3.0
"""Retries a second that are always free. Finagle's 10 are meant for requests of milliseconds; one
here takes an engine seconds, and a breaker opens after three failures: 30 in ten seconds see three
upstreams out with some in flight on each. (Chosen by that reasoning, not tuned; 2026-11-22.)"""

SLOTS: Final = 10
"""Parts that the window moves on by: what is remembered, and by how much it may be too short."""


@dataclass(slots=True)
class _Slot:
    """What came in a part of the window."""

    number: int
    requests: int = 0
    retries: int = 0


class RetryBudget:
    """Counts requests, and allows or denies retries. Times are of any one monotonic clock, in s."""

    def __init__(
        self,
        share: float = RETRY_SHARE,
        least_per_s: float = LEAST_PER_S,
        window_s: float = WINDOW_S,
    ) -> None:
        """Begin with no requests.

        Args:
            share: retries by requests, 0 or more.
            least_per_s: retries a second that need no requests, 0 or more.
            window_s: how long both are remembered, more than 0.
        """
        self._share = share
        self._free = least_per_s * window_s
        self._slot_s = window_s / SLOTS
        self._slots: deque[_Slot] = deque()
        self._requests = self._retries = 0

    def requested(self, now_s: float) -> None:
        """Count a request, however often it is sent."""
        self._slot(now_s).requests += 1
        self._requests += 1

    def take(self, now_s: float) -> bool:
        """Return whether a request may be sent once more now; if so, that counts."""
        slot = self._slot(now_s)
        if self._retries + 1 > self._free + self._share * self._requests:
            return False
        slot.retries += 1
        self._retries += 1
        return True

    def _slot(self, now_s: float) -> _Slot:
        """Return the present part of the window; what is older than the window is forgotten."""
        number = int(now_s // self._slot_s)
        while self._slots and self._slots[0].number <= number - SLOTS:
            old = self._slots.popleft()
            self._requests -= old.requests
            self._retries -= old.retries
        if not self._slots or self._slots[-1].number < number:
            self._slots.append(_Slot(number))
        return self._slots[-1]
