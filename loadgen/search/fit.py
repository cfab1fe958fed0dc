"""The rate at which a falling share crosses the wanted one, from all probes together. Pure.

Near that rate the share is taken for logistic in the logarithm of the rate,

    logit p(rate) = logit(share) - slope * ln(rate / root),    slope > 0,

of which `root` is wanted and `slope` is not: its profile likelihood is maximised over the slope at
each root. The interval holds the roots that are not rejected,

    2 (log L(best) - log L(root)) <= dispersion * t(freedom)^2,

a quasi-likelihood ratio with the dispersion that batches show (McCullagh and Nelder, Generalized
Linear Models, 1989, 4.5 and 9.2). It needs no case of its own for a server that breaks sharply:
where all below hold and all above fail, the roots between them are equally likely, which makes of
the search a bisection. Choosing rates by the fit so far is Wu's design (Efficient sequential
designs with binary data, JASA 80, 1985).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from draftgate.loadgen.measuring.quantiles import student_quantile
from draftgate.loadgen.search.batches import Dispersion, dispersion
from draftgate.loadgen.search.types import Measured

Vector: TypeAlias = NDArray[np.float64]

SLOPES: Final = (0.5, 200.0)
"""Between a share that hardly depends on the rate and one that falls within 1 % of it."""

LOGITS: Final = 2.0
"""Probes take part whose share is this near by the fit (0.72 to 0.993, for 0.95): further off the
curve is another, and beyond capacity the share is a matter of how long the probe was."""

NEAR: Final = (0.03, 0.3)
"""Least and most of that in the logarithm of the rate."""

FINENESS: Final = 0.0025
"""Steps of the grid of roots, in logarithms: a twentieth of the usual precision."""

HALVINGS: Final = 18
"""Of the range of slopes: they are then known to 1 in 40,000."""

BEYOND: Final = 0.7
"""How far beyond all probes a root is looked for, in logarithms; further is without bound."""

FAITH: Final = 20
"""Degrees of freedom that the expected dispersion is worth."""

LEAST_FREEDOM: Final = 8
"""With less there is a dispersion, but no faith in it: it is taken to have this quantile."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The root and its interval, in requests per second; 0 and infinity where it is open.

    Attributes:
        slope: of the share's logit over the logarithm of the rate, downwards.
        sides: requests that took part, below the root and above.
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
        """Half the interval over the root; infinite where it is open."""
        return (self.high_rps - self.low_rps) / 2 / self.root_rps


def fit(probes: Sequence[Measured], share: float, confidence: float, expected: float = 1.0) -> Fit:
    """Return the root of all probes that are near it.

    Args:
        expected: dispersion, as long as little is known of it.

    Raises:
        ValueError: no probe has outcomes.
    """
    told = [probe for probe in probes if probe.met]
    if not told:
        raise ValueError("nothing was measured")
    found, near = _fit(told, share, confidence, expected), told
    for _ in range(3):
        before, near = near, near_to(told, found)
        if near == before:
            break
        found = _fit(near, share, confidence, expected)
    return found


def near_to(probes: Sequence[Measured], found: Fit) -> list[Measured]:
    """Return the whole probes near a root, and on a side without any the next one of all.

    What was cut was cut for its luck, too, which in a queue is no small one: once there is better,
    it does not count.
    """
    away = [log(probe.probe.rate_rps / found.root_rps) for probe in probes]
    near = min(max(LOGITS / found.slope, NEAR[0]), NEAR[1])
    chosen = set[int]()
    for side in (-1.0, 1.0):
        there = [i for i, distance in enumerate(away) if side * distance >= 0.0]
        whole = [i for i in there if abs(away[i]) <= near and not probes[i].cut]
        chosen.update(whole or sorted(there, key=lambda i: abs(away[i]))[:1])
    return [probes[i] for i in sorted(chosen)]


def _fit(probes: Sequence[Measured], share: float, confidence: float, expected: float) -> Fit:
    spread = dispersion([probe.met for probe in probes]).with_prior(expected, FAITH)
    rates = np.log([probe.probe.rate_rps for probe in probes])
    met = np.array([sum(probe.met) for probe in probes], dtype=np.float64)
    counts = np.array([len(probe.met) for probe in probes], dtype=np.float64)
    roots = np.arange(rates.min() - BEYOND, rates.max() + BEYOND, FINENESS)
    likelihood, slopes = _profile(roots, rates, met, counts, log(share / (1.0 - share)))
    quantile = student_quantile(max(spread.freedom, LEAST_FREEDOM), (1.0 + confidence) / 2)
    inside = np.flatnonzero(2.0 * (likelihood.max() - likelihood) <= spread.factor * quantile**2)
    best = np.flatnonzero(likelihood >= likelihood.max() - 1e-6)
    low, high, root = int(inside[0]), int(inside[-1]), float(roots[best].mean())
    return Fit(
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
    """Return the log likelihood of each root with the slope that suits it best, and that slope.

    In the slope it is concave: its derivative is bisected, in logarithms, at all roots at once.
    """
    off = rates[None, :] - roots[:, None]
    low, high = (np.full(len(roots), log(slope)) for slope in SLOPES)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        shares = _expit(wanted - np.exp(middle)[:, None] * off)
        rising = (-off * (met - counts * shares)).sum(axis=1) > 0.0
        low, high = np.where(rising, middle, low), np.where(rising, high, middle)
    slopes: Vector = np.exp((low + high) / 2)
    logits = wanted - slopes[:, None] * off
    # log p = -log(1 + e^-x) and log(1 - p) = -log(1 + e^x), without overflow.
    likelihood: Vector = -(
        met * np.logaddexp(0.0, -logits) + (counts - met) * np.logaddexp(0.0, logits)
    ).sum(axis=1)
    return likelihood, slopes


def _expit(values: Vector) -> Vector:
    shares: Vector = 0.5 * (1.0 + np.tanh(values / 2))
    return shares
