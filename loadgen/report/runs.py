"""Several runs side by side: by name (a server, a policy), and by the rate at which was asked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from draftgate.loadgen.checking.lossless import LosslessCheck
from draftgate.loadgen.measuring.metrics import (
    METRICS,
    PERCENTILES,
    distribution,
    errors,
    values_of,
)
from draftgate.loadgen.measuring.slo import attainment, goodput_rps
from draftgate.loadgen.measuring.summary import accepted_tokens_per_s, invalid_reasons, schedule_s
from draftgate.loadgen.report.formatting import milliseconds, number, percent
from draftgate.loadgen.types import LoadRun, Record

HEAD: Final = (
    *("run", "rate/s", "requests", "failed", "as promised", "[95 %]", "goodput/s", "tokens/s"),
    *("TTFT p50", "p99", "TPOT p50", "p99", "latency p50", "p99"),
)
NARROW: Final = (0, 1, 3, 4, 6, 8, 9, 10, 11)
"""Places of what a terminal of 80 columns holds."""

TIMES_IN_MS: Final = "Times in ms, of intact answers from their scheduled instants."
IN_ROWS: Final = ("ttft_s", "tpot_s", "latency_s")


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run to report on.

    Attributes:
        name: of what was under load; runs of one name are points of one curve.
        lossless: what replaying showed, if it was done.
    """

    name: str
    run: LoadRun
    lossless: LosslessCheck | None = None


@dataclass(frozen=True, slots=True)
class RatePoint:
    """The valid runs of one name at one rate, pooled; if none is valid, all of them.

    Attributes:
        rate_rps: offered requests per second; None if no run tells.
        left_out: INVALID runs beside valid ones.
    """

    name: str
    rate_rps: float | None
    runs: tuple[LoadRun, ...]
    left_out: int = 0

    @property
    def records(self) -> list[Record]:
        """Of all runs."""
        return [record for run in self.runs for record in run.records]

    @property
    def valid(self) -> bool:
        """Whether its runs are."""
        return not any(map(invalid_reasons, self.runs))

    @property
    def label(self) -> str:
        """Its name, and what is not to be believed."""
        if not self.valid:
            return f"{self.name} (INVALID)"
        return f"{self.name} ({self.left_out} INVALID left out)" if self.left_out else self.name

    @property
    def goodput_rps(self) -> float | None:
        """Requests met per second of all schedules."""
        return goodput_rps(attainment(self.records).met, sum(map(schedule_s, self.runs)))

    @property
    def accepted_tokens_per_s(self) -> float | None:
        """The mean over the runs."""
        told = [value for run in self.runs if (value := accepted_tokens_per_s(run)) is not None]
        return sum(told) / len(told) if told else None

    def percentiles(self, key: str) -> dict[int, float]:
        """Return a figure's percentiles in its unit; empty without values."""
        found = distribution(values_of(METRICS[key], self.records))
        return {} if found is None else dict(zip(PERCENTILES, found.percentiles, strict=True))


def rate_of(run: LoadRun) -> float | None:
    """Return the offered rate: as asked for, else requests over seconds of the schedule."""
    asked = run.settings.get("rate_rps")
    if isinstance(asked, int | float):
        return float(asked)
    return len(run.records) / schedule_s(run) if run.scheduled_duration_s else None


def name_of(path: Path, run: LoadRun) -> str:
    """Return the name of a run from its file's: without its rate and round, `auto-1.5-2.jsonl`."""
    stem = path.name.partition(".jsonl")[0]
    rate = rate_of(run)
    return stem if rate is None else re.sub(rf"-{re.escape(f'{rate:g}')}(-\d+)?$", "", stem) or stem


def points(reports: Sequence[RunReport]) -> list[RatePoint]:
    """Return the runs by name, in the order of their first, and by ascending rate."""
    grouped: dict[str, dict[float | None, list[LoadRun]]] = {}
    for report in reports:
        by_rate = grouped.setdefault(report.name, {})
        by_rate.setdefault(rate_of(report.run), []).append(report.run)
    return [
        _point(name, rate, by_rate[rate])
        for name, by_rate in grouped.items()
        for rate in sorted(by_rate, key=lambda rate: -1.0 if rate is None else rate)
    ]


def _point(name: str, rate_rps: float | None, runs: Sequence[LoadRun]) -> RatePoint:
    valid = [run for run in runs if not invalid_reasons(run)]
    return RatePoint(name, rate_rps, tuple(valid or runs), len(runs) - len(valid or runs))


def row(point: RatePoint) -> Iterator[str]:
    """Yield the words of a line under `HEAD`."""
    counted = attainment(point.records)
    yield point.label
    yield number(point.rate_rps)
    yield str(counted.requests)
    yield str(sum(errors(point.records).values()))
    yield percent(counted.share)
    yield f"[{counted.interval.low:.1%}, {counted.interval.high:.1%}]"
    yield number(point.goodput_rps)
    yield number(point.accepted_tokens_per_s, 1)
    for key in IN_ROWS:
        known = point.percentiles(key)
        yield from (milliseconds(known.get(p)).removesuffix(" ms") for p in (50, 99))
