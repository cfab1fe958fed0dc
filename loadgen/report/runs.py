"""Groups runs by name (a server, a policy) and by offered rate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftgate.loadgen.checking.lossless import LosslessCheck
from draftgate.loadgen.measuring.metrics import METRICS, PERCENTILES, distribution, values_of
from draftgate.loadgen.measuring.slo import attainment, goodput_rps
from draftgate.loadgen.measuring.summary import accepted_tokens_per_s, schedule_s
from draftgate.loadgen.sending.health import invalid_reasons
from draftgate.loadgen.types import LoadRun, Record


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run to report on.

    Attributes:
        name: the name of the server or policy. Runs of one name are points of one curve.
        lossless: the result of the lossless check, or None.
    """

    name: str
    run: LoadRun
    lossless: LosslessCheck | None = None


@dataclass(frozen=True, slots=True)
class RatePoint:
    """The pooled valid runs of one name at one rate, or all its runs if every run is INVALID.

    Attributes:
        rate_rps: offered requests per second, or None if unknown.
        left_out: the number of INVALID runs that the pool excludes.
    """

    name: str
    rate_rps: float | None
    runs: tuple[LoadRun, ...]
    left_out: int = 0

    @property
    def records(self) -> list[Record]:
        """The records of all runs."""
        return [record for run in self.runs for record in run.records]

    @property
    def valid(self) -> bool:
        """Whether its runs are valid."""
        return not any(map(invalid_reasons, self.runs))

    @property
    def label(self) -> str:
        """Its name, and the number of its INVALID runs."""
        if not self.valid:
            return f"{self.name} (INVALID)"
        return f"{self.name} ({self.left_out} INVALID left out)" if self.left_out else self.name

    @property
    def goodput_rps(self) -> float | None:
        """Requests that met their SLO per second of all schedules."""
        return goodput_rps(attainment(self.records).met, sum(map(schedule_s, self.runs)))

    @property
    def accepted_tokens_per_s(self) -> float | None:
        """The mean of accepted tokens per second over the runs."""
        known = [value for run in self.runs if (value := accepted_tokens_per_s(run)) is not None]
        return sum(known) / len(known) if known else None

    def percentiles(self, key: str) -> dict[int, float]:
        """Return the percentiles of a metric in its unit, or nothing without values."""
        found = distribution(values_of(METRICS[key], self.records))
        return {} if found is None else dict(zip(PERCENTILES, found.percentiles, strict=True))


def rate_of(run: LoadRun) -> float | None:
    """Return the offered rate: as requested, or else requests over seconds of the schedule."""
    requested = run.settings.get("rate_rps")
    if isinstance(requested, int | float):
        return float(requested)
    return len(run.records) / schedule_s(run) if run.scheduled_duration_s else None


def name_of(path: Path, run: LoadRun) -> str:
    """Return the name of a run's file without rate and round (`auto` for `auto-1.5-2.jsonl`)."""
    stem = path.name.partition(".jsonl")[0]
    rate = rate_of(run)
    return stem if rate is None else re.sub(rf"-{re.escape(f'{rate:g}')}(-\d+)?$", "", stem) or stem


def points(reports: Sequence[RunReport]) -> list[RatePoint]:
    """Return the runs by name, in the order of first appearance, and by ascending rate."""
    grouped: dict[str, dict[float | None, list[LoadRun]]] = {}
    for report in reports:
        by_rate = grouped.setdefault(report.name, {})
        by_rate.setdefault(rate_of(report.run), []).append(report.run)
    found = []
    for name, by_rate in grouped.items():
        for rate in sorted(by_rate, key=lambda rate: -1.0 if rate is None else rate):
            runs = by_rate[rate]
            kept = [run for run in runs if not invalid_reasons(run)] or runs
            found.append(RatePoint(name, rate, tuple(kept), len(runs) - len(kept)))
    return found
