"""Blocks of requests are resampled as long as their neighbours have something in common."""

from __future__ import annotations

import numpy as np
import pytest

from draftgate.loadgen.measuring.confidence import (
    block_length,
    resampled_counts,
    variance_inflation,
)


def autoregressive(correlation: float, count: int, seed: int) -> np.ndarray:
    """A series whose neighbours correlate so much, lag by lag the power of it."""
    rng = np.random.default_rng(seed)
    values = [0.0]
    for shock in rng.standard_normal(count - 1):
        values.append(correlation * values[-1] + shock)
    return np.array(values)


def test_every_resample_has_as_many_requests() -> None:
    """Each resample counts N requests in all, and over many each request comes as often."""
    counts = resampled_counts(50, 5.0, np.random.default_rng(0), 4000)
    assert (counts.sum(axis=1) == 50).all()
    assert counts.mean(axis=0) == pytest.approx(np.ones(50), abs=0.1)


def test_neighbours_stay_together_in_long_blocks() -> None:
    """Blocks of mean length b keep a request and the next together with chance 1 - 1/b."""
    values = np.zeros(200)
    values[::2] = 1.0
    spreads = [
        (resampled_counts(200, block, np.random.default_rng(1), 2000) @ values / 200).std()
        for block in (1.0, 20.0)
    ]
    assert spreads[0] == pytest.approx(0.5 / 200**0.5, rel=0.1)
    assert spreads[1] < spreads[0] / 3


def test_independent_values_need_no_blocks() -> None:
    """Of white noise the median block length over seeds is below 2.5, of a constant it is 1."""
    lengths = [block_length(autoregressive(0.0, 400, seed)) for seed in range(40)]
    assert np.median(lengths) < 2.5
    assert block_length(np.ones(100)) == 1.0


def test_the_block_length_is_that_of_theory() -> None:
    """For AR(1) with r, G/g = 2 r / (1 - r^2): the estimate's median is near (G^2/g^2 n)^(1/3)."""
    r, count = 0.7, 2000
    lengths = [block_length(autoregressive(r, count, seed)) for seed in range(20)]
    theory = ((2 * r / (1 - r * r)) ** 2 * count) ** (1 / 3)
    assert np.median(lengths) == pytest.approx(theory, rel=0.35)


def test_the_variance_of_a_mean_is_inflated_by_neighbours() -> None:
    """For AR(1) with r it is (1 + r) / (1 - r) times that of independent values; at least 1."""
    found = [variance_inflation(autoregressive(0.7, 2000, seed)) for seed in range(20)]
    assert np.median(found) == pytest.approx(1.7 / 0.3, rel=0.3)
    assert variance_inflation(np.tile([0.0, 1.0], 50)) == 1.0
