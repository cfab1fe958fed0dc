"""Computes the changes between two runs with confidence intervals, and judges regressions.

The change of each statistic s is `s(B) - s(A)`. Its standard error SE is estimated from stationary
bootstrap resamples of requests (`measuring.confidence`), and its 95 % confidence interval is
`change -+ t SE`. t is the quantile of Student's t distribution with `n/b - 1` degrees of freedom,
for n requests in blocks of mean length b. If both runs had the same requests at the same times, a
resample takes the same requests from both runs. Differences between requests then cancel. Otherwise
each run is resampled independently.

A statistic is *worse* if it worsened significantly by more than its threshold, which is 0 by
default. It is *better* if it improved significantly. The family-wise error rate of either verdict
over all statistics is 2.5 % (Holm, Scandinavian Journal of Statistics 6, 1979). If two runs are
identical, one comparison in forty reports a regression, regardless of the number of metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import copysign, inf, isfinite
from typing import Final

import numpy as np

from draftgate.loadgen.compare.measures import HIGHER_IS_BETTER, QUANTILES, Measure, measures
from draftgate.loadgen.measuring.confidence import (
    REPLICATES,
    Floats,
    block_length,
    resampled_counts,
    student_quantile,
    student_tail,
)
from draftgate.loadgen.sending.health import invalid_reasons
from draftgate.loadgen.types import LoadRun, Slo

ERROR: Final = 0.025
"""Error on either side, for 95 % intervals."""

_LEAST_REQUESTS: Final = 20
"""Least requests of a run. The comparison needs even more requests if blocks are long."""

CELLS: Final = 4_000_000
"""Most values of resamples in memory, 32 MB per table."""

IGNORED_SETTINGS: Final = frozenset(
    {"started", "generator", "verify_lossless", "characters_per_token"}
)

STATISTICS: Final = {
    **dict.fromkeys(("ttft_s", "tpot_s", "latency_s", "chunk_gap_s"), tuple(QUANTILES)),
    "fluidity": ("mean",),
    **dict.fromkeys(("attainment", "goodput_rps", "accepted_tokens_per_s"), ("",)),
}
"""The statistics to compare, by metric."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """The largest worsening of a statistic that is not a regression.

    Attributes:
        relative: as a share of A's value.
        absolute: in the metric's unit.
    """

    key: str
    statistic: str
    relative: float = 0.0
    absolute: float = 0.0

    def __str__(self) -> str:
        most = f"{self.relative * 100:g}%" if self.relative else f"{self.absolute:g}"
        return ":".join(part for part in (self.key, self.statistic, most) if part)


def parse_threshold(text: str) -> Threshold:
    """Return the threshold `METRIC[:STATISTIC]:MOST`, e.g. `ttft_s:p90:5%`.

    Raises:
        ValueError: the metric or statistic is unknown, or the threshold is not a number.
    """
    key, *rest = text.split(":")
    statistics = STATISTICS.get(key)
    if statistics is None:
        raise ValueError(f"threshold {text!r}: metric must be one of {', '.join(STATISTICS)}")
    if not rest:
        raise ValueError(f"threshold {text!r}: expected a number or percentage, as in {text}:5%")
    *named, most = rest
    statistic = ":".join(named) or statistics[0]
    if statistic not in statistics or (not named and len(statistics) > 1):
        raise ValueError(f"threshold {text!r}: statistic must be one of {', '.join(statistics)}")
    try:
        value = float(most.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not isfinite(value) or value < 0:
        raise ValueError(f"threshold {text!r}: {most!r} is neither a number nor a percentage")
    if most.endswith("%"):
        return Threshold(key, statistic, relative=value / 100)
    return Threshold(key, statistic, absolute=value)


@dataclass(frozen=True, slots=True)
class Change:
    """A statistic in both runs.

    Attributes:
        interval: the 95 % interval of `change`, for this statistic alone.
        p_worse: the chance of such a worsening if the true change equals the threshold.
        p_better: the chance of such an improvement without a true change.
        judged: whether the statistic counts for the verdict.
        verdict: `worse`, `better` or empty, with Holm's correction over all judged statistics.
        block: the mean length of the resampled blocks, in requests.
    """

    key: str
    statistic: str
    a: float
    b: float
    interval: tuple[float, float]
    p_worse: float
    p_better: float
    block: float
    threshold: Threshold | None = None
    judged: bool = True
    verdict: str = ""

    @property
    def change(self) -> float:
        """B minus A."""
        return self.b - self.a

    @property
    def relative(self) -> float | None:
        """The change as a share of A's value."""
        return self.change / abs(self.a) if self.a else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing run B with run A.

    Attributes:
        requests: the numbers of requests of A and B.
        paired: whether both runs had the same requests at the same times.
        settings: the settings in which the runs differ, with both values.
        invalid: the reasons why either run is INVALID.
    """

    requests: tuple[int, int]
    paired: bool
    settings: dict[str, tuple[object, object]]
    invalid: list[str]
    changes: list[Change]

    @property
    def regressed(self) -> bool:
        """Whether any statistic is worse."""
        return any(change.verdict == "worse" for change in self.changes)


def compare_runs(a: LoadRun, b: LoadRun, thresholds: Sequence[Threshold] = ()) -> Comparison:
    """Compare B with A. If thresholds are given, judge only their statistics.

    The same runs give the same result.

    Raises:
        ValueError: the runs cannot be compared, because they have too few requests or different
            SLOs, or because either run lacks the metric of a threshold.
    """
    for name, run in (("A", a), ("B", b)):
        if len(run.records) < _LEAST_REQUESTS:
            raise ValueError(
                f"{name} has {len(run.records)} requests, fewer than {_LEAST_REQUESTS}"
            )
    if slos(a) != slos(b):
        raise ValueError("the runs have different classes or SLOs, so they cannot be compared")
    paired = plan_of(a) == plan_of(b)
    ours, theirs = measures(a), measures(b)
    allowed = {(one.key, one.statistic): one for one in thresholds}
    found = [
        replace(change, judged=not thresholds or change.threshold is not None)
        for key in ours
        if key in theirs
        for change in _changes(key, ours[key], theirs[key], allowed, paired)
    ]
    missing = allowed.keys() - {(change.key, change.statistic) for change in found}
    if missing:
        raise ValueError(f"not enough values in both runs for {allowed[min(missing)]}")
    invalid = [f"{n}: {why}" for n, run in (("A", a), ("B", b)) for why in invalid_reasons(run)]
    requests = (len(a.records), len(b.records))
    return Comparison(requests, paired, differing_settings(a, b), invalid, judge_changes(found))


def plan_of(run: LoadRun) -> list[tuple[object, ...]]:
    """Return a value that is equal for two runs with the same requests at the same times."""
    planned = sorted((record.planned for record in run.records), key=lambda one: one.index)
    pairs = ((p, p.request) for p in planned)
    return [(p.index, p.at_s, r.class_name, r.seed, r.max_tokens, r.n) for p, r in pairs]


def slos(run: LoadRun) -> set[tuple[str, Slo]]:
    """Return the classes of a run with their SLOs."""
    return {(r.planned.request.class_name, r.planned.request.slo) for r in run.records}


def differing_settings(a: LoadRun, b: LoadRun) -> dict[str, tuple[object, object]]:
    """Return the settings in which two runs differ, with both values."""
    names = (name for name in a.settings | b.settings if name not in IGNORED_SETTINGS)
    both = {name: (a.settings.get(name), b.settings.get(name)) for name in names}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def judge_changes(changes: Sequence[Change]) -> list[Change]:
    """Return the changes with their verdicts. The judged changes share `ERROR`."""
    judged = [place for place, change in enumerate(changes) if change.judged]
    verdicts = [""] * len(changes)
    for word, p_values in (
        ("better", [changes[place].p_better for place in judged]),
        ("worse", [changes[place].p_worse for place in judged]),
    ):
        for place, p in zip(judged, holm(p_values), strict=True):
            if p <= ERROR:
                verdicts[place] = word
    return [replace(c, verdict=v) for c, v in zip(changes, verdicts, strict=True)]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return corrected p-values: the running maximum of `m - i + 1` times the i-th smallest."""
    corrected, most = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        most = max(most, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = most
    return corrected


def _changes(
    key: str,
    a: Measure,
    b: Measure,
    allowed: dict[tuple[str, str], Threshold],
    paired: bool,
) -> Iterator[Change]:
    """Yield the changes of a metric's statistics."""
    names = [name for name in a.statistics if name in b.statistics]
    if not names:
        return
    ours, theirs = (m.influences()[[m.statistics.index(n) for n in names]] for m in (a, b))
    at_once = max(1, min(REPLICATES, CELLS // max(a.terms, b.terms, ours.shape[1])))
    if paired:  # Equal seeds, block lengths and batch sizes draw the same requests from both runs.
        first, second = (_resample(m, names, theirs - ours, 0, at_once) for m in (a, b))
    else:
        first = _resample(a, names, ours, 0, at_once)
        second = _resample(b, names, theirs, 1, at_once)
    for place, name in enumerate(names):
        threshold = allowed.get((key, name))
        yield _change(threshold or Threshold(key, name), place, first, second, threshold)


@dataclass(frozen=True, slots=True)
class _Resampled:
    """P statistics of a run: their `values`, and `drawn` [R, P] of its R resamples."""

    values: Floats
    drawn: Floats
    block: float
    freedom: float


def _resample(
    measure: Measure, names: Sequence[str], influences: Floats, seed: int, at_once: int
) -> _Resampled:
    """Resample a run in blocks that suit the influences `[P, N]`, `at_once` resamples at a time."""
    count = influences.shape[1]
    block = max(map(block_length, influences))
    columns = [measure.statistics.index(name) for name in names]
    rng = np.random.default_rng(seed)
    sizes = [min(at_once, REPLICATES - begin) for begin in range(0, REPLICATES, at_once)]
    drawn = [measure.evaluate(resampled_counts(count, block, rng, size)) for size in sizes]
    values = measure.evaluate(np.ones((1, count), np.int64))[0]
    return _Resampled(values[columns], np.concatenate(drawn)[:, columns], block, count / block - 1)


def _change(
    allowed: Threshold,
    place: int,
    first: _Resampled,
    second: _Resampled,
    threshold: Threshold | None,
) -> Change:
    sign = -1.0 if allowed.key in HIGHER_IS_BETTER else 1.0

    def excess(a: Floats, b: Floats) -> Floats:
        """Return by how much B exceeds the allowed worsening."""
        return sign * (b - a) - allowed.relative * np.abs(a) - allowed.absolute

    drawn = first.drawn[:, place], second.drawn[:, place]
    a, b = float(first.values[place]), float(second.values[place])
    freedom = min(first.freedom, second.freedom)
    spread = _deviation(drawn[1] - drawn[0])
    beyond = float(excess(np.array(a), np.array(b)))
    half = student_quantile(freedom, 1 - ERROR) * spread
    return Change(
        allowed.key,
        allowed.statistic,
        a,
        b,
        (b - a - half, b - a + half),
        p_worse=student_tail(freedom, _ratio(beyond, _deviation(excess(*drawn)))),
        p_better=student_tail(freedom, _ratio(-sign * (b - a), spread)),
        block=max(first.block, second.block),
        threshold=threshold,
    )


def _deviation(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.std(ddof=1)) if len(known) > 1 else inf


def _ratio(value: float, spread: float) -> float:
    """Return `value / spread`, or an infinite ratio for a difference without spread."""
    if spread > 0:
        return value / spread
    return copysign(inf, value) if value else 0.0
