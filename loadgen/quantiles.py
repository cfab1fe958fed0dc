"""Quantiles of the distributions by which intervals are made."""

from __future__ import annotations

from statistics import NormalDist


def student_quantile(freedom: int, share: float = 0.975) -> float:
    """Return a quantile of Student's distribution, to 0.8 % from 2 degrees of freedom on.

    The expansion in the normal quantile of Abramowitz and Stegun, 26.7.5.
    """
    z = NormalDist().inv_cdf(share)
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    g4 = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + g1 / freedom + g2 / freedom**2 + g3 / freedom**3 + g4 / freedom**4
