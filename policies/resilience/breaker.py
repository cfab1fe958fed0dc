"""A circuit breaker, which stops calls to a peer or upstream that does not respond.

closed ──failures──> open ──pause ends──> half open: a single probe ──answer──> closed
                       ^                            └─failure─> open, twice as long
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """The conditions under which a breaker opens, and the length of its pauses.

    Attributes:
        failures: number of consecutive failures that open it.
        timeouts_span_s: minimum seconds from the first to the last timeout of a streak of timeouts.
            If our own event loop stalls, all timeouts end together, whatever the state of the
            remote side.
        first_pause_s, longest_pause_s: seconds before the first probe, and the longest pause. Each
            pause is twice the previous pause.
    """

    failures: int
    timeouts_span_s: float
    first_pause_s: float
    longest_pause_s: float


class Breaker:
    """The state of a circuit breaker.

    All times are seconds of the same monotonic clock.

    Attributes:
        reason: cause of the open state, or None while the breaker is closed.
    """

    def __init__(self, patience: Patience) -> None:
        self.reason: str | None = None
        self._patience = patience
        self._until_s = 0.0
        self._streak_since_s = 0.0
        self.succeeded()

    def remaining_s(self, now_s: float) -> float:
        """Return the seconds until the next probe, or 0 if it is due or the breaker is closed."""
        return 0.0 if self.reason is None else max(0.0, self._until_s - now_s)

    def succeeded(self) -> None:
        """Record a response. Even an error response shows that the remote side is reachable."""
        self.reason = None
        self._streak = 0
        self._only_timeouts = True
        self._pause_s = self._patience.first_pause_s

    def failed(self, reason: str, now_s: float, *, timeout: bool = False) -> None:
        """Record a call without a response."""
        if self._streak == 0:
            self._streak_since_s = now_s
        self._streak += 1
        self._only_timeouts = self._only_timeouts and timeout
        if self.reason is not None:
            # Count only the probe of a half-open breaker, because other calls began before the
            # pause ended.
            if now_s >= self._until_s:
                self._pause_s = min(2 * self._pause_s, self._patience.longest_pause_s)
                self._open(reason, now_s)
        elif self._streak >= self._patience.failures and not self._may_be_a_stall(now_s):
            self._open(reason, now_s)

    def refuse(self, reason: str, now_s: float) -> None:
        """Open immediately, because the remote side was never reached."""
        self._open(reason, now_s)

    def _may_be_a_stall(self, now_s: float) -> bool:
        lasted_s = now_s - self._streak_since_s
        return self._only_timeouts and lasted_s < self._patience.timeouts_span_s

    def _open(self, reason: str, now_s: float) -> None:
        self.reason = reason
        self._until_s = now_s + self._pause_s
