"""How much a share varies whose requests stood in one queue. Pure.

Requests of a run are correlated: who comes behind a crowd waits as long. A binomial interval takes
them for independent and is too narrow, in M/D/1 at 70 % load by a factor of four. Here the variance
comes from the means of consecutive batches (Law, Simulation Modeling and Analysis, 2015, 9.5.3),
with what is left of correlation between neighbours taken for a first-order autoregression: a mean
over many has then `(1 + r)/(1 - r)` times the variance of independent batches (Fishman, Principles
of Discrete Event Simulation, 1978, 5.10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Means: TypeAlias = NDArray[np.float64]

SMALLEST: Final = 20
"""Requests of a batch, at least."""

FEWEST: Final = 40
"""Batches over all probes below which they are made no longer: fewer tell no variance."""

NEIGHBOURS: Final = 0.3
"""Correlation of neighbours above which batches are made longer, if there are enough. The
autoregression bridges what is left: in M/D/1 (limits of 2.5, 5 and 20 services) it is within 6 % of
the variance of long runs wherever the correlation is below 0.75 (2026-11-21)."""

MOST_CORRELATED: Final = 0.9
"""A correlation that is estimated higher is taken for this: the factor is 19 then."""


@dataclass(frozen=True, slots=True)
class Dispersion:
    """The variance of shares over that of independent requests, `p(1 - p)/n`.

    Attributes:
        factor: at least 1.
        freedom: degrees of freedom of the estimate.
    """

    factor: float
    freedom: int

    def with_prior(self, factor: float, freedom: int) -> Dispersion:
        """Return the mean of it and what was expected, each by its degrees of freedom."""
        both = self.freedom + freedom
        return Dispersion((self.freedom * self.factor + freedom * factor) / both, self.freedom)


def batch_means(met: Sequence[bool], size: int) -> Means:
    """Return the shares of whole batches; what is left over at the beginning is left out."""
    values = np.asarray(met, dtype=np.float64)
    count = len(values) // size
    means: Means = values[len(values) - count * size :].reshape(count, size).mean(axis=1)
    return means


def dispersion(runs: Sequence[Sequence[bool]]) -> Dispersion:
    """Return the dispersion of runs with different shares, assumed to be common to all.

    Runs in which all or none met say nothing. Where nothing is known the factor is 1.
    """
    told = [run for run in runs if 0 < sum(run) < len(run)]
    size = SMALLEST
    while True:
        found, neighbours = _at(told, size)
        longer = sum(len(run) // (2 * size) for run in told)
        if neighbours <= NEIGHBOURS or longer < FEWEST:
            return found
        size *= 2


def _at(runs: Sequence[Sequence[bool]], size: int) -> tuple[Dispersion, float]:
    """Return the dispersion by batches of a size, and the correlation of neighbours."""
    squares, products, freedom, pairs = 0.0, 0.0, 0, 0
    for run in runs:
        means = batch_means(run, size)
        if len(means) < 2:
            continue
        share = float(np.mean(run))
        unit = (means - means.mean()) / (share * (1.0 - share) / size) ** 0.5
        squares += float(unit @ unit)
        products += float(unit[1:] @ unit[:-1])
        freedom, pairs = freedom + len(means) - 1, pairs + len(means) - 1
    if freedom == 0 or squares == 0.0:
        return Dispersion(1.0, freedom), 0.0
    # A mean taken off makes neighbours look less alike by 1/batches: one product's worth for a run.
    variance = squares / freedom
    neighbours = min(max(products / pairs / variance, 0.0), MOST_CORRELATED)
    return Dispersion(max(1.0, variance * (1 + neighbours) / (1 - neighbours)), freedom), neighbours
