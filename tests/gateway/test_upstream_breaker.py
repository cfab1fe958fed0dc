"""When an upstream is left alone, and what its pauses mean."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from backends.openai.breaker import (
    FAILURES,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    TIMEOUTS_SPAN_S,
    Breaker,
)
from backends.openai.retry_after import retry_after_s
from backends.openai.speed import ObservedSpeed


def test_failures_in_a_row_open_it() -> None:
    """Fewer do not, and an answer in between begins anew."""
    breaker = Breaker()
    for _ in range(FAILURES - 1):
        breaker.failed("down", 0.0)
    breaker.succeeded()
    for _ in range(FAILURES - 1):
        breaker.failed("down", 0.0)
    assert breaker.reason is None
    breaker.failed("gone", 0.0)
    assert (breaker.reason, breaker.remaining_s(0.25)) == ("gone", FIRST_PAUSE_S - 0.25)


def test_pauses_double_up_to_a_cap() -> None:
    """Each probe that fails doubles the wait; requests that fail meanwhile do not."""
    breaker, now_s, pauses = Breaker(), 0.0, []
    for _ in range(FAILURES):
        breaker.failed("down", now_s)
    for _ in range(8):
        pauses.append(breaker.remaining_s(now_s))
        breaker.failed("one that had begun before", now_s)
        assert breaker.remaining_s(now_s) == pauses[-1]
        now_s += pauses[-1]
        assert breaker.remaining_s(now_s) == 0.0
        breaker.failed("down", now_s)
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    breaker.succeeded()
    assert breaker.reason is None
    for _ in range(FAILURES):
        breaker.failed("down", now_s)
    assert breaker.remaining_s(now_s) == FIRST_PAUSE_S


def test_timeouts_alone_must_last() -> None:
    """A burst of timeouts is how a stall of our own event loop looks, and opens nothing."""
    breaker = Breaker()
    for _ in range(10 * FAILURES):
        breaker.failed("late", 0.0, timeout=True)
    breaker.failed("late", TIMEOUTS_SPAN_S - 0.1, timeout=True)
    assert breaker.reason is None
    breaker.failed("late", TIMEOUTS_SPAN_S, timeout=True)
    assert breaker.reason == "late"


def test_one_refused_connection_makes_a_streak_of_timeouts_an_outage() -> None:
    """Only timeouts may be our own fault."""
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker.failed("late", 0.0, timeout=True)
    breaker.failed("refused", 0.1)
    assert breaker.reason == "refused"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        (" 120 ", 120.0),
        ("Sat, 21 Nov 2026 12:00:30 GMT", 30.0),
        ("Saturday, 21-Nov-26 12:00:30 GMT", 30.0),
        ("Sat Nov 21 12:00:30 2026", 30.0),
        ("Sat, 21 Nov 2026 11:00:00 GMT", 0.0),
        ("-1", None),
        ("1.5", None),
        ("soon", None),
        ("9" * 400, None),
        ("\u0663", None),
        ("", None),
        (None, None),
    ],
)
def test_retry_after_is_read_in_all_its_forms(text: str | None, seconds: float | None) -> None:
    """Seconds and the three kinds of dates count; what is neither counts as not said."""
    assert retry_after_s(text, datetime(2026, 11, 21, 12, tzinfo=UTC)) == seconds


def test_speed_is_that_of_one_choice() -> None:
    """Two choices that share a stream each have half of its tokens; no gap shows nothing."""
    seen = ObservedSpeed()
    seen.streamed(1.0, 1, 1)
    assert seen.speed().tpot_s == 0.0
    seen.streamed(1.0, 22, 2)
    assert seen.speed().tpot_s == pytest.approx(0.1)
    seen.streamed(2.0, 11, 1)
    assert seen.speed().tpot_s == pytest.approx(0.12)
