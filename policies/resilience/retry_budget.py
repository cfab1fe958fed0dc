"""How many requests may be sent again, so that retries do not multiply an outage.

Retries are limited to a share of the requests of the last seconds and a few per second, without
which a quiet gateway could never retry. Finagle's `RetryBudget` (20% and 10 per second over 10 s),
gRPC's retry throttling (gRFC A6) and Envoy's `retry_budget` (20%) are of the same kind. If
everything fails, upstreams get at most this share of requests more. Without a budget each request
would be sent as often as it has attempts.
"""

from __future__ import annotations

from typing import Final

WINDOW_S: Final = 10.0
"""Window in which requests and retries count (Finagle's). The retries for an upstream that fails
with many requests in flight are covered by the requests of this window; within a few seconds the
upstream is known to be out."""

RETRY_SHARE: Final = 0.2
"""Retries per request (Finagle's and Envoy's)."""

LEAST_PER_S: Final = 3.0
"""Retries per second that are always allowed. Finagle's 10 are meant for requests of milliseconds;
here a request takes seconds, and a breaker opens after three failures. 30 in ten seconds cover the
failure of three upstreams with some requests in flight. (Chosen by that reasoning, not tuned;
2026-11-22.)"""

SLOTS: Final = 10
"""Parts of the window: it may be too short by one of them."""


class RetryBudget:
    """Counts requests, and allows or denies retries. `now_s` is of any monotonic clock.

    Args:
        share: retries per request, 0 or more.
        least_per_s: retries per second that need no requests, 0 or more.
        window_s: how long both count, more than 0.
    """

    def __init__(
        self,
        share: float = RETRY_SHARE,
        least_per_s: float = LEAST_PER_S,
        window_s: float = WINDOW_S,
    ) -> None:
        self._share = share
        self._free = least_per_s * window_s
        self._slot_s = window_s / SLOTS
        self._slots: dict[int, list[int]] = {}  # requests and retries, by number of the slot

    def count_request(self, now_s: float) -> None:
        """Count a request, however often it is sent."""
        self._slot(now_s)[0] += 1

    def take_retry(self, now_s: float) -> bool:
        """Return whether a request may be sent again now, and count the retry if so."""
        slot = self._slot(now_s)
        requests, retries = map(sum, zip(*self._slots.values(), strict=True))
        allowed: bool = retries + 1 <= self._free + self._share * requests
        slot[1] += allowed
        return allowed

    def _slot(self, now_s: float) -> list[int]:
        """Return the present slot, and forget those outside the window."""
        number = int(now_s // self._slot_s)
        for old in [one for one in self._slots if one <= number - SLOTS]:
            del self._slots[old]
        return self._slots.setdefault(number, [0, 0])
