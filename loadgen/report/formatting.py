"""Figures in words, the same in every report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from draftgate.loadgen.measuring.hops import Hop
from draftgate.loadgen.measuring.metrics import PERCENTILES, Metric
from draftgate.loadgen.measuring.slo import Attainment

NOTHING = "-"

HOP_COLUMNS: Final = ("hop", "requests", "intact", "as announced", "known of it")
HOP_FIGURE_COLUMNS: Final = ("hop", "figure", "mean", *(f"p{p}" for p in PERCENTILES))


def milliseconds(seconds: float | None) -> str:
    """Return a time in milliseconds: three digits, or all before the point."""
    if seconds is None:
        return NOTHING
    value = seconds * 1e3
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f} ms"


def number(value: float | None, digits: int = 2) -> str:
    """Return a number with so many digits after the point."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """Return a share with one digit after the point."""
    return NOTHING if share is None else f"{share:.1%}"


def value_of(figure: Metric, value: float | None) -> str:
    """Return a figure's value in its unit."""
    return milliseconds(value) if figure.in_seconds else number(value)


def share_of(counted: Attainment) -> str:
    """Return an attainment with its interval."""
    if counted.share is None:
        return NOTHING
    low, high = counted.interval
    return f"{counted.share:.1%} [{low:.1%}, {high:.1%}]"


def hop_row(hop: Hop) -> list[str]:
    """Return how many requests of a hop went well, by `HOP_COLUMNS`."""
    facts = (f"{fact}: {held} of {told}" for fact, (held, told) in hop.facts.items())
    counts = (hop.requests, hop.intact, hop.announced_met)
    return [hop.name, *map(str, counts), ", ".join(facts).replace("_", " ")]


def hop_figure_rows(hop: Hop) -> Iterator[list[str]]:
    """Yield the figures of a hop, by `HOP_FIGURE_COLUMNS`."""
    figures = (
        ("TTFT", hop.ttft_s, milliseconds),
        ("latency", hop.latency_s, milliseconds),
        ("of the deadline", hop.share, percent),
    )
    for name, found, in_words in figures:
        if found is not None:
            yield [hop.name, name, *map(in_words, (found.mean, *found.percentiles))]
