"""Tests of Retry-After headers and of the observed speeds of upstreams."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from draftgate.backends.openai.pauses import retry_after_s
from draftgate.backends.openai.upstream_load import ObservedSpeed


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
def test_retry_after_accepts_seconds_and_dates(text: str | None, seconds: float | None) -> None:
    """The parser accepts seconds and all three date formats and ignores other values."""
    assert retry_after_s(text, datetime(2026, 11, 21, 12, tzinfo=UTC)) == seconds


def test_speed_is_per_choice() -> None:
    """The observed speed is per choice, and a single token gives no speed."""
    observed = ObservedSpeed()
    observed.add_stream(1.0, 1, 1, 1.0)
    assert observed.speed().tpot_s == 0.0
    observed.add_stream(1.0, 22, 2, 1.0)
    assert observed.speed().tpot_s == pytest.approx(0.1)
    observed.add_stream(2.0, 11, 1, 1.0)
    assert observed.speed().tpot_s == pytest.approx(0.12)


def test_speed_is_corrected_for_load() -> None:
    """The observed speed predicts the times at a lower or higher load."""
    observed = ObservedSpeed()
    for running in (1, 8, 16, 24, 32) * 12:
        observed.add_stream(0.1 * (20 + running), 101, 1, running)
    for running in (1, 20, 60):
        speed = observed.speed(running)
        assert speed.tpot_s == pytest.approx(0.001 * (20 + running), rel=0.05)
        assert speed.sequence_s == pytest.approx(0.001, rel=0.05)
    assert observed.speed(0) == observed.speed(1)
