"""Tests of arrival processes: their statistics and their seeds."""

from __future__ import annotations

from itertools import islice

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy
from hypothesis import given

from draftgate.loadgen.planning.arrivals import parse_arrival

RATE = 8.0
SPECS = [
    "constant",
    "poisson",
    "gamma:0.5",
    "gamma:3",
    "onoff",
    "onoff:1,4",
    "ramp:0.5,2,30",
    "ramp:0,2",
]


def instants(spec: str, count: int, seed: int = 1, rate: float = RATE) -> np.ndarray:
    return np.array(list(islice(parse_arrival(spec)(rate, seed), count)))


@given(st.sampled_from(SPECS), st.integers(0, 2**32), st.floats(0.1, 1000.0))
def test_arrival_times_ascend_and_do_not_depend_on_the_total(spec, seed, rate) -> None:
    """Arrival times never decrease, and the first hundred do not depend on the total."""
    long = instants(spec, 200, seed, rate)
    assert (np.diff(long) >= 0).all()
    assert long[0] >= 0
    assert (instants(spec, 100, seed, rate) == long[:100]).all()


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec != "constant"])
def test_another_seed_gives_other_arrival_times(spec: str) -> None:
    """Random processes depend only on the seed."""
    assert (instants(spec, 50, 1) == instants(spec, 50, 1)).all()
    assert (instants(spec, 50, 1) != instants(spec, 50, 2)).any()


def test_constant_arrivals_do_not_drift() -> None:
    """Every 49th request at 49 requests/s is due on a whole second, without rounding drift."""
    found = islice(parse_arrival("constant")(49.0, 0), 0, 49 * 20_000, 49)
    assert list(found) == list(range(20_000))


@pytest.mark.parametrize(("spec", "cv"), [("poisson", 1.0), ("gamma:0.5", 0.5), ("gamma:3", 3.0)])
def test_gaps_have_the_requested_distribution(spec: str, cv: float) -> None:
    """Gaps have mean 1/rate and the requested coefficient of variation.

    A KS test accepts their gamma distribution.
    """
    gaps = np.diff(instants(spec, 20_001), prepend=0.0)[1:]
    standard_error = cv / len(gaps) ** 0.5
    assert abs(gaps.mean() * RATE - 1) < 4 * standard_error
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)
    shape = 1 / cv**2
    if cv > 2:
        return  # The differences of the cumulative sums lose many of the tiny gaps.
    assert scipy.stats.kstest(gaps, "gamma", args=(shape, 0, 1 / (shape * RATE))).pvalue > 1e-3


def test_poisson_counts_have_dispersion_one() -> None:
    """The index of dispersion of counts per second is 1 for Poisson and much larger for on-off."""

    def dispersion(spec: str) -> float:
        counts = np.bincount(instants(spec, 40_000).astype(int))[:-1]
        return counts.var() / counts.mean()

    assert dispersion("poisson") == pytest.approx(1.0, abs=0.08)
    assert dispersion("onoff:2,6") > 10
    assert dispersion("gamma:3") > 3


def test_on_off_is_silent_when_off_and_keeps_its_mean() -> None:
    """The process sends nothing in off phases, and whole cycles have the requested mean rate."""
    found = instants("onoff:1,4", 20_000)
    assert (found % 5 <= 1).all()
    assert len(found) / found[-1] == pytest.approx(RATE, rel=0.04)
    gaps = np.diff(instants("onoff:1,4", 20_000) // 5 + (found % 5))
    assert scipy.stats.kstest(gaps, "expon", args=(0, 1 / (5 * RATE))).pvalue > 1e-3


@pytest.mark.parametrize(("first", "last"), [(0.5, 2.0), (0.0, 2.0), (2.0, 0.5), (1.0, 1.0)])
def test_a_ramp_grows_linearly_and_then_stays(first: float, last: float) -> None:
    """Counts in equal parts of the ramp and after it follow the changing rate."""
    edges = np.linspace(0, 60, 7)
    counts = np.zeros(6)
    for seed in range(100):
        found = instants(f"ramp:{first},{last},30", 1100, seed)
        assert found[-1] > 60
        counts += np.histogram(found, edges)[0]

    def mass(at: float) -> float:
        on = min(at, 30.0)
        return RATE * (first * on + (last - first) / 60 * on**2 + last * (at - on))

    expected = 100 * np.diff([mass(edge) for edge in edges])
    assert scipy.stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 1e-3
    assert counts.sum() == pytest.approx(expected.sum(), rel=0.02)


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "poison",
        "gamma",
        "gamma:0",
        "gamma:-1",
        "gamma:x",
        "gamma:nan",
        "gamma:1,2",
        "poisson:1",
        "onoff:1",
        "onoff:1,inf",
        "ramp:1",
        "ramp:2,0",
        "ramp:0,0",
        "ramp:1,1e308",
        "gamma:1e-200",
        "gamma:1e3",
        "onoff:0,1",
    ],
)
def test_a_malformed_arrival_is_refused(spec: str) -> None:
    """The parser rejects a malformed specification, and the error quotes the text."""
    with pytest.raises(ValueError, match="arrival"):
        parse_arrival(spec)
