"""Fits the rate at which a falling share crosses the requested share. Performs no I/O.

The model of the share near that rate is logistic in the logarithm of the rate,

    logit p(rate) = logit(share) - slope * ln(rate / root),    slope > 0.

Only `root` is of interest, so the profile likelihood maximises over the slope at each root. A
quasi-likelihood ratio (McCullagh and Nelder, Generalized Linear Models, 1989, 4.5 and 9.2) decides
which roots belong to the interval:

    2 (log L(best) - log L(root)) <= dispersion * t(freedom)^2.

The interval also covers a server with a sharp limit. If all lower rates hold and all higher rates
fail, the roots between them are equally likely, and the search becomes a bisection. Wu's design
(Efficient sequential designs with binary data, JASA 80, 1985) chooses rates by the fit so far.

The dispersion accounts for the correlation of requests that wait in one queue. A binomial interval
assumes independence and is too narrow, by a factor of four in M/D/1 at 70 % load. The variance
therefore uses the means of consecutive batches (Law, Simulation Modeling and Analysis, 2015,
9.5.3). A first-order autoregression models the remaining correlation r between neighbours. A mean
over many batches then has `(1 + r)/(1 - r)` times the variance of independent batches (Fishman,
Principles of Discrete Event Simulation, 1978, 5.10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from draftgate.loadgen.measuring.confidence import student_quantile
from draftgate.loadgen.search.types import ProbeResult

Vector: TypeAlias = NDArray[np.float64]

SLOPES: Final = (0.5, 200.0)
"""Range of slopes, from a share that hardly depends on the rate to a sharp fall within 1 % of the
rate."""

LOGITS: Final = 2.0
"""How near the fitted share of a probe must be for the probe to count (0.72 to 0.993, for 0.95).
Farther away the curve has another shape. Beyond capacity the share depends on the length of the
probe."""

NEAR: Final = (0.03, 0.3)
"""Least and most distance of a counted probe, in the logarithm of the rate."""

GRID_STEP: Final = 0.0025
"""Step of the grid of roots in logarithms, a twentieth of the usual precision."""

_HALVINGS: Final = 18
"""Halvings of the range of slopes, which give the slope to 1 in 40,000."""

BEYOND: Final = 0.7
"""Distance beyond all probes, in logarithms, at which the search for a root ends. A root at the end
of the grid counts as unbounded."""

PRIOR_FREEDOM: Final = 20
"""Degrees of freedom of the expected dispersion."""

LEAST_FREEDOM: Final = 8
"""Least degrees of freedom for the quantile of the interval, also for dispersions with fewer."""

SMALLEST_BATCH: Final = 20
"""Least requests per batch."""

LEAST_BATCHES: Final = 40
"""Least batches over all probes. Batches do not grow if fewer would remain for a variance."""

MOST_NEIGHBOURS: Final = 0.3
"""Correlation of neighbours above which batches grow, if enough batches remain. The autoregression
models the remaining correlation. In M/D/1 (limits of 2.5, 5 and 20 services) it is within 6 % of
the variance of long runs for correlations below 0.75 (2026-11-21)."""

MOST_CORRELATED: Final = 0.9
"""Upper bound for an estimated correlation, at which the factor is 19."""


@dataclass(frozen=True, slots=True)
class Dispersion:
    """The variance of shares over that of independent requests, `p(1 - p)/n`.

    Attributes:
        factor: the ratio, at least 1.
        freedom: degrees of freedom of the estimate.
    """

    factor: float
    freedom: int

    def with_prior(self, factor: float, freedom: int) -> Dispersion:
        """Return the mean with an expected factor, each weighed by its degrees of freedom."""
        both = self.freedom + freedom
        return Dispersion((self.freedom * self.factor + freedom * factor) / both, self.freedom)


@dataclass(frozen=True, slots=True)
class RateFit:
    """The root and its interval, in requests per second. An open end is 0 or infinity.

    Attributes:
        slope: the fall of the share's logit per unit of the logarithm of the rate.
        sides: the counted requests below the root and above.
    """

    root_rps: float
    low_rps: float
    high_rps: float
    slope: float
    dispersion: Dispersion
    sides: tuple[int, int]

    @property
    def bounded(self) -> bool:
        """Whether the interval ends on both sides."""
        return self.low_rps > 0.0 and self.high_rps < inf

    @property
    def relative_half_width(self) -> float:
        """Half the interval over the root, infinite if the interval is open."""
        return (self.high_rps - self.low_rps) / 2 / self.root_rps


def fit_rate(
    probes: Sequence[ProbeResult], share: float, confidence: float, expected: float = 1.0
) -> RateFit:
    """Return the root of all probes that are near it.

    Args:
        expected: the expected dispersion, which dominates until the probes show their own.

    Raises:
        ValueError: no probe has outcomes.
    """
    counted = [probe for probe in probes if probe.met]
    if not counted:
        raise ValueError("no probe has outcomes")
    found, near = _fit(counted, share, confidence, expected), counted
    for _ in range(3):
        before, near = near, _near(counted, found)
        if near == before:
            break
        found = _fit(near, share, confidence, expected)
    return found


def _near(probes: Sequence[ProbeResult], found: RateFit) -> list[ProbeResult]:
    """Return the complete probes near a root, or else the nearest probe of each side.

    The end of a cut probe depends on its luck, which varies widely in a queue. A cut probe does not
    count after complete probes exist.
    """
    away = [log(probe.probe.rate_rps / found.root_rps) for probe in probes]
    near = min(max(LOGITS / found.slope, NEAR[0]), NEAR[1])
    chosen = set[int]()
    for side in (-1.0, 1.0):
        on_side = [i for i, distance in enumerate(away) if side * distance >= 0.0]
        whole = [i for i in on_side if abs(away[i]) <= near and not probes[i].cut]
        chosen.update(whole or sorted(on_side, key=lambda i: abs(away[i]))[:1])
    return [probes[i] for i in sorted(chosen)]


def _fit(
    probes: Sequence[ProbeResult], share: float, confidence: float, expected: float
) -> RateFit:
    spread = dispersion([probe.met for probe in probes]).with_prior(expected, PRIOR_FREEDOM)
    rates = np.log([probe.probe.rate_rps for probe in probes])
    met = np.array([sum(probe.met) for probe in probes], dtype=np.float64)
    counts = np.array([len(probe.met) for probe in probes], dtype=np.float64)
    roots = np.arange(rates.min() - BEYOND, rates.max() + BEYOND, GRID_STEP)
    likelihood, slopes = _profile(roots, rates, met, counts, log(share / (1.0 - share)))
    quantile = student_quantile(max(spread.freedom, LEAST_FREEDOM), (1.0 + confidence) / 2)
    inside = np.flatnonzero(2.0 * (likelihood.max() - likelihood) <= spread.factor * quantile**2)
    best = np.flatnonzero(likelihood >= likelihood.max() - 1e-6)
    low, high, root = int(inside[0]), int(inside[-1]), float(roots[best].mean())
    return RateFit(
        exp(root),
        exp(roots[low - 1]) if low else 0.0,
        exp(roots[high + 1]) if high + 1 < len(roots) else inf,
        float(slopes[best[len(best) // 2]]),
        spread,
        (int(counts[rates < root].sum()), int(counts[rates >= root].sum())),
    )


def _profile(
    roots: Vector, rates: Vector, met: Vector, counts: Vector, wanted: float
) -> tuple[Vector, Vector]:
    """Return the log likelihood of each root at its best slope, and that slope.

    The likelihood is concave in the slope, so the function bisects its derivative in logarithms,
    for all roots together.
    """
    off = rates[None, :] - roots[:, None]
    low, high = (np.full(len(roots), log(slope)) for slope in SLOPES)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        logits = wanted - np.exp(middle)[:, None] * off
        shares = 0.5 * (1.0 + np.tanh(logits / 2))
        rising = (-off * (met - counts * shares)).sum(axis=1) > 0.0
        low, high = np.where(rising, middle, low), np.where(rising, high, middle)
    slopes: Vector = np.exp((low + high) / 2)
    logits = wanted - slopes[:, None] * off
    # log p = -log(1 + e^-x) and log(1 - p) = -log(1 + e^x), without overflow.
    likelihood: Vector = -(
        met * np.logaddexp(0.0, -logits) + (counts - met) * np.logaddexp(0.0, logits)
    ).sum(axis=1)
    return likelihood, slopes


def dispersion(runs: Sequence[Sequence[bool]]) -> Dispersion:
    """Return the common dispersion of runs with different shares.

    A run in which all or no requests met carries no information. Without other runs the factor is
    1.
    """
    mixed = [run for run in runs if 0 < sum(run) < len(run)]
    size = SMALLEST_BATCH
    while True:
        found, neighbours = _batch_dispersion(mixed, size)
        longer = sum(len(run) // (2 * size) for run in mixed)
        if neighbours <= MOST_NEIGHBOURS or longer < LEAST_BATCHES:
            return found
        size *= 2


def _batch_dispersion(runs: Sequence[Sequence[bool]], size: int) -> tuple[Dispersion, float]:
    """Return the dispersion by batches of a size, and the correlation of neighbours."""
    squares, products, freedom = 0.0, 0.0, 0
    for run in runs:
        values = np.asarray(run, dtype=np.float64)
        count = len(values) // size
        if count < 2:
            continue
        # Outcomes that fill no batch are dropped at the beginning.
        means = values[len(values) - count * size :].reshape(count, size).mean(axis=1)
        share = float(values.mean())
        unit = (means - means.mean()) / (share * (1.0 - share) / size) ** 0.5
        squares += float(unit @ unit)
        products += float(unit[1:] @ unit[:-1])
        freedom += count - 1
    if freedom == 0 or squares == 0.0:
        return Dispersion(1.0, freedom), 0.0
    # Subtracting the mean lowers the correlation by 1/batches, which is one product per run.
    variance = squares / freedom
    neighbours = min(max(products / freedom / variance, 0.0), MOST_CORRELATED)
    return Dispersion(max(1.0, variance * (1 + neighbours) / (1 - neighbours)), freedom), neighbours
