"""The highest rate at which a share of requests is served as promised, read off some rates.

DistServe's goodput (Zhong et al., OSDI 2024). Attainment is taken to fall with the rate: where the
measured shares do not, neighbours are pooled (isotonic regression; Ayer et al., Annals of
Mathematical Statistics 26, 1955). Between the last rate that holds and the next the goodput is
interpolated; what is *sure* is only the bracket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final

import numpy as np

from draftgate.loadgen.measuring.bootstrap import inflation
from draftgate.loadgen.measuring.slo import Interval, attainment, meets_slo, wilson
from draftgate.loadgen.report.runs import RatePoint
from draftgate.loadgen.types import LoadRun

SHARES: Final = (0.90, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Reading:
    """A goodput read off.

    Attributes:
        rate_rps: interpolated; None if all measured rates hold, or none does.
        low_rps: the highest rate that surely holds, below all that surely do not; None if none.
        high_rps: the lowest rate that surely does not hold, above all that surely do; None if none.
        holds_rps: the highest measured rate that holds, sure or not.
    """

    name: str
    share: float
    rate_rps: float | None
    low_rps: float | None
    high_rps: float | None
    holds_rps: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {slot: getattr(self, slot) for slot in self.__slots__}


def readings(points: Sequence[RatePoint], shares: Sequence[float] = SHARES) -> list[Reading]:
    """Return the goodput of each name at each share. Runs that are INVALID have no say."""
    valid = [point for point in points if point.rate_rps is not None and point.valid]
    names = dict.fromkeys(point.name for point in valid)
    return [
        read_off(name, [point for point in valid if point.name == name], share)
        for name in names
        for share in shares
    ]


def read_off(name: str, points: Sequence[RatePoint], share: float) -> Reading:
    """Return the goodput of points by ascending rate, at least one."""
    rates = [point.rate_rps or 0.0 for point in points]
    counted = [attainment(point.records) for point in points]
    weights = [c.requests for c in counted]
    fitted = falling([c.share or 0.0 for c in counted], weights)
    sure = [surely(point) for point in points]
    holding = sum(value >= share for value in fitted)
    held = [rate for rate, s in zip(rates, sure, strict=True) if s.low >= share]
    lost = [rate for rate, s in zip(rates, sure, strict=True) if s.high < share]
    return Reading(
        name,
        share,
        _between(rates, fitted, holding, share),
        max((rate for rate in held if rate < min(lost, default=inf)), default=None),
        min((rate for rate in lost if rate > max(held, default=0.0)), default=None),
        rates[holding - 1] if holding else None,
    )


def falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the nearest sequence that never rises (weighted least squares)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        mean, mass, size = value, float(weight), 1
        while pools and pools[-1][0] < mean:
            before, more, others = pools.pop()
            total = mass + more
            mean = (mean * mass + before * more) / total if total else mean
            mass, size = total, size + others
        pools.append((mean, mass, size))
    return [mean for mean, _, size in pools for _ in range(size)]


def surely(point: RatePoint) -> Interval:
    """Return the 95 % Wilson interval of the attainment, as of so many independent requests.

    Requests of one run wait for each other: n of them tell as much as n over the inflation of the
    variance (`loadgen.measuring.bootstrap.inflation`).
    """
    counted = attainment(point.records)
    larger = max(map(_inflation, point.runs))
    trials = max(1, round(counted.requests / larger))
    return wilson(round((counted.share or 0.0) * trials), trials)


def _inflation(run: LoadRun) -> float:
    ordered = sorted(run.records, key=lambda record: record.scheduled_s)
    return inflation(np.array([float(meets_slo(record)) for record in ordered]))


def _between(
    rates: Sequence[float], fitted: Sequence[float], holding: int, share: float
) -> float | None:
    if not 0 < holding < len(rates):
        return None
    above, below = fitted[holding - 1], fitted[holding]
    part = (above - share) / (above - below)
    return rates[holding - 1] + part * (rates[holding] - rates[holding - 1])
