"""Confidence intervals: Wilson's for shares, Student's distribution, and the stationary bootstrap.

Requests of a run wait for each other in one queue, so neighbours are correlated. The stationary
bootstrap (Politis and Romano, JASA 89, 1994) therefore draws blocks of consecutive requests instead
of single requests. Blocks have geometric lengths with mean b and wrap around at the end. The mean
length is estimated from the values (Politis and White, Econometric Reviews 23, 2004, corrected by
Patton, Politis and White, ibid. 28, 2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, log, log10, sqrt
from statistics import NormalDist, fmean, stdev
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

Z_95: Final = 1.959963984540054
"""Quantile 0.975 of the standard normal distribution, for two-sided 95 %."""

REPLICATES: Final = 400
"""Number of resamples. A standard error from R resamples is within about 1/sqrt(2R) of its limit,
here 3.5 % (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 6.4)."""

SIGNIFICANT: Final = 2.0
"""Politis and White's c. Correlations below `c sqrt(log10(n)/n)` count as noise."""


class Interval(NamedTuple):
    """An interval of a share. Both ends are between 0 and 1."""

    low: float
    high: float


class Ratio(NamedTuple):
    """A geometric mean of ratios, with the ends of its 95% interval."""

    mean: float
    low: float
    high: float


def wilson(successes: int, trials: int, z: float = Z_95) -> Interval:
    """Return Wilson's score interval of a share, or (0, 1) without trials.

    `(p + z^2/2n -+ z sqrt(p(1 - p)/n + z^2/4n^2)) / (1 + z^2/n)` with `p = successes/n` (E. B.
    Wilson, JASA 22, 1927). Unlike the normal interval it stays within [0, 1] and does not shrink to
    a point when all or none succeed.

    Raises:
        ValueError: either number is negative, or the successes exceed the trials.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials")
    if trials == 0:
        return Interval(0.0, 1.0)
    share, spread = successes / trials, z * z / trials
    middle = share + spread / 2
    half = z * sqrt(share * (1 - share) / trials + spread / trials / 4)
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    return Interval(max(0.0, low), min(1.0, high))


def student_tail(freedom: float, t: float) -> float:
    """Return the chance that Student's t exceeds `t`, within 2 % for at least 3 degrees of freedom.

    The formula is Wallace's normal deviate (Annals of Mathematical Statistics 30, 1959): `z = (8v +
    1)/(8v + 3) sqrt(v ln(1 + t^2/v))`.
    """
    z = (8 * freedom + 1) / (8 * freedom + 3) * sqrt(freedom * log(1 + t * t / freedom))
    return NormalDist().cdf(-z if t > 0 else z)


def student_quantile(freedom: float, share: float = 0.975) -> float:
    """Return the t that is exceeded with chance `1 - share`, the inverse of `student_tail`.

    The 97.5th percentile is 1.2 % too large at 3 degrees of freedom and 4 % at 2, so intervals are
    slightly too wide for such runs.
    """
    z = NormalDist().inv_cdf(share) * (8 * freedom + 3) / (8 * freedom + 1)
    return sqrt(freedom * (exp(z * z / freedom) - 1)) * (1 if z >= 0 else -1)


def mean_ratio(ratios: Sequence[float]) -> Ratio:
    """Return the geometric mean of positive ratios, with Student's interval of their logarithms.

    The interval of a single ratio is from 0 to infinity.

    Raises:
        ValueError: there are no ratios, or one is not positive.
    """
    logarithms = [log(ratio) for ratio in ratios]
    if not logarithms:
        raise ValueError("a mean needs at least one ratio")
    count, mean = len(logarithms), fmean(logarithms)
    half = student_quantile(count - 1) * stdev(logarithms) / sqrt(count) if count > 1 else inf
    return Ratio(exp(mean), exp(mean - half), exp(mean + half))


def block_length(values: Floats) -> float:
    """Return the mean block length (in requests, at least 1) for the mean of such a series.

    The length is `b = (G^2/g^2)^(1/3) n^(1/3)` with G and g as in `Autocorrelation`, and at most
    `min(3 sqrt(n), n/3)`.
    """
    count, found = len(values), autocorrelation(values)
    if found.variance <= 0.0:
        return 1.0
    limit = max(1.0, min(3.0 * sqrt(count), count / 3))
    if found.spectrum <= 0.0:
        return limit
    length: float = ((found.slope / found.spectrum) ** 2 * count) ** (1 / 3)
    return min(limit, max(1.0, length))


def variance_inflation(values: Floats) -> float:
    """Return the variance of the mean over that of independent values, at least 1."""
    found = autocorrelation(values)
    return max(1.0, found.spectrum / found.variance) if found.variance > 0.0 else 1.0


@dataclass(frozen=True, slots=True)
class Autocorrelation:
    """How strongly neighbours in a series are correlated.

    R are the autocovariances. w is the flat-top window (1 up to 1/2, then falling to 0 at 1). M is
    twice the last lag whose correlation is more than noise.

    Attributes:
        variance: R(0).
        spectrum: `g = sum of w(k/M) R(k)` over `|k| <= M`, where g/n is the variance of the mean.
        slope: `G = sum of w(k/M) |k| R(k)`.
    """

    variance: float
    spectrum: float
    slope: float


def autocorrelation(values: Floats) -> Autocorrelation:
    """Return the autocorrelation of a series."""
    count = len(values)
    centred = values - values.mean() if count else values
    variance = float(centred @ centred) / count if count else 0.0
    if count < 2 or variance <= 0.0:
        return Autocorrelation(0.0, 0.0, 0.0)
    most = min(count - 1, ceil(sqrt(count)) + _noise_run(count))
    lags = range(1, most + 1)
    covariances = np.array([float(centred[k:] @ centred[:-k]) / count for k in lags])
    window = 2 * _last_significant_lag(covariances / variance, count)
    kept = np.arange(1, min(window, most) + 1)
    weighted = np.minimum(1.0, 2.0 * (1.0 - kept / window)) * covariances[: len(kept)]
    spectrum, slope = variance + 2.0 * float(weighted.sum()), 2.0 * float(kept @ weighted)
    return Autocorrelation(variance, spectrum, slope)


def resampled_counts(
    count: int, mean_block: float, rng: np.random.Generator, replicates: int
) -> Counts:
    """Return how often each of `count` requests is in each resample: `[replicates, count]`."""
    places = np.arange(count)
    begins = rng.random((replicates, count)) < 1.0 / mean_block
    begins[:, 0] = True
    last = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    starts = np.take_along_axis(rng.integers(0, count, (replicates, count)), last, axis=1)
    drawn = (starts + places - last) % count
    flat = drawn + count * np.arange(replicates)[:, None]
    return np.bincount(flat.ravel(), minlength=replicates * count).reshape(replicates, count)


def _noise_run(count: int) -> int:
    """Return Politis and White's K: how many consecutive correlations must be noise."""
    return max(5, ceil(sqrt(log10(max(count, 10)))))


def _last_significant_lag(correlations: Floats, count: int) -> int:
    """Return the last lag before a run of correlations that are noise, at least 1."""
    significant = np.abs(correlations) >= SIGNIFICANT * sqrt(log10(max(count, 10)) / count)
    run = _noise_run(count)
    for lag in range(len(significant) - run + 1):
        if not significant[lag : lag + run].any():
            return max(1, lag)
    return max(1, int(np.flatnonzero(significant)[-1]) + 1 if significant.any() else 1)
