"""Tests of the weights of upstreams."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.routing.preferences import MOST_MODELS, Preferences
from tests.policies.routing_workers import REQUEST, worker

WEIGHTS = st.lists(st.integers(1, 20), min_size=2, max_size=6).filter(lambda w: len(set(w)) > 1)


def named(weights: list[float]) -> Preferences:
    return Preferences({f"w-{number}": weight for number, weight in enumerate(weights)})


@given(WEIGHTS)
def test_shares_of_idle_workers_are_exact(weights: list[int]) -> None:
    """In any number of rounds, idle workers get requests in proportion to their weights."""
    preferences, rounds = named(weights), 3
    workers = [worker(number) for number in range(len(weights))]
    counts = Counter[str]()
    for _ in range(rounds * sum(weights)):
        (chosen,) = preferences.preferred(REQUEST, workers)
        preferences.placed(REQUEST, chosen.worker_id)
        counts[chosen.worker_id] += 1
    assert [counts[one.worker_id] for one in workers] == pytest.approx(
        [rounds * weight for weight in weights], abs=1
    )


def shares(
    weights: list[float], slowness: list[float], concurrency: int, seed: int = 0
) -> list[float]:
    """Return the share of each worker of requests of random length with constant concurrency.

    Args:
        slowness: mean seconds of a request on each worker.
    """
    chance, preferences = Random(seed), named(weights)
    running = [0] * len(weights)
    ends: list[tuple[float, int]] = []
    counts, now_s, requests = [0] * len(weights), 0.0, 6000
    for _ in range(requests):
        if len(ends) == concurrency:
            ends.sort()
            now_s, place = ends.pop(0)
            running[place] -= 1
        workers = [worker(number, running=count) for number, count in enumerate(running)]
        (chosen,) = preferences.preferred(REQUEST, workers)
        preferences.placed(REQUEST, chosen.worker_id)
        place = int(chosen.worker_id[2:])
        running[place] += 1
        counts[place] += 1
        ends.append((now_s + chance.expovariate(1 / slowness[place]), place))
    return [count / requests for count in counts]


@pytest.mark.parametrize("concurrency", [1, 2, 7, 50])
@pytest.mark.parametrize("weights", [[1, 2], [19, 1], [3, 2, 1], [0.25, 0.25, 0.5]])
def test_shares_follow_the_weights_at_any_load(weights: list[float], concurrency: int) -> None:
    """With equal speeds, the share of a worker is its part of the weights."""
    expected = [weight / sum(weights) for weight in weights]
    assert shares(weights, [1.0] * len(weights), concurrency) == pytest.approx(expected, abs=0.02)


def test_slow_worker_gets_less_than_its_share() -> None:
    """A worker that is ten times as slow does not hold a tenth of its share of all requests."""
    slow, _ = shares([2, 1], [10.0, 1.0], 30)
    assert slow < 0.4


def test_worker_that_returns_does_not_catch_up() -> None:
    """A worker that was away gets its share of the requests from then on, and no more."""
    preferences = named([1, 2])
    both = [worker(0), worker(1)]
    for _ in range(100):
        preferences.placed(REQUEST, "w-1")
    counts = Counter[str]()
    for _ in range(30):
        (chosen,) = preferences.preferred(REQUEST, both)
        preferences.placed(REQUEST, chosen.worker_id)
        counts[chosen.worker_id] += 1
    assert counts["w-0"] == pytest.approx(10, abs=1)


def test_models_have_their_own_turns() -> None:
    """Requests for another model do not use up the turns of a worker, in bounded memory."""
    preferences = named([3, 1])
    both = [worker(0), worker(1)]
    counts = Counter[str]()
    for number in range(80):
        for _ in range(5):
            preferences.placed(replace(REQUEST, offer=f"other-{number * 100}"), "w-0")
        (chosen,) = preferences.preferred(REQUEST, both)
        preferences.placed(REQUEST, chosen.worker_id)
        counts[chosen.worker_id] += 1
    assert counts == {"w-0": 60, "w-1": 20}
    for number in range(2 * MOST_MODELS):
        preferences.placed(replace(REQUEST, offer=f"name-{number}"), "w-0")
    assert len(preferences._turns) == MOST_MODELS


def test_worker_of_the_session_stays_a_candidate() -> None:
    """The policy may choose between the next worker and that of the session."""
    preferences = named([1, 2])
    both = [worker(0), worker(1)]
    preferences.placed(REQUEST, "w-0")
    at = [replace(REQUEST, session_worker=name) for name in ("w-0", "w-1")]
    assert preferences.preferred(at[0], both) == tuple(both)
    assert preferences.preferred(at[1], both) == (both[1],)


def test_equal_weights_are_no_preference() -> None:
    """With equal weights, the policy chooses among all workers that are not spare."""
    both = [worker(0), worker(1)]
    assert not named([2, 2]).has_any
    assert named([2, 2]).preferred(REQUEST, both) == tuple(both)
    assert named([2, 2, 5]).preferred(REQUEST, both) == tuple(both)
    spare = named([2, 2, 0])
    assert (spare.has_any, spare.spares) == (True, {"w-2"})
    assert spare.preferred(REQUEST, both) == tuple(both)
