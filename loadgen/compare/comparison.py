"""What changed between two runs, with intervals, and whether that is a regression.

For each statistic s: the change `s(B) - s(A)`, its standard error SE over stationary bootstrap
resamples of requests (`loadgen.measuring.bootstrap`), and the 95 % interval `change -+ t SE`, t of
Student's law with `n/b - 1` degrees of freedom for n requests in blocks of mean length b. Where
both runs were asked the same at the same instants, a resample takes the same requests of both: what
a question costs is in both and cancels. Else each run is resampled by itself.

A statistic is *worse* if its change for the worse exceeds what is allowed (nothing, unless a limit
says so), and *better* if it improved, each with an error of 2.5 % **for all statistics together**
(Holm, Scandinavian Journal of Statistics 6, 1979): of runs that are alike, one in forty is called a
regression, however many figures there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import copysign, inf
from typing import Final

import numpy as np

from draftgate.loadgen.compare.limits import Limit
from draftgate.loadgen.compare.measures import HIGHER_IS_BETTER, Measure, measures
from draftgate.loadgen.measuring.bootstrap import (
    REPLICATES,
    Floats,
    block_length,
    resampled_counts,
)
from draftgate.loadgen.measuring.quantiles import student_quantile, student_tail
from draftgate.loadgen.measuring.summary import invalid_reasons
from draftgate.loadgen.types import LoadRun, Slo

ERROR: Final = 0.025
"""Of either side: 95 % intervals."""

LEAST_REQUESTS: Final = 20
"""Fewer requests cannot be compared: blocks of them even less."""

CELLS: Final = 4_000_000
"""Values of resamples held at a time: 32 MB a table."""

NOT_TOLD: Final = frozenset({"started", "generator", "verify_lossless", "characters_per_token"})


@dataclass(frozen=True, slots=True)
class Change:
    """A statistic in both runs.

    Attributes:
        interval: 95 % interval of `change`, of this statistic by itself.
        p_worse: chance of so much worsening beyond the limit if it were just the limit.
        p_better: chance of so much improvement if there were none.
        judged: whether it has a say in the verdict.
        verdict: `worse`, `better` or nothing, with Holm's correction over all that are judged.
        block: mean length of the resampled blocks, in requests.
    """

    key: str
    point: str
    a: float
    b: float
    interval: tuple[float, float]
    p_worse: float
    p_better: float
    block: float
    limit: Limit | None = None
    judged: bool = True
    verdict: str = ""

    @property
    def change(self) -> float:
        """B less A."""
        return self.b - self.a

    @property
    def relative(self) -> float | None:
        """The change as a share of A."""
        return self.change / abs(self.a) if self.a else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs against each other.

    Attributes:
        requests: of A and B.
        paired: whether both were asked the same at the same instants.
        settings: in which the runs differ, with both values.
        invalid: why one of them, or both, proves nothing.
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


def compare(a: LoadRun, b: LoadRun, limits: Sequence[Limit] = (), seed: int = 0) -> Comparison:
    """Compare B with A; with limits, only those are judged. The same for the same arguments.

    Raises:
        ValueError: they cannot be compared: too few requests, other promises, or a limit on what
            one of them has no figure for.
    """
    for name, run in (("A", a), ("B", b)):
        if len(run.records) < LEAST_REQUESTS:
            raise ValueError(f"{name} has {len(run.records)} requests; {LEAST_REQUESTS} are needed")
    if promises(a) != promises(b):
        raise ValueError("other classes, or other SLOs, were promised: the figures mean others")
    paired = plan_of(a) == plan_of(b)
    ours, theirs = measures(a), measures(b)
    found = [
        change
        for key in ours
        if key in theirs
        for change in _changes(key, ours[key], theirs[key], _limits_of(key, limits), paired, seed)
    ]
    missing = [w for w in limits if (w.key, w.point) not in {(c.key, c.point) for c in found}]
    if missing:
        raise ValueError(f"not enough values in both runs for {missing[0].in_words}")
    invalid = [f"{n}: {why}" for n, run in (("A", a), ("B", b)) for why in invalid_reasons(run)]
    judged = judge([_of_interest(change, limits) for change in found])
    requests = (len(a.records), len(b.records))
    return Comparison(requests, paired, differing(a, b), invalid, judged)


def plan_of(run: LoadRun) -> list[tuple[object, ...]]:
    """Return what was planned: equal for two runs that were asked the same at the same instants."""
    planned = sorted((record.planned for record in run.records), key=lambda one: one.index)
    asked = ((p, p.request) for p in planned)
    return [(p.index, p.at_s, q.class_name, q.seed, q.max_tokens, q.n) for p, q in asked]


def promises(run: LoadRun) -> set[tuple[str, Slo]]:
    """Return the classes of a run with their SLOs."""
    return {(r.planned.request.class_name, r.planned.request.slo) for r in run.records}


def differing(a: LoadRun, b: LoadRun) -> dict[str, tuple[object, object]]:
    """Return the settings in which two runs differ, with both values."""
    names = [*a.settings, *(name for name in b.settings if name not in a.settings)]
    both = {name: (a.settings.get(name), b.settings.get(name)) for name in names}
    return {n: pair for n, pair in both.items() if n not in NOT_TOLD and pair[0] != pair[1]}


def judge(changes: Sequence[Change], error: float = ERROR) -> list[Change]:
    """Return the changes with their verdicts, errors shared among those that are judged."""
    judged = [place for place, change in enumerate(changes) if change.judged]
    verdicts = [""] * len(changes)
    for word, p_values in (
        ("better", [changes[place].p_better for place in judged]),
        ("worse", [changes[place].p_worse for place in judged]),
    ):
        for place, p in zip(judged, holm(p_values), strict=True):
            if p <= error:
                verdicts[place] = word
    return [replace(c, verdict=v) for c, v in zip(changes, verdicts, strict=True)]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number: the i-th smallest times `m - i + 1`, rising."""
    corrected, most = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        most = max(most, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = most
    return corrected


def _limits_of(key: str, limits: Sequence[Limit]) -> dict[str, Limit]:
    return {limit.point: limit for limit in limits if limit.key == key}


def _of_interest(change: Change, limits: Sequence[Limit]) -> Change:
    return replace(change, judged=not limits or change.limit is not None)


def _changes(
    key: str, a: Measure, b: Measure, limits: dict[str, Limit], paired: bool, seed: int
) -> Iterator[Change]:
    """Yield the changes of a figure's statistics."""
    points = [point for point in a.points if point in b.points]
    if not points:
        return
    ours, theirs = (m.influences()[[m.points.index(p) for p in points]] for m in (a, b))
    at_once = max(1, min(REPLICATES, CELLS // max(a.terms, b.terms, ours.shape[1])))
    if paired:  # one seed, one block length and one batch size: the same requests of both
        first, second = (_resampled(m, points, theirs - ours, seed, at_once) for m in (a, b))
    else:
        first = _resampled(a, points, ours, seed, at_once)
        second = _resampled(b, points, theirs, seed + 1, at_once)
    for place, point in enumerate(points):
        yield _change((key, point), place, first, second, limits.get(point))


@dataclass(frozen=True, slots=True)
class _Resampled:
    """P statistics of a run, `values`, and of R resamples of it, `drawn` [R, P]."""

    values: Floats
    drawn: Floats
    block: float
    freedom: float


def _resampled(
    measure: Measure, points: Sequence[str], influences: Floats, seed: int, at_once: int
) -> _Resampled:
    """Resample a run by blocks that suit such influences `[P, N]`, so many resamples at a time."""
    count = influences.shape[1]
    block = max(map(block_length, influences))
    columns = [measure.points.index(point) for point in points]
    rng = np.random.default_rng(seed)
    sizes = [min(at_once, REPLICATES - begin) for begin in range(0, REPLICATES, at_once)]
    drawn = [measure.of(resampled_counts(count, block, rng, size)) for size in sizes]
    values = measure.of(np.ones((1, count), np.int64))[0]
    return _Resampled(values[columns], np.concatenate(drawn)[:, columns], block, count / block - 1)


def _change(
    named: tuple[str, str],
    place: int,
    first: _Resampled,
    second: _Resampled,
    limit: Limit | None,
) -> Change:
    key, point = named
    sign = -1.0 if key in HIGHER_IS_BETTER else 1.0
    allowed = limit or Limit(key, point)

    def beyond(a: Floats, b: Floats) -> Floats:
        """How much worse B is than it may be."""
        return sign * (b - a) - allowed.relative * np.abs(a) - allowed.absolute

    drawn = first.drawn[:, place], second.drawn[:, place]
    a, b = float(first.values[place]), float(second.values[place])
    freedom = min(first.freedom, second.freedom)
    spread = _deviation(drawn[1] - drawn[0])
    excess = float(beyond(np.array(a), np.array(b)))
    half = student_quantile(freedom, 1 - ERROR) * spread
    return Change(
        key,
        point,
        a,
        b,
        (b - a - half, b - a + half),
        p_worse=student_tail(freedom, _over(excess, _deviation(beyond(*drawn)))),
        p_better=student_tail(freedom, _over(-sign * (b - a), spread)),
        block=max(first.block, second.block),
        limit=limit,
    )


def _deviation(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.std(ddof=1)) if len(known) > 1 else inf


def _over(value: float, spread: float) -> float:
    """Return `value / spread`; without any spread whatever differs at all differs surely."""
    if spread > 0:
        return value / spread
    return copysign(inf, value) if value else 0.0
