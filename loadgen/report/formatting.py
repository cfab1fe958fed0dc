"""Formats values in the same way for every report."""

from __future__ import annotations

from draftgate.loadgen.measuring.metrics import Metric
from draftgate.loadgen.measuring.slo import Attainment

NOTHING = "-"


def milliseconds(seconds: float | None) -> str:
    """Return a time in milliseconds with three significant digits, or as a whole number."""
    if seconds is None:
        return NOTHING
    value = seconds * 1e3
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f} ms"


def number(value: float | None, digits: int = 2) -> str:
    """Return a number with that many digits after the decimal point."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """Return a share as a percentage with one decimal digit."""
    return NOTHING if share is None else f"{share:.1%}"


def metric_value(metric: Metric, value: float | None) -> str:
    """Return a value of a metric in its unit."""
    return milliseconds(value) if metric.in_seconds else number(value)


def attainment_interval(counted: Attainment) -> str:
    """Return an attainment with its interval."""
    if counted.share is None:
        return NOTHING
    return f"{counted.share:.1%} {interval(counted)}"


def interval(counted: Attainment) -> str:
    """Return the interval of an attainment, in percent."""
    low, high = counted.interval
    return f"[{low * 100:.1f}, {high * 100:.1f}]"
