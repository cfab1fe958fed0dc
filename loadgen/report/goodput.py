"""Estimates the highest rate that reaches an attainment, from runs at some rates.

This rate is DistServe's goodput (Zhong et al., OSDI 2024). The estimate assumes that attainment
falls with the rate. Isotonic regression pools neighbours whose measured attainments rise (Ayer et
al., Annals of Mathematical Statistics 26, 1955). The estimate interpolates between the highest
measured rate that reaches the attainment and the next higher rate. The bracket around the estimate
follows from 95 % confidence intervals of the attainments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from draftgate.loadgen.measuring.confidence import Interval, variance_inflation, wilson
from draftgate.loadgen.measuring.slo import SHARES, attainment, meets_slo
from draftgate.loadgen.report.runs import RatePoint
from draftgate.loadgen.types import LoadRun


@dataclass(frozen=True, slots=True)
class GoodputEstimate:
    """The goodput of one name at one share of requests.

    Attributes:
        rate_rps: interpolated rate, or None if all measured rates reach the share or none does.
        low_rps: the highest rate that significantly reaches the share, below every rate that
            significantly misses the share, if any.
        high_rps: the lowest rate that significantly misses the share, above every rate that
            significantly reaches the share, if any.
        holds_rps: the highest measured rate that reaches the share, significantly or not.
    """

    name: str
    share: float
    rate_rps: float | None
    low_rps: float | None
    high_rps: float | None
    holds_rps: float | None


def estimate_goodputs(points: Sequence[RatePoint]) -> list[GoodputEstimate]:
    """Return the goodput of each name at each share of requests, without INVALID runs."""
    valid = [point for point in points if point.rate_rps is not None and point.valid]
    names = dict.fromkeys(point.name for point in valid)
    return [
        estimate_goodput(name, [point for point in valid if point.name == name], share)
        for name in names
        for share in SHARES
    ]


def estimate_goodput(name: str, points: Sequence[RatePoint], share: float) -> GoodputEstimate:
    """Return the goodput of points in order of their rates, at least one."""
    rates = [point.rate_rps or 0.0 for point in points]
    counted = [attainment(point.records) for point in points]
    fitted = fit_falling([c.share or 0.0 for c in counted], [c.requests for c in counted])
    intervals = [attainment_bounds(point) for point in points]
    holding = sum(value >= share for value in fitted)
    held = [rate for rate, s in zip(rates, intervals, strict=True) if s.low >= share]
    failed = [rate for rate, s in zip(rates, intervals, strict=True) if s.high < share]
    rate_rps = None
    if 0 < holding < len(rates):
        above, below = fitted[holding - 1], fitted[holding]
        part = (above - share) / (above - below)
        rate_rps = rates[holding - 1] + part * (rates[holding] - rates[holding - 1])
    return GoodputEstimate(
        name,
        share,
        rate_rps,
        max((rate for rate in held if rate < min(failed, default=inf)), default=None),
        min((rate for rate in failed if rate > max(held, default=0.0)), default=None),
        rates[holding - 1] if holding else None,
    )


def fit_falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
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


def attainment_bounds(point: RatePoint) -> Interval:
    """Return the 95 % Wilson interval of the attainment, for correlated requests.

    Requests of one run wait for each other. The effective number of requests is their number
    divided by the variance inflation (`measuring.confidence.variance_inflation`).
    """
    counted = attainment(point.records)
    trials = max(1, round(counted.requests / max(map(_inflation, point.runs))))
    return wilson(round((counted.share or 0.0) * trials), trials)


def _inflation(run: LoadRun) -> float:
    ordered = sorted(run.records, key=lambda record: record.scheduled_s)
    return variance_inflation(np.array([float(meets_slo(record)) for record in ordered]))
