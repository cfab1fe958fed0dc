"""Tests of attainment: the requests that met their SLO, and the interval of their share."""

from __future__ import annotations

from math import sqrt

import pytest
import scipy

from draftgate.loadgen.measuring.confidence import Z_95, wilson
from draftgate.loadgen.measuring.slo import (
    attainment,
    attainment_by_class,
    goodput_rps,
    meets_slo,
    met_gap,
    met_tpot,
    met_ttft,
)
from draftgate.loadgen.types import Slo
from tests.loadgen.known_records import a_run, failed, record


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (10, 10), (1, 2), (81, 263), (7, 8)])
def test_the_interval_matches_scipy(successes: int, trials: int) -> None:
    """Both ends equal scipy's and are z standard errors away."""
    low, high = wilson(successes, trials)
    expected = scipy.stats.binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-9)
    for end in {low, high} - {0.0, 1.0}:
        error = Z_95 * sqrt(end * (1 - end) / trials)
        assert abs(successes / trials - end) == pytest.approx(error, abs=1e-7)


def test_the_interval_without_trials_is_0_to_1() -> None:
    """The interval without trials is [0, 1], and more successes than trials raise an error."""
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="3 successes of 2"):
        wilson(3, 2)


@pytest.mark.parametrize(
    ("slo", "in_time", "fast"),
    [
        (Slo(), True, True),
        (Slo(0.5, 0.05), True, True),
        (Slo(0.499, 0.05), False, True),
        (Slo(0.5, 0.0499), True, False),
        (Slo(ttft_s=0.499), False, True),
        (Slo(tpot_s=0.0499), True, False),
    ],
)
def test_both_limits_must_be_met(slo: Slo, in_time: bool, fast: bool) -> None:
    """A record with TTFT 0.5 s and TPOT 0.05 s meets exactly these limits."""
    one = record(at_s=0.0, gaps_s=(0.25, 0.25), tokens=11, slo=slo)
    assert (met_ttft(one), met_tpot(one), meets_slo(one)) == (in_time, fast, in_time and fast)


def test_a_broken_stream_meets_no_slo() -> None:
    """A broken stream meets no SLO, and a response without text is not in time."""
    assert not meets_slo(failed(0, slo=Slo(10.0, 10.0)))
    assert not meets_slo(failed(0))
    silent = record(chunks=(), tokens=0, slo=Slo(ttft_s=100.0))
    assert not met_ttft(silent)
    assert meets_slo(record(chunks=(), tokens=0))


def test_a_response_of_one_token_has_no_tpot() -> None:
    """A response of one token meets any TPOT limit."""
    assert meets_slo(record(gaps_s=(), tokens=1, slo=Slo(tpot_s=1e-9)))


def test_every_gap_must_be_within_its_limit() -> None:
    """A single long gap misses the limit, even if the mean time per token is short."""
    slo = Slo(tpot_s=0.1, chunk_gap_s=0.2)
    even = record(gaps_s=(0.2, 0.2), tokens=11, slo=slo)
    stalled = record(gaps_s=(0.1, 0.21), tokens=11, slo=slo)
    assert (met_tpot(stalled), met_gap(stalled)) == (True, False)
    counted = attainment([even, stalled])
    assert (counted.met, counted.tpot_met, counted.gap_met) == (1, 2, 1)
    assert met_gap(record(gaps_s=(), tokens=1, slo=slo))


def test_the_limit_counts_from_the_schedule() -> None:
    """A request that is sent late misses a limit from its scheduled time."""
    late = record(at_s=1.0, first_s=0.5, slo=Slo(ttft_s=0.495))
    assert late.chunks[0].at_s - late.sent_s < 0.495
    assert not meets_slo(late)


def test_attainment_counts_every_scheduled_request() -> None:
    """Failed requests count in total and by class, and classes are in alphabetical order."""
    run = a_run()
    overall = attainment(run.records)
    assert (overall.requests, overall.intact, overall.met) == (4, 3, 2)
    assert (overall.ttft_met, overall.tpot_met) == (2, 3)
    assert overall.share == 0.5
    assert overall.interval == wilson(2, 4)
    batch, interactive = attainment_by_class(run.records)
    assert (batch.class_name, batch.requests, batch.met) == ("batch", 2, 1)
    assert (interactive.class_name, interactive.requests, interactive.met) == ("interactive", 2, 1)
    assert attainment([]).share is None


def test_goodput_is_over_the_schedule() -> None:
    """Goodput is the requests that met their SLO per second, or None for an empty schedule."""
    assert goodput_rps(30, 20.0) == 1.5
    assert goodput_rps(0, 20.0) == 0.0
    assert goodput_rps(1, 0.0) is None
