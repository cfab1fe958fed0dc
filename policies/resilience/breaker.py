"""When to leave alone what does not answer, decided from what it did. Values in, values out.

closed ──failures──> open ──the time is over──> half open: one probe ──answer──> closed
                       ^                                 └─failure─> open, twice as long
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """When a breaker opens, and how long it waits.

    Attributes:
        failures: how many in a row open it.
        timeouts_span_s: a streak of timeouts alone must last this long: if our own event loop
            stalls, every timeout that was running ends at once, which says nothing of the other
            side.
        first_pause_s, longest_pause_s: before the first probe, and between two of what stays down;
            each pause is twice the one before.
    """

    failures: int
    timeouts_span_s: float
    first_pause_s: float
    longest_pause_s: float


class Breaker:
    """Open while the other side is out. Times are of any one monotonic clock, in seconds.

    Attributes:
        reason: why it is open; None while it is closed.
    """

    def __init__(self, patience: Patience) -> None:
        """Begin closed."""
        self.reason: str | None = None
        self._patience = patience
        self._until_s = 0.0
        self._streak_since_s = 0.0
        self.succeeded()

    def remaining_s(self, now_s: float) -> float:
        """Return how long until the next probe; 0 when it is due, or while closed."""
        return 0.0 if self.reason is None else max(0.0, self._until_s - now_s)

    def succeeded(self) -> None:
        """Note an answer, whatever it says: the other side is there."""
        self.reason = None
        self._streak = 0
        self._only_timeouts = True
        self._pause_s = self._patience.first_pause_s

    def failed(self, reason: str, now_s: float, *, timeout: bool = False) -> None:
        """Note that no answer came."""
        if self._streak == 0:
            self._streak_since_s = now_s
        self._streak += 1
        self._only_timeouts = self._only_timeouts and timeout
        if self.reason is not None:
            if now_s >= self._until_s:  # the probe of the half-open state; others began before
                self._pause_s = min(2 * self._pause_s, self._patience.longest_pause_s)
                self._open(reason, now_s)
        elif self._streak >= self._patience.failures and not self._may_be_a_stall(now_s):
            self._open(reason, now_s)

    def refuse(self, reason: str, now_s: float) -> None:
        """Open at once: it has not been reached yet, so there is no streak to wait for."""
        self._open(reason, now_s)

    def _may_be_a_stall(self, now_s: float) -> bool:
        lasted_s = now_s - self._streak_since_s
        return self._only_timeouts and lasted_s < self._patience.timeouts_span_s

    def _open(self, reason: str, now_s: float) -> None:
        self.reason = reason
        self._until_s = now_s + self._pause_s
