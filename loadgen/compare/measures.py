"""Defines metrics as functions of how often each request counts, which a resample changes.

Requests are in the order of their schedule. If each request counts once, a measure equals the value
in the reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.measuring.confidence import Counts, Floats
from draftgate.loadgen.measuring.metrics import METRICS, completion_tokens
from draftgate.loadgen.measuring.slo import meets_slo
from draftgate.loadgen.measuring.summary import schedule_s
from draftgate.loadgen.types import LoadRun, Record

QUANTILES: Final = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
LEAST_BEYOND: Final = 5
"""Least requests with values beyond a percentile. With fewer, the percentile depends on single
requests, which resampling cannot represent (the usual rule of thumb, n(1 - p) >= 5)."""

HIGHER_IS_BETTER: Final = frozenset(
    {"fluidity", "attainment", "goodput_rps", "accepted_tokens_per_s"}
)


class Measure(Protocol):
    """P statistics of one metric of a run with N requests."""

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of the statistics. The empty name is the metric itself."""

    @property
    def terms(self) -> int:
        """The number of values that the measure reads per resample."""

    def evaluate(self, counts: Counts) -> Floats:
        """Return the statistics `[R, P]` of resamples `[R, N]`, with NaN for missing values."""

    def influences(self) -> Floats:
        """Return what each request adds to each statistic `[P, N]`, up to a factor."""


@dataclass(frozen=True, slots=True)
class RatioMeasure:
    """`scale * sum(above) / sum(below)`: means, shares and rates. Terms are per request, `[N]`."""

    above: Floats
    below: Floats
    scale: float = 1.0
    statistics: tuple[str, ...] = ("",)

    @property
    def terms(self) -> int:
        return len(self.above)

    def evaluate(self, counts: Counts) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            shares: Floats = self.scale * (counts @ self.above) / (counts @ self.below)
        return shares[:, None]

    def influences(self) -> Floats:
        share = self.above.sum() / self.below.sum()
        added: Floats = (self.above - share * self.below)[None, :]
        return added


@dataclass(frozen=True, slots=True)
class PercentileMeasure:
    """Percentiles (type 7) of values pooled over requests.

    Attributes:
        values: the values in ascending order, `[V]`.
        owners: the request of each value, `[V]`.
        requests: the number of requests, N.
    """

    values: Floats
    owners: Counts
    requests: int
    statistics: tuple[str, ...]

    @property
    def terms(self) -> int:
        return len(self.values)

    def evaluate(self, counts: Counts) -> Floats:
        upto = np.cumsum(counts[:, self.owners], axis=1)
        total = upto[:, -1]
        found = np.full((len(counts), len(self.statistics)), np.nan)
        some = total > 0
        for column, name in enumerate(self.statistics):
            place = (total[some] - 1) * QUANTILES[name]
            low, high = np.floor(place), np.ceil(place)
            below, above = self._at(upto[some], low), self._at(upto[some], high)
            found[some, column] = below + (above - below) * (place - low)
        return found

    def influences(self) -> Floats:
        found = np.empty((len(self.statistics), self.requests))
        each = np.bincount(self.owners, minlength=self.requests)
        for row, name in enumerate(self.statistics):
            most = np.quantile(self.values, QUANTILES[name])
            within = np.bincount(self.owners[self.values <= most], minlength=self.requests)
            found[row] = QUANTILES[name] * each - within
        return found

    def _at(self, upto: Counts, place: Floats) -> Floats:
        """Return the values at positions (from 0) of the resamples."""
        found: Floats = self.values[(upto <= place[:, None]).sum(axis=1)]
        return found


def measures(run: LoadRun) -> dict[str, Measure]:
    """Return the measures for which a run has values, by the metric's key."""
    records = sorted(run.records, key=lambda r: (r.scheduled_s, r.planned.index))
    found: dict[str, Measure] = {}
    for key in ("ttft_s", "tpot_s", "latency_s", "chunk_gap_s"):
        if (percentiles := _percentiles(key, records)) is not None:
            found[key] = percentiles
    fluid = [_values("fluidity", record) for record in records]
    if any(fluid):
        sums, each = np.array([sum(v) for v in fluid]), np.array([float(len(v)) for v in fluid])
        found["fluidity"] = RatioMeasure(sums, each, statistics=("mean",))
    return found | _rates(run, records)


def _percentiles(key: str, records: Sequence[Record]) -> PercentileMeasure | None:
    by_request = [_values(key, record) for record in records]
    values = np.array([value for own in by_request for value in own])
    owners = np.repeat(np.arange(len(records)), [len(own) for own in by_request])
    if not len(values):
        return None

    def enough_beyond(name: str) -> bool:
        beyond = owners[values >= np.quantile(values, QUANTILES[name])]
        return len(np.unique(beyond)) >= LEAST_BEYOND

    names = tuple(filter(enough_beyond, QUANTILES))
    order = np.argsort(values, kind="stable")
    return PercentileMeasure(values[order], owners[order], len(records), names) if names else None


def _values(key: str, record: Record) -> Sequence[float]:
    return METRICS[key].values(record) if record.verdict == Verdict.OK else ()


def _rates(run: LoadRun, records: Sequence[Record]) -> dict[str, Measure]:
    """Return the measures of attainment and of the rates.

    A rate is a ratio, because the length of a resample varies. Each request contributes the time
    since the previous end. Goodput in an open loop uses the schedule instead, and each request
    contributes the time until the next scheduled request.
    """
    kept = np.array([float(meets_slo(record)) for record in records])
    tokens = np.array(
        [float(completion_tokens(r) or 0) * (r.verdict == Verdict.OK) for r in records]
    )
    found: dict[str, Measure] = {"attainment": RatioMeasure(kept, np.ones(len(records)))}
    ended_s = _since_last_end_s(records)
    closed = run.scheduled_duration_s is None
    for key, terms, taken_s, length_s in (
        ("goodput_rps", kept, ended_s if closed else _until_next_s(run, records), schedule_s(run)),
        ("accepted_tokens_per_s", tokens, ended_s, run.duration_s),
    ):
        if length_s > 0 and terms.any() and taken_s.sum() > 0:
            found[key] = RatioMeasure(terms, taken_s, float(taken_s.sum()) / length_s)
    return found


def _until_next_s(run: LoadRun, records: Sequence[Record]) -> Floats:
    instants = np.array([record.scheduled_s for record in records] or [0.0])
    return np.diff(instants, append=max(schedule_s(run), instants[-1]))


def _since_last_end_s(records: Sequence[Record]) -> Floats:
    ends = np.array([record.end_s for record in records])
    order = np.argsort(ends, kind="stable")
    since = np.empty(len(ends))
    since[order] = np.diff(ends[order], prepend=0.0)
    return since
