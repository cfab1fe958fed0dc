"""A circuit breaker: when to stop calling something that does not answer.

closed ──failures──> open ──pause ends──> half open: one probe ──answer──> closed
                       ^                            └─failure─> open, twice as long
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """When a breaker opens, and for how long.

    Attributes:
        failures: consecutive failures that open it.
        timeouts_span_s: least duration of a streak of timeouts alone. If our own event loop stalls,
            all running timeouts end at once, which says nothing about the other side.
        first_pause_s, longest_pause_s: the pause before the first probe, and the longest one; each
            pause is twice the previous one.
    """

    failures: int
    timeouts_span_s: float
    first_pause_s: float
    longest_pause_s: float


class Breaker:
    """Open while the other side is out. Times are seconds of any one monotonic clock.

    Attributes:
        reason: why it is open; None while it is closed.
    """

    def __init__(self, patience: Patience) -> None:
        self.reason: str | None = None
        self._patience = patience
        self._until_s = 0.0
        self._streak_since_s = 0.0
        self.succeeded()

    def remaining_s(self, now_s: float) -> float:
        """Return the seconds until the next probe; 0 if it is due or the breaker is closed."""
        return 0.0 if self.reason is None else max(0.0, self._until_s - now_s)

    def succeeded(self) -> None:
        """Record an answer, whatever it says: the other side is reachable."""
        self.reason = None
        self._streak = 0
        self._only_timeouts = True
        self._pause_s = self._patience.first_pause_s

    def failed(self, reason: str, now_s: float, *, timeout: bool = False) -> None:
        """Record a call without an answer."""
        if self._streak == 0:
            self._streak_since_s = now_s
        self._streak += 1
        self._only_timeouts = self._only_timeouts and timeout
        if self.reason is not None:
            # Only a probe of the half-open state counts; other calls began before the pause ended.
            if now_s >= self._until_s:
                self._pause_s = min(2 * self._pause_s, self._patience.longest_pause_s)
                self._open(reason, now_s)
        elif self._streak >= self._patience.failures and not self._may_be_a_stall(now_s):
            self._open(reason, now_s)

    def refuse(self, reason: str, now_s: float) -> None:
        """Open at once, without a streak: the other side has never been reached."""
        self._open(reason, now_s)

    def _may_be_a_stall(self, now_s: float) -> bool:
        lasted_s = now_s - self._streak_since_s
        return self._only_timeouts and lasted_s < self._patience.timeouts_span_s

    def _open(self, reason: str, now_s: float) -> None:
        self.reason = reason
        self._until_s = now_s + self._pause_s
