"""When to leave an upstream alone, decided from what it did. Values in, values out.

closed ──failures──> open ──the time is over──> half open: one probe ──answer──> closed
                       ^                                 └─failure─> open, twice as long
"""

from __future__ import annotations

from typing import Final

FAILURES: Final = 3
"""Failures in a row that open it: one may be a connection that the upstream closed when idle."""

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
"""Between probes of what is down: a restart of an engine takes tens of seconds to minutes."""

TIMEOUTS_SPAN_S: Final = 5.0
"""A streak of timeouts alone must last this long: if our own event loop stalls, every timeout that
was running ends at once, which says nothing of the upstream."""


class Breaker:
    """Open while an upstream is out. Times are of any one monotonic clock, in seconds.

    Attributes:
        reason: why it is open; None while it is closed.
    """

    def __init__(self) -> None:
        """Begin closed."""
        self.reason: str | None = None
        self._until_s = 0.0
        self._streak_since_s = 0.0
        self.succeeded()

    def remaining_s(self, now_s: float) -> float:
        """Return how long until the next probe; 0 when it is due, or while closed."""
        return 0.0 if self.reason is None else max(0.0, self._until_s - now_s)

    def succeeded(self) -> None:
        """Note an answer, whatever it says: the upstream is there."""
        self.reason = None
        self._streak = 0
        self._only_timeouts = True
        self._pause_s = FIRST_PAUSE_S

    def failed(self, reason: str, now_s: float, *, timeout: bool = False) -> None:
        """Note that no answer came."""
        if self._streak == 0:
            self._streak_since_s = now_s
        self._streak += 1
        self._only_timeouts = self._only_timeouts and timeout
        if self.reason is not None:
            if now_s >= self._until_s:  # the probe of the half-open state; others began before
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
                self._open(reason, now_s)
        elif self._streak >= FAILURES and not self._may_be_a_stall(now_s):
            self._open(reason, now_s)

    def refuse(self, reason: str, now_s: float) -> None:
        """Open at once: it has not been reached yet, so there is no streak to wait for."""
        self._open(reason, now_s)

    def _may_be_a_stall(self, now_s: float) -> bool:
        return self._only_timeouts and now_s - self._streak_since_s < TIMEOUTS_SPAN_S

    def _open(self, reason: str, now_s: float) -> None:
        self.reason = reason
        self._until_s = now_s + self._pause_s
