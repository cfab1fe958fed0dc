"""The search finds the rate that is known to be true, and says how sure it is."""

from __future__ import annotations

from math import inf, isinf

import numpy as np
import pytest

from draftgate.loadgen.search.rate_fit import dispersion
from draftgate.loadgen.search.search import RateSearch, warm_up_s
from draftgate.loadgen.search.sequential_test import SequentialTest
from draftgate.loadgen.search.types import (
    ProbeResult,
    ProbeVerdict,
    SearchGoal,
    SearchProbe,
    StopReason,
)
from tests.loadgen.md1_server import attainment, capacity, md1, run, waits

SERVICE_S, LIMIT_S, SHARE = 0.02, 0.1, 0.95


def found_by(seed: int):
    """One search of an M/D/1 server whose SLO is five services long, begun at 15 requests/s."""
    aim = SearchGoal(15.0, LIMIT_S, share=SHARE, seed=1000 * seed)
    return run(aim, md1(SERVICE_S, LIMIT_S)).result()


def hits(seeds: range) -> int:
    """How many searches end with the truth in an interval that is narrow enough."""
    truth = capacity(SHARE, SERVICE_S, LIMIT_S)
    all_found = map(found_by, seeds)
    return sum(
        f.low_rps <= truth <= f.high_rps and f.relative_half_width <= 0.05 for f in all_found
    )


def test_the_truth_is_what_long_queues_show() -> None:
    """Crommelin's formula is within four deviations of a recursion over two million requests."""
    _, waited = waits(35.0, SERVICE_S, 2_000_000, seed=3)
    met = waited + SERVICE_S <= LIMIT_S
    means = met[1000:].astype(float)[: 1999 * 1000].reshape(1999, -1).mean(axis=1)
    error = means.std(ddof=1) / len(means) ** 0.5
    assert abs(means.mean() - attainment(35.0, SERVICE_S, LIMIT_S)) < 4 * error


def test_the_search_finds_the_known_capacity() -> None:
    """In at least 9 of 10 seeded runs, within 5 % (all 100 are in the long test)."""
    assert hits(range(10)) >= 9


@pytest.mark.long
def test_the_search_finds_the_known_capacity_in_95_of_100() -> None:
    """The truth lies in an interval of at most 5 % to either side, in at least 95 of 100."""
    assert hits(range(100)) >= 95


def sharp(rate_rps: float):
    """A server which meets every SLO up to a rate, and none beyond."""

    def answers(probe: SearchProbe):
        at_s = np.arange(probe.longest) / probe.rate_rps
        return at_s, np.full(probe.longest, probe.rate_rps <= rate_rps)

    return answers


@pytest.mark.parametrize("edge_rps", [0.9, 7.0, 100.0, 1234.5])
def test_a_server_that_breaks_sharply_is_bisected(edge_rps: float) -> None:
    """The edge is found from far below and above, in few probes."""
    search = run(SearchGoal(10.0, 0.001), sharp(edge_rps))
    found = search.result()
    assert found.stop is StopReason.PRECISE
    assert found.low_rps <= edge_rps <= found.high_rps
    assert found.relative_half_width <= 0.05
    assert len(search.tried) <= 25


def test_what_holds_at_the_highest_rate_allowed_is_a_bound() -> None:
    """Then the rate is at least about that, and no more is claimed."""
    found = run(SearchGoal(10.0, 0.001, max_rate_rps=50.0), sharp(inf)).result()
    assert (found.stop, found.rate_rps) == (StopReason.MAX_RATE, None)
    assert isinf(found.high_rps)
    assert 45.0 <= found.low_rps <= 51.0


def test_a_server_that_never_holds_ends_the_search() -> None:
    """After ten halvings."""
    search = run(SearchGoal(10.0, 0.001), sharp(0.0))
    assert search.result().stop is StopReason.NEVER
    assert search.result().low_rps == 0.0


