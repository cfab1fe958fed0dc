"""What the definitions of other tools share: the form of a report, and helpers."""

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
"""Endings that every tool counts as failures. The two timeouts are ours; theirs are hours."""


@dataclass(frozen=True, slots=True)
class ToolCount:
    """A single value; None where the tool would show none."""

    name: str
    value: float | None
    formula: str


def make_counts(*rows: tuple[str, float | None, str]) -> tuple[ToolCount, ...]:
    """Return the counts of (name, value, formula) rows."""
    return tuple(ToolCount(*row) for row in rows)


@dataclass(frozen=True, slots=True)
class ToolDistribution:
    """A distribution in milliseconds, by column; None where the tool would show none."""

    name: str
    values: Mapping[str, float] | None
    formula: str


@dataclass(frozen=True, slots=True)
class ToolReport:
    """What a tool would report about a run.

    Attributes:
        tool: its name and the version whose definitions these are.
        columns: of the distributions, as the tool names them.
        remarks: what the tool does not see, or our records do not hold.
    """

    tool: str
    columns: tuple[str, ...]
    counts: tuple[ToolCount, ...]
    distributions: tuple[ToolDistribution, ...]
    remarks: tuple[str, ...]


def has_error_event(record: Record) -> bool:
    """Whether the stream held an error event. An abort as a finish reason is not one."""
    aborted = any(reason in ABORTS for reason in record.finish_reasons)
    return record.verdict == Verdict.ERROR_EVENT and not aborted


def interpolated(
    name: str, formula: str, seconds: Sequence[float], columns: Mapping[str, float | None]
) -> ToolDistribution:
    """Return a distribution with interpolated percentiles; a column without a share is the mean."""
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
    wanted = share * reached[-1] * (1 - 1e-12)  # sums of floats may fall short of themselves
    return next(v for (v, _), r in zip(ascending, reached, strict=True) if r >= wanted)


def rate(count: float, seconds: float) -> float | None:
    """Return a count per second; None without a duration."""
    return count / seconds if seconds > 0 else None


def within(value: float | None, limit: float | None) -> bool:
    """Whether a limit is met, if there is one. A missing value does not meet it."""
    return limit is None or (value is not None and value <= limit)
