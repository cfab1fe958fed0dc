"""The circuit breaker."""

from __future__ import annotations

from draftgate.policies.resilience.breaker import Breaker, Patience

PATIENCE = Patience(failures=3, timeouts_span_s=5.0, first_pause_s=1.0, longest_pause_s=30.0)


def test_consecutive_failures_open_the_breaker() -> None:
    """Only consecutive failures open the breaker, and a success restarts the count."""
    breaker = Breaker(PATIENCE)
    for _ in range(PATIENCE.failures - 1):
        breaker.failed("down", 0.0)
    breaker.succeeded()
    for _ in range(PATIENCE.failures - 1):
        breaker.failed("down", 0.0)
    assert breaker.reason is None
    breaker.failed("gone", 0.0)
    assert breaker.reason == "gone"
    assert breaker.remaining_s(0.25) == PATIENCE.first_pause_s - 0.25


def test_pauses_double_up_to_a_cap() -> None:
    """Every failed probe doubles the pause, and other failures leave the pause unchanged."""
    breaker, now_s, pauses = Breaker(PATIENCE), 0.0, []
    for _ in range(PATIENCE.failures):
        breaker.failed("down", now_s)
    for _ in range(8):
        pauses.append(breaker.remaining_s(now_s))
        breaker.failed("one that had begun before", now_s)
        assert breaker.remaining_s(now_s) == pauses[-1]
        now_s += pauses[-1]
        assert breaker.remaining_s(now_s) == 0.0
        breaker.failed("down", now_s)
    first_s = PATIENCE.first_pause_s
    assert pauses[:3] == [first_s, 2 * first_s, 4 * first_s]
    assert pauses[-1] == PATIENCE.longest_pause_s
    breaker.succeeded()
    assert breaker.reason is None
    for _ in range(PATIENCE.failures):
        breaker.failed("down", now_s)
    assert breaker.remaining_s(now_s) == first_s


def test_short_burst_of_timeouts_does_not_open_the_breaker() -> None:
    """A short burst of timeouts does not open the breaker, because a stalled event loop causes such
    bursts."""
    breaker, span_s = Breaker(PATIENCE), PATIENCE.timeouts_span_s
    for _ in range(10 * PATIENCE.failures):
        breaker.failed("late", 0.0, timeout=True)
    breaker.failed("late", span_s - 0.1, timeout=True)
    assert breaker.reason is None
    breaker.failed("late", span_s, timeout=True)
    assert breaker.reason == "late"


def test_refused_connection_among_timeouts_opens_the_breaker() -> None:
    """A refused connection among timeouts opens the breaker, because a stalled gateway cannot cause
    it."""
    breaker = Breaker(PATIENCE)
    for _ in range(PATIENCE.failures):
        breaker.failed("late", 0.0, timeout=True)
    breaker.failed("refused", 0.1)
    assert breaker.reason == "refused"