def test_a_search_sends_no_more_than_it_may() -> None:
    """It ends with the interval so far."""
    aim = SearchGoal(15.0, LIMIT_S, share=SHARE, most_requests=3000)
    found = run(aim, md1(SERVICE_S, LIMIT_S)).result()
    assert found.stop is StopReason.REQUESTS
    assert found.requests <= 3200


def test_a_generator_that_does_not_keep_up_bounds_the_search() -> None:
    """INVALID rates are tried twice, then those below; what is known is `at least`."""
    search, tried = RateSearch(SearchGoal(10.0, 0.001)), []
    while (probe := search.propose()) is not None:
        tried.append(probe.rate_rps)
        valid = probe.rate_rps < 50.0
        verdict = ProbeVerdict.HOLDS if valid else ProbeVerdict.INVALID
        met = (True,) * probe.requests if valid else ()
        search.observe(ProbeResult(probe, met, probe.requests, verdict, () if valid else ("late",)))
    found = search.result()
    assert (found.stop, found.rate_rps) == (StopReason.GENERATOR, None)
    assert 40.0 <= found.low_rps <= 50.0
    assert tried.count(80.0) == 2
    assert len({probe.probe.seed for probe in search.tried}) == len(search.tried)


def test_a_probe_is_cut_where_its_verdict_is_clear() -> None:
    """As soon as it may be; not while it is in doubt; and while settling only by failing."""
    aim = SearchGoal(10.0, 0.1)

    def length(share: float, settle_s: float) -> tuple[int, ProbeVerdict]:
        watch = SequentialTest(SearchProbe(10.0, 0, settle_s, 1000, 200), aim)
        random = np.random.default_rng(1)
        for sent in range(1, 3000):
            if watch.add(sent / 10.0, met=bool(random.random() < share)):
                return sent, watch.verdict
        raise AssertionError

    assert length(0.5, 0.0) == (200, ProbeVerdict.FAILS)
    assert length(0.95, 0.0) == (1000, ProbeVerdict.DOUBTFUL)
    sent, verdict = length(1.0, 50.0)
    assert (sent >= 499 + 200, verdict) == (True, ProbeVerdict.HOLDS)
    sent, verdict = length(0.0, 50.0)
    assert (sent < 499, verdict) == (True, ProbeVerdict.FAILS)


def test_requests_in_a_queue_are_not_independent() -> None:
    """Batches show the factor that repetition shows, within 30 %; coins have none."""
    shares, met = [], []
    for seed in range(400):
        _, waited = waits(34.0, SERVICE_S, 2200, seed)
        met.append((waited[200:] + SERVICE_S <= LIMIT_S).tolist())
        shares.append(np.mean(met[-1]))
    mean = np.mean(shares)
    true = np.var(shares) / (mean * (1 - mean) / 2000)
    assert dispersion(met).factor == pytest.approx(true, rel=0.3)
    coins = np.random.default_rng(2).random((20, 2000)) < SHARE
    assert dispersion(coins.tolist()).factor == pytest.approx(1.0, abs=0.2)


def test_a_busier_queue_gets_more_time_to_settle() -> None:
    """By the square of the limit; no more than the precision asks for; no less than an answer."""
    short_s = warm_up_s(SearchGoal(10.0, 0.1), 10.0)
    assert warm_up_s(SearchGoal(10.0, 0.2), 10.0) == pytest.approx(4 * short_s)
    assert warm_up_s(SearchGoal(10.0, 1.0), 1000.0) == pytest.approx(20.0)
    assert warm_up_s(SearchGoal(10.0, 0.1, answer_s=7.0), 10.0) == 7.0


@pytest.mark.parametrize(
    "wrong",
    [{"share": 1.0}, {"precision": 0.0}, {"confidence": 1.0}, {"max_rate_rps": 1.0}],
)
def test_an_aim_that_cannot_be_met_is_refused(wrong: dict) -> None:
    """Shares and precisions of nothing or all, and a start above the maximum."""
    with pytest.raises(ValueError, match=r"share|precision|confidence|starting rate"):
        SearchGoal(10.0, 0.1, **wrong)
