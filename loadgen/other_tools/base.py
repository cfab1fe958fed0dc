"""The form of a report by the definitions of another tool, and shared helpers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from draftgate.loadgen.checking.audit import ABORTS, Verdict
from draftgate.loadgen.measuring.metrics import percentile
from draftgate.loadgen.types import Record

BROKEN: Final = frozenset(
    {
        Verdict.NO_CONNECTION,
        Verdict.HTTP_STATUS,
        Verdict.NO_STREAM,
        Verdict.CUT,
        Verdict.TIMEOUT,
        Verdict.STALLED,
        Verdict.INTERRUPTED,
    }
)
"""Verdicts that every tool counts as failures. Only Draftgate's load generator has the two
timeouts, because those of the tools are hours."""


@dataclass(frozen=True, slots=True)
class ToolCount:
    """A single value, or None where the tool would show no value."""

    name: str
    value: float | None
    formula: str


def make_counts(*rows: tuple[str, float | None, str]) -> tuple[ToolCount, ...]:
    """Return the counts of (name, value, formula) rows."""
    return tuple(ToolCount(*row) for row in rows)


@dataclass(frozen=True, slots=True)
class ToolDistribution:
    """A distribution in milliseconds, by column, with None where the tool would show no value."""

    name: str
    values: Mapping[str, float] | None
    formula: str


@dataclass(frozen=True, slots=True)
class ToolReport:
    """A report about a run by the definitions of a tool.

    Attributes:
        tool: its name and the version of its definitions.
        columns: the columns of the distributions, with the tool's names.
        remarks: values that the tool does not see, or that the records do not hold.
    """

    tool: str
    columns: tuple[str, ...]
    counts: tuple[ToolCount, ...]
    distributions: tuple[ToolDistribution, ...]
    remarks: tuple[str, ...]


def has_error_event(record: Record) -> bool:
    """Whether the stream held an error event. The finish reason `abort` is no error event."""
    aborted = any(reason in ABORTS for reason in record.finish_reasons)
    return record.verdict == Verdict.ERROR_EVENT and not aborted


def interpolated(
    name: str, formula: str, seconds: Sequence[float], columns: Mapping[str, float | None]
) -> ToolDistribution:
    """Return a distribution with interpolated percentiles. A column without a share is the mean."""
    if not seconds:
        return ToolDistribution(name, None, formula)
    known = sorted(seconds)
    values = {
        column: (sum(known) / len(known) if share is None else percentile(known, share)) * 1e3
        for column, share in columns.items()
    }
    return ToolDistribution(name, values, formula)


def weighted_percentile(ascending: Sequence[tuple[float, float]], share: float) -> float:
    """Return the first of (value, weight) pairs at which that share of all weight is reached."""
    reached = list(accumulate(weight for _, weight in ascending))
    wanted = (
        share * reached[-1] * (1 - 1e-12)
    )  # Rounding may leave the running sum below the total.
    return next(v for (v, _), r in zip(ascending, reached, strict=True) if r >= wanted)


def per_second(count: float, seconds: float) -> float | None:
    """Return a count per second, or None without a duration."""
    return count / seconds if seconds > 0 else None


def within(value: float | None, limit: float | None) -> bool:
    """Whether a value meets a limit. Any value meets a limit of None, and None meets no limit."""
    return limit is None or (value is not None and value <= limit)
