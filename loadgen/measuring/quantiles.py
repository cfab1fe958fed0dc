"""Student's distribution, by which intervals are made."""

from __future__ import annotations

from math import exp, log, sqrt
from statistics import NormalDist


def student_tail(freedom: float, t: float) -> float:
    """Return the chance that Student's t exceeds so much, to 2 % from 3 degrees of freedom on.

    By Wallace's normal deviate (Annals of Mathematical Statistics 30, 1959):
    `z = (8v + 1)/(8v + 3) sqrt(v ln(1 + t^2/v))`.
    """
    z = (8 * freedom + 1) / (8 * freedom + 3) * sqrt(freedom * log(1 + t * t / freedom))
    return NormalDist().cdf(-z if t > 0 else z)


def student_quantile(freedom: float, share: float = 0.975) -> float:
    """Return the t that is exceeded with chance `1 - share`, where `student_tail` is inverted.

    The 97.5th percentile is 1.2 % too large at 3 degrees of freedom, 4 % at 2: intervals are a
    little wide then.
    """
    z = NormalDist().inv_cdf(share) * (8 * freedom + 3) / (8 * freedom + 1)
    return sqrt(freedom * (exp(z * z / freedom) - 1)) * (1 if z >= 0 else -1)
