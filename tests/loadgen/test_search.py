"""The search finds a known rate, and its interval holds the truth."""

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
from tests.loadgen.md1_server import attainment, capacity, md1_outcomes, run_search, waits

SERVICE_S, LIMIT_S, SHARE = 0.02, 0.1, 0.95


def search_with_seed(seed: int):
    """Search an M/D/1 server with an SLO of five services, starting at 15 requests/s."""
    goal = SearchGoal(15.0, LIMIT_S, share=SHARE, seed=1000 * seed)
    return run_search(goal, md1_outcomes(SERVICE_S, LIMIT_S)).result()


def count_correct_intervals(seeds: range) -> int:
    """Return how many searches end with the truth in a narrow interval."""
    truth = capacity(SHARE, SERVICE_S, LIMIT_S)
    results = map(search_with_seed, seeds)
    return sum(f.low_rps <= truth <= f.high_rps and f.relative_half_width <= 0.05 for f in results)


def test_the_formula_matches_simulated_queues() -> None:
    """Crommelin's formula is within four deviations of a recursion over two million requests."""
    _, waited = waits(35.0, SERVICE_S, 2_000_000, seed=3)
    met = waited + SERVICE_S <= LIMIT_S
    means = met[1000:].astype(float)[: 1999 * 1000].reshape(1999, -1).mean(axis=1)
    error = means.std(ddof=1) / len(means) ** 0.5
    assert abs(means.mean() - attainment(35.0, SERVICE_S, LIMIT_S)) < 4 * error


def test_the_search_finds_the_known_capacity() -> None:
    """At least 9 of 10 seeded searches are within 5 % (the long test runs 100)."""
    assert count_correct_intervals(range(10)) >= 9


@pytest.mark.long
def test_the_search_finds_the_known_capacity_in_95_of_100() -> None:
    """At least 95 of 100 intervals of at most 5 % to either side hold the truth."""
    assert count_correct_intervals(range(100)) >= 95


def sharp_edge(rate_rps: float):
    """Return the outcomes of a server that meets every SLO up to a rate and none beyond."""

    def outcomes_of(probe: SearchProbe):
        at_s = np.arange(probe.longest) / probe.rate_rps
        return at_s, np.full(probe.longest, probe.rate_rps <= rate_rps)

    return outcomes_of


@pytest.mark.parametrize("edge_rps", [0.9, 7.0, 100.0, 1234.5])
def test_a_server_that_breaks_sharply_is_bisected(edge_rps: float) -> None:
    """The search finds a sharp edge from far below and above, in few probes."""
    search = run_search(SearchGoal(10.0, 0.001), sharp_edge(edge_rps))
    found = search.result()
    assert found.stop is StopReason.PRECISE
    assert found.low_rps <= edge_rps <= found.high_rps
    assert found.relative_half_width <= 0.05
    assert len(search.tried) <= 25


def test_the_highest_allowed_rate_gives_a_bound() -> None:
    """The result is a lower bound if the highest allowed rate holds."""
    found = run_search(SearchGoal(10.0, 0.001, max_rate_rps=50.0), sharp_edge(inf)).result()
    assert (found.stop, found.rate_rps) == (StopReason.MAX_RATE, None)
    assert isinf(found.high_rps)
    assert 45.0 <= found.low_rps <= 51.0


def test_a_server_that_never_holds_ends_the_search() -> None:
    """The search ends after ten halvings."""
    search = run_search(SearchGoal(10.0, 0.001), sharp_edge(0.0))
    assert search.result().stop is StopReason.NEVER
    assert search.result().low_rps == 0.0


def test_a_search_respects_its_request_limit() -> None:
    """The search ends at its request limit with the interval so far."""
    goal = SearchGoal(15.0, LIMIT_S, share=SHARE, most_requests=3000)
    found = run_search(goal, md1_outcomes(SERVICE_S, LIMIT_S)).result()
    assert found.stop is StopReason.REQUESTS
    assert found.requests <= 3200


def test_a_generator_that_does_not_keep_up_bounds_the_search() -> None:
    """The search tries INVALID rates twice and then lower rates, and returns a lower bound."""
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


def test_a_probe_ends_when_its_verdict_is_clear() -> None:
    """A probe ends early with a clear verdict, and during the warm-up only by failing."""
    goal = SearchGoal(10.0, 0.1)

    def length(share: float, settle_s: float) -> tuple[int, ProbeVerdict]:
        watch = SequentialTest(SearchProbe(10.0, 0, settle_s, 1000, 200), goal)
        random = np.random.default_rng(1)
        for index in range(3000):
            if watch.observe(index, index / 10.0, met=bool(random.random() < share)):
                return index + 1, watch.verdict
        raise AssertionError

    assert length(0.5, 0.0) == (200, ProbeVerdict.FAILS)
    assert length(0.95, 0.0) == (1000, ProbeVerdict.DOUBTFUL)
    sent, verdict = length(1.0, 50.0)
    assert (sent >= 499 + 200, verdict) == (True, ProbeVerdict.HOLDS)
    sent, verdict = length(0.0, 50.0)
    assert (sent < 499, verdict) == (True, ProbeVerdict.FAILS)


def test_outcomes_count_in_the_order_of_the_schedule() -> None:
    """An outcome does not count before the outcomes of all earlier requests."""
    test = SequentialTest(SearchProbe(10.0, 0, 0.0, 1000, 200), SearchGoal(10.0, 0.1))
    for index in range(1, 500):
        assert not test.observe(index, index / 10.0, met=True)
    assert test.met == ()
    test.observe(0, 0.0, met=False)
    assert test.met[:2] == (False, True)


def test_dispersion_matches_repeated_runs() -> None:
    """The dispersion matches repeated runs within 30 %, and is 1 for coin tosses."""
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


def test_a_busier_queue_gets_a_longer_warm_up() -> None:
    """The warm-up grows with the square of the limit, within its bounds."""
    short_s = warm_up_s(SearchGoal(10.0, 0.1), 10.0)
    assert warm_up_s(SearchGoal(10.0, 0.2), 10.0) == pytest.approx(4 * short_s)
    assert warm_up_s(SearchGoal(10.0, 1.0), 1000.0) == pytest.approx(20.0)
    assert warm_up_s(SearchGoal(10.0, 0.1, answer_s=7.0), 10.0) == 7.0


@pytest.mark.parametrize(
    "wrong",
    [{"share": 1.0}, {"precision": 0.0}, {"confidence": 1.0}, {"max_rate_rps": 1.0}],
)
def test_an_impossible_goal_is_refused(wrong: dict) -> None:
    """The goal rejects shares and precisions of 0 or 1 and a start above the maximum."""
    with pytest.raises(ValueError, match=r"share|precision|confidence|starting rate"):
        SearchGoal(10.0, 0.1, **wrong)
