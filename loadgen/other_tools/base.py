"""What the dialects share: the form of an account, and what any client notices."""

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
"""Ends that every tool counts as failures. The two timeouts are ours: theirs are hours."""


@dataclass(frozen=True, slots=True)
class Count:
    """A single figure; None where the tool would show none."""

    name: str
    value: float | None
    formula: str


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in milliseconds; `values` by column, None where the tool would show none."""

    name: str
    values: Mapping[str, float] | None
    formula: str


@dataclass(frozen=True, slots=True)
class Account:
    """What a tool says of a run.

    Attributes:
        tool: its name and the version whose definitions these are.
        columns: of the spreads, as the tool names them.
        remarks: what the tool does not see, or our records do not hold.
    """

    tool: str
    columns: tuple[str, ...]
    counts: tuple[Count, ...]
    spreads: tuple[Spread, ...]
    remarks: tuple[str, ...]


def told_error(record: Record) -> bool:
    """Whether the stream held an error event; a finish reason that tells of one is none."""
    aborted = any(reason in ABORTS for reason in record.finish_reasons)
    return record.verdict == Verdict.ERROR_EVENT and not aborted


def linear(
    name: str, formula: str, seconds: Sequence[float], columns: Mapping[str, float | None]
) -> Spread:
    """Return a distribution with numpy's percentiles; a column without a share is the mean."""
    if not seconds:
        return Spread(name, None, formula)
    known = sorted(seconds)
    values = {
        column: (sum(known) / len(known) if share is None else percentile(known, share)) * 1e3
        for column, share in columns.items()
    }
    return Spread(name, values, formula)


def weighted_percentile(ascending: Sequence[tuple[float, float]], share: float) -> float:
    """Return the first of (value, weight) pairs at which that share of all weight is reached."""
    reached = list(accumulate(weight for _, weight in ascending))
    wanted = share * reached[-1] * (1 - 1e-12)  # sums of floats fall short of themselves
    return next(v for (v, _), r in zip(ascending, reached, strict=True) if r >= wanted)


def rate(count: float, seconds: float) -> float | None:
    """Return a count per second; None of no time."""
    return count / seconds if seconds > 0 else None


def within(value: float | None, limit: float | None) -> bool:
    """Whether a limit that was set is met; a value that is missing does not meet it."""
    return limit is None or (value is not None and value <= limit)
