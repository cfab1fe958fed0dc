"""How sure a statistic of a run is, though its requests wait for each other in one queue.

Blocks of consecutive requests are drawn instead of single ones, so that neighbours stay together:
the stationary bootstrap (Politis and Romano, JASA 89, 1994), whose blocks have geometric lengths
around a mean b and wrap around at the end. The mean length is chosen from the values themselves
(Politis and White, Econometric Reviews 23, 2004; corrected by Patton, Politis and White, ibid. 28,
2009).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log10, sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

REPLICATES: Final = 400
"""Resamples. A standard error from R of them is itself within about 1/sqrt(2R) of its limit: 3.5 %
here (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 6.4)."""

SIGNIFICANT: Final = 2.0
"""Politis and White's c: correlations below `c sqrt(log10(n)/n)` are taken for noise."""


def block_length(values: Floats) -> float:
    """Return the mean block length (in requests, at least 1) for the mean of such a series.

    `b = (G^2/g^2)^(1/3) n^(1/3)`, g and G as in `Memory`; at most `min(3 sqrt(n), n/3)`.
    """
    count, memory = len(values), memory_of(values)
    if memory.variance <= 0.0:
        return 1.0
    limit = max(1.0, min(3.0 * sqrt(count), count / 3))
    if memory.spectrum <= 0.0:
        return limit
    length: float = ((memory.slope / memory.spectrum) ** 2 * count) ** (1 / 3)
    return min(limit, max(1.0, length))


def inflation(values: Floats) -> float:
    """Return how many times larger a mean's variance is than of independent values; at least 1."""
    memory = memory_of(values)
    return max(1.0, memory.spectrum / memory.variance) if memory.variance > 0.0 else 1.0


@dataclass(frozen=True, slots=True)
class Memory:
    """How much neighbours in a series have in common.

    R are the autocovariances, w is the flat-top window (1 up to 1/2, then falling to 0 at 1), and M
    twice the lag from which on correlations are noise.

    Attributes:
        variance: R(0).
        spectrum: `g = sum of w(k/M) R(k)` over `|k| <= M`; g/n is the variance of the mean.
        slope: `G = sum of w(k/M) |k| R(k)`.
    """

    variance: float
    spectrum: float
    slope: float


def memory_of(values: Floats) -> Memory:
    """Measure a series."""
    count = len(values)
    centred = values - values.mean() if count else values
    variance = float(centred @ centred) / count if count else 0.0
    if count < 2 or variance <= 0.0:
        return Memory(0.0, 0.0, 0.0)
    most = min(count - 1, ceil(sqrt(count)) + _run_of_noise(count))
    lags = range(1, most + 1)
    covariances = np.array([float(centred[k:] @ centred[:-k]) / count for k in lags])
    window = 2 * _last_loud(covariances / variance, count)
    kept = np.arange(1, min(window, most) + 1)
    weighted = np.minimum(1.0, 2.0 * (1.0 - kept / window)) * covariances[: len(kept)]
    return Memory(variance, variance + 2.0 * float(weighted.sum()), 2.0 * float(kept @ weighted))


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


def _run_of_noise(count: int) -> int:
    """Return how many correlations in a row have to be noise: Politis and White's K."""
    return max(5, ceil(sqrt(log10(max(count, 10)))))


def _last_loud(correlations: Floats, count: int) -> int:
    """Return the last lag before so many correlations in a row that are noise; at least 1."""
    loud = np.abs(correlations) >= SIGNIFICANT * sqrt(log10(max(count, 10)) / count)
    run = _run_of_noise(count)
    for lag in range(len(loud) - run + 1):
        if not loud[lag : lag + run].any():
            return max(1, lag)
    return max(1, int(np.flatnonzero(loud)[-1]) + 1 if loud.any() else 1)
