"""A retry budget, which prevents retries from multiplying an outage.

Retries are limited to a share of the recent requests, plus a few per second. Without the latter, a
quiet gateway could never retry. Finagle's `RetryBudget` (20% and 10 per second over 10 s), gRPC's
retry throttling (gRFC A6) and Envoy's `retry_budget` (20%) are similar. If every call fails,
upstreams get at most this share of additional requests. Without a budget, each request would be
repeated up to its maximum number of attempts.
"""

from __future__ import annotations

from typing import Final

_WINDOW_S: Final = 10.0
"""Window in which requests and retries count, in seconds (Finagle's). If an upstream fails with
many requests in flight, the requests of this window pay for their retries. The gateway detects
the outage within a few seconds."""

RETRY_SHARE: Final = 0.2
"""Retries per request (Finagle's and Envoy's)."""

LEAST_PER_S: Final = 3.0
"""Retries per second that are always allowed. Finagle's 10 are for requests of milliseconds. Here a
request takes seconds, and a breaker opens after three failures. 30 in ten seconds cover the
failure of three upstreams with some requests in flight. (Chosen by that reasoning, not tuned,
2026-11-22.)"""

SLOTS: Final = 10
"""Number of slots in the window, which may be one slot too short."""


class RetryBudget:
    """Counts requests, and allows or denies retries.

    `now_s` is the time of any monotonic clock.

    Args:
        share: retries per request, 0 or more.
        least_per_s: retries per second that need no requests, 0 or more.
        window_s: seconds for which requests and retries count, more than 0.
    """

    def __init__(
        self,
        share: float = RETRY_SHARE,
        least_per_s: float = LEAST_PER_S,
        window_s: float = _WINDOW_S,
    ) -> None:
        self._share = share
        self._free = least_per_s * window_s
        self._slot_s = window_s / SLOTS
        self._slots: dict[int, list[int]] = {}  # slot number -> [requests, retries]
        self._last = -1  # number of the last slot

    def count_request(self, now_s: float) -> None:
        """Count a request, once for all of its attempts."""
        self._slot(now_s)[0] += 1

    def take_retry(self, now_s: float) -> bool:
        """Return whether the gateway may retry a request now, and count the retry if so."""
        slot = self._slot(now_s)
        requests, retries = map(sum, zip(*self._slots.values(), strict=True))
        allowed: bool = retries + 1 <= self._free + self._share * requests
        slot[1] += allowed
        return allowed

    def _slot(self, now_s: float) -> list[int]:
        """Return the present slot, and forget the slots outside the window."""
        number = int(now_s // self._slot_s)
        if number == self._last:
            return self._slots[number]
        self._last = number
        for old in [slot for slot in self._slots if slot <= number - SLOTS]:
            del self._slots[old]
        return self._slots.setdefault(number, [0, 0])
