"""Tests of confidence intervals: the stationary bootstrap and Student's distribution."""

from __future__ import annotations

from math import inf, log

import numpy as np
import pytest
import scipy

from draftgate.loadgen.measuring.confidence import (
    Ratio,
    block_length,
    mean_ratio,
    resampled_counts,
    student_quantile,
    student_tail,
    variance_inflation,
)


def autoregressive(correlation: float, count: int, seed: int) -> np.ndarray:
    """Return a first-order autoregressive series."""
    rng = np.random.default_rng(seed)
    values = [0.0]
    for shock in rng.standard_normal(count - 1):
        values.append(correlation * values[-1] + shock)
    return np.array(values)


def test_every_resample_has_the_same_number_of_requests() -> None:
    """Each resample counts N requests, and all requests are drawn equally often on average."""
    counts = resampled_counts(50, 5.0, np.random.default_rng(0), 4000)
    assert (counts.sum(axis=1) == 50).all()
    assert counts.mean(axis=0) == pytest.approx(np.ones(50), abs=0.1)


def test_neighbours_stay_together_in_long_blocks() -> None:
    """Blocks of mean length b keep neighbours together with probability 1 - 1/b."""
    values = np.zeros(200)
    values[::2] = 1.0
    spreads = [
        (resampled_counts(200, block, np.random.default_rng(1), 2000) @ values / 200).std()
        for block in (1.0, 20.0)
    ]
    assert spreads[0] == pytest.approx(0.5 / 200**0.5, rel=0.1)
    assert spreads[1] < spreads[0] / 3


def test_independent_values_need_no_blocks() -> None:
    """The median block length is below 2.5 for white noise and 1 for a constant."""
    lengths = [block_length(autoregressive(0.0, 400, seed)) for seed in range(40)]
    assert np.median(lengths) < 2.5
    assert block_length(np.ones(100)) == 1.0


def test_the_block_length_matches_theory() -> None:
    """The median length for AR(1) with r is near (G^2/g^2 n)^(1/3) with G/g = 2 r / (1 - r^2)."""
    r, count = 0.7, 2000
    lengths = [block_length(autoregressive(r, count, seed)) for seed in range(20)]
    theory = ((2 * r / (1 - r * r)) ** 2 * count) ** (1 / 3)
    assert np.median(lengths) == pytest.approx(theory, rel=0.35)


def test_correlation_inflates_the_variance_of_a_mean() -> None:
    """The inflation for AR(1) with r is (1 + r) / (1 - r), and never less than 1."""
    found = [variance_inflation(autoregressive(0.7, 2000, seed)) for seed in range(20)]
    assert np.median(found) == pytest.approx(1.7 / 0.3, rel=0.3)
    assert variance_inflation(np.tile([0.0, 1.0], 50)) == 1.0


def test_student_quantiles_match_the_tables() -> None:
    """Quantiles are within 1.2 % from 3 degrees of freedom on, and never too small below."""
    for freedom, expected in ((3, 3.1824), (9, 2.2622), (10, 2.2281), (19, 2.0930)):
        assert student_quantile(freedom) == pytest.approx(expected, rel=0.012)
    assert student_quantile(10, 0.95) == pytest.approx(1.812, rel=0.01)
    assert 4.3027 <= student_quantile(2) <= 4.3027 * 1.05


@pytest.mark.parametrize("freedom", [3.0, 10.0, 99.0])
def test_student_tails_match_scipy(freedom: float) -> None:
    """Tails are within 3 % of scipy's from 3 degrees of freedom on, and quantiles invert them."""
    for t in (0.5, 1.0, 2.0, 3.0):
        assert student_tail(freedom, t) == pytest.approx(scipy.stats.t.sf(t, freedom), rel=0.03)
        assert student_tail(freedom, -t) == pytest.approx(1 - student_tail(freedom, t))
    quantile = student_quantile(freedom)
    assert student_tail(freedom, quantile) == pytest.approx(0.025)


def test_ratios_have_a_geometric_mean_with_students_interval() -> None:
    """The interval of the mean logarithm has Student's quantile, here 4.30 for three ratios."""
    found = mean_ratio([1.1, 1.2, 1.3])
    assert found.mean == pytest.approx((1.1 * 1.2 * 1.3) ** (1 / 3))
    assert log(found.high / found.mean) == pytest.approx(4.30 * 0.0835 / 3**0.5, rel=0.05)
    assert found.low * found.high == pytest.approx(found.mean**2)


def test_single_ratio_has_no_bounds() -> None:
    """One ratio says nothing about the spread, and no ratio has no mean."""
    assert mean_ratio([2.0]) == Ratio(pytest.approx(2.0), 0.0, inf)
    with pytest.raises(ValueError, match="at least one"):
        mean_ratio([])
