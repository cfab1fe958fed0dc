"""Overload in virtual time: goodput and promises hold for any client behaviour."""

from __future__ import annotations

from functools import cache
from statistics import mean

import pytest

from tests.policies.overload import (
    Client,
    Pool,
    Return,
    at_once,
    attainment,
    early,
    goodput,
    half_obeys,
    kept,
    never,
    retry_ratio,
    rounds_up,
)

SEEDS = (1, 2, 3)


@cache
def runs(load: float = 3.0, **others) -> list[tuple[Pool, list[Client]]]:
    pools = [Pool(load, seed=seed, **others) for seed in SEEDS]
    return [(pool, pool.run()) for pool in pools]


def mean_goodput(results: list[tuple[Pool, list[Client]]]) -> float:
    return mean(goodput(pool, clients) for pool, clients in results)


def mean_attainment(results: list[tuple[Pool, list[Client]]]) -> float:
    return mean(attainment(clients) for _, clients in results)


@cache
def peak() -> float:
    """Return the best goodput over offered loads, with clients that return on time."""
    return max(mean_goodput(runs(load)) for load in (1.0, 1.5, 2.0, 3.0))


@pytest.mark.parametrize("load", [1.5, 2.0, 3.0, 5.0])
def test_goodput_does_not_fall_under_overload(load: float) -> None:
    """Beyond the capacity, goodput stays within 5% of its peak, and admitted requests start in
    time."""
    results = runs(load)
    assert mean_goodput(results) >= 0.95 * peak()
    assert mean_attainment(results) >= 0.95


@pytest.mark.parametrize("tenants", [1, 5])
@pytest.mark.parametrize("without_target", [0.0, 0.5])
def test_promises_are_kept_at_three_times_the_capacity(tenants: int, without_target: float) -> None:
    """90% of punctual clients are admitted, and the median delay is at most 1.5 times too long."""
    results = runs(tenants=tenants, without_target=without_target)
    assert mean(kept(clients) for _, clients in results) >= 0.9
    assert mean(retry_ratio(pool, clients) for pool, clients in results) <= 1.5
    assert mean_attainment(results) >= 0.95
    assert mean_goodput(results) >= 0.95 * peak()


@pytest.mark.parametrize("comes_back", [never, at_once, early, half_obeys, rounds_up])
def test_no_behaviour_of_clients_costs_goodput(comes_back: Return) -> None:
    """Goodput holds if clients return never, at once, early, at whole seconds, or only half do."""
    results = runs(comes_back=comes_back)
    assert mean_goodput(results) >= 0.95 * peak()
    assert mean_attainment(results) >= 0.95


def test_clients_that_round_up_to_seconds_keep_their_appointments() -> None:
    """90% of clients that round up are admitted."""
    assert mean(kept(clients) for _, clients in runs(comes_back=rounds_up)) >= 0.9


def test_early_clients_keep_their_appointments() -> None:
    """A client that returns early keeps its appointment."""
    assert mean(kept(clients) for _, clients in runs(comes_back=early)) >= 0.9


@pytest.mark.parametrize("bias", [0.7, 1.5])
def test_wrong_expectations_are_corrected(bias: float) -> None:
    """If all requests take 0.7 or 1.5 times the expected time, promises hold."""
    results = runs(bias=bias)
    assert mean(kept(clients) for _, clients in results) >= 0.85
    assert mean_attainment(results) >= 0.95


def test_flood_does_not_refuse_other_tenants() -> None:
    """If one tenant offers ten times as much as three others, those are admitted at once."""
    for pool, clients in runs(tenants=4, flood=0.88):
        others = [client for client in clients if client.tenant != "t0"]
        assert len(others) * 10 < len(clients) <= pool.load * 60 * 11
        assert mean(not client.refusals for client in others) >= 0.9
        assert attainment(others) >= 0.95


@cache
def classes_of(seconds: float = 60.0, tenants: int = 1) -> list[tuple[Pool, list[Client]]]:
    return runs(priorities=(-1, 0, 1), seconds=seconds, tenants=tenants)


@pytest.mark.parametrize("tenants", [1, 5])
def test_promises_are_kept_to_three_classes(tenants: int) -> None:
    """Promises hold for three equal classes, of which the best one alone fills the pool.

    The worst class keeps slightly less than 90%, because the future load of better classes is
    unknown.
    """
    results = classes_of(tenants=tenants)
    assert mean(kept(clients) for _, clients in results) >= 0.9
    assert mean(retry_ratio(pool, clients) for pool, clients in results) <= 1.5
    assert mean_goodput(results) >= 0.95 * peak()
    for priority, least_kept in ((-1, 0.95), (0, 0.9), (1, 0.85)):
        own = [[c for c in clients if c.priority == priority] for _, clients in results]
        assert mean(map(attainment, own)) >= 0.95
        assert mean(map(kept, own)) >= least_kept


def test_no_class_starves() -> None:
    """While better classes fill the pool, each class gets a quarter of the rest."""
    for pool, clients in classes_of():
        during = {-1: 0, 0: 0, 1: 0}
        for client in clients:
            assert client.start_s is not None
            during[client.priority] += client.start_s < pool.seconds
        shares = {key: number / sum(during.values()) for key, number in during.items()}
        assert 0.65 <= shares[-1] <= 0.8
        assert 0.15 <= shares[0] <= 0.25
        assert shares[1] >= 0.05


def test_class_beside_half_a_pool_keeps_its_appointments() -> None:
    """If better classes take half of the pool, 90% of appointments are kept."""
    results = runs(1.5, priorities=(0, 1, 1))
    assert mean(kept(clients) for _, clients in results) >= 0.9
    assert mean_attainment(results) >= 0.95
    assert mean_goodput(results) >= 0.95 * peak()


def test_bounded_queue_alone_misses_its_deadlines() -> None:
    """Under the same load hardly any request starts in time, so these tests can fail."""
    assert mean_attainment(runs(admission="bounded")) < 0.5
