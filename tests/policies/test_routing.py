"""The contract of routing policies, and the baseline policies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.protocols import RoutingPolicy
from draftgate.policies.registry import routing_policy
from draftgate.policies.routing.types import Candidates
from draftgate.policies.testing import check_routing
from draftgate.policies.types import ServiceLevel
from tests.policies.routing_workers import (
    REQUEST,
    decide,
    place,
    worker,
    workers_with_tokens,
)

SPECS = (
    "round_robin",
    "least_loaded",
    "freeness",
    "power_of_two",
    "prefix_affinity",
    "least_cost",
    "least_cost:undrafted",
    "weighted:prefix=2,load=1",
    "weighted:latency,staleness=0.5,price=0.1",
    "weighted:freeness,prefix=0.5",
)


def test_price_is_an_alias_of_least_cost() -> None:
    """The name `price` of release 0.1.0 builds `least_cost` with its argument."""
    assert routing_policy("price").name == "least_cost"
    assert routing_policy("price:undrafted").name == "least_cost:undrafted"


@pytest.mark.parametrize("spec", SPECS)
def test_shipped_policy_keeps_its_contract(spec: str) -> None:
    """Every shipped policy is found by its name and keeps the contract of `RoutingPolicy`."""
    policy = routing_policy(spec)
    assert isinstance(policy, RoutingPolicy)
    assert policy.name == spec
    assert routing_policy(spec) is not policy
    check_routing(lambda: routing_policy(spec))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            "nearest",
            r"known: freeness, least_cost\[:undrafted\], .*, prefix_affinity, round_robin",
        ),
        ("round_robin:2", "takes no argument"),
        ("price:cheap", "no argument but `undrafted`"),
        ("weighted", "unknown scorer ''"),
        (
            "weighted:luck=1",
            "unknown scorer 'luck'.*freeness, latency, load, prefix, price",
        ),
        ("weighted:load=1,load=2", "named twice"),
        ("weighted:load=-1", "above 0"),
        ("weighted:load=much", "above 0, not 'much'"),
        ("weighted:load=inf", "above 0"),
    ],
)
def test_invalid_spec_error_names_the_known_names(spec: str, words: str) -> None:
    """The error names the invalid policy, scorer or weight."""
    with pytest.raises(ValueError, match=words):
        routing_policy(spec)


@given(
    st.sampled_from(SPECS),
    st.lists(
        st.tuples(st.integers(0, 10_000), st.integers(0, 64), st.integers(0, 9000)), min_size=1
    ),
    st.integers(0, 20),
    st.integers(0, 3),
)
def test_some_candidate_is_always_chosen(spec, loads, rivals, seed) -> None:
    """Any candidates and loads give distinct offers whose alternatives are sorted best first."""
    workers = tuple(
        replace(worker(n, sent, running=running), leased_tokens=leased, age_s=float(n % 3))
        for n, (sent, running, leased) in enumerate(loads)
    )
    route = decide(routing_policy(spec), Candidates(workers, rivals), seed=seed)
    offered = [offer.worker_id for offer in route.offers]
    assert set(offered) <= {worker.worker_id for worker in workers}
    assert len(offered) == len(set(offered)) <= 64
    rest = [offer.level for offer in route.offers[1:]]
    assert rest == sorted(rest)


@pytest.mark.parametrize(
    ("tokens", "chosen"), [([0], 0), ([0, 0], 0), ([5, 3], 1), ([7, 7, 7], 0), ([9, 4, 4], 1)]
)
def test_least_loaded_takes_the_fewest_tokens(tokens: list[int], chosen: int) -> None:
    """The policy chooses the first of the workers with the fewest tokens."""
    assert place(routing_policy("least_loaded"), workers_with_tokens(*tokens)) == chosen


def test_equal_workers_take_turns() -> None:
    """The policy chooses the worker after the last chosen worker."""
    policy = routing_policy("least_loaded")
    assert [place(policy, workers_with_tokens(0, 0, 0)) for _ in range(4)] == [0, 1, 2, 0]
    assert place(policy, workers_with_tokens(5, 9, 5)) == 2
    assert place(policy, workers_with_tokens(0, 0, 7)) == 0


def test_round_robin_takes_turns_whatever_the_load() -> None:
    """Every worker receives every n-th request, even if a worker is sometimes missing."""
    policy = routing_policy("round_robin")
    assert [place(policy, workers_with_tokens(9, 0, 5)) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    workers = workers_with_tokens(0, 0, 0).workers
    assert place(policy, Candidates((workers[0], workers[2]))) == 1
    assert place(policy, Candidates(workers)) == 0


def test_tokens_of_other_gateways_count() -> None:
    """The policy counts the tokens that other gateways sent to a worker."""
    workers = (worker(0, 0, kv_blocks_free=500), worker(1, 4000))
    assert workers[0].tokens == 8000
    assert place(routing_policy("least_loaded"), Candidates(workers)) == 1
    leased = (replace(worker(0), leased_tokens=5000), worker(1, 4000))
    assert place(routing_policy("least_loaded"), Candidates(leased)) == 1


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        ({"kv_blocks_free": 500, "running": 4}, {"kv_blocks_free": 400, "running": 4}, 0),
        ({"kv_blocks_free": 500, "running": 9}, {"kv_blocks_free": 400, "running": 4}, 1),
        ({"kv_blocks_free": 500, "prompt_tokens": 5000}, {"kv_blocks_free": 400}, 1),
        ({"kv_blocks_free": 500, "running": 4, "urgent": 1}, {"kv_blocks_free": 1}, 1),
        ({"head_tokens": 15_000, "waiting": 1}, {"kv_blocks_free": 400}, 1),
    ],
)
def test_freeness_takes_the_most_free_memory_per_sequence(
    first: dict[str, int], second: dict[str, int], chosen: int
) -> None:
    """Free memory less the demand of the queue counts per sequence, and urgent ones keep headroom.

    Unlike `least_loaded`, the policy ignores the tokens that a worker's requests may generate.
    """
    workers = Candidates((worker(0, 9000, **first), worker(1, 0, **second)))
    assert place(routing_policy("freeness"), workers) == chosen


def test_urgent_requests_share_the_headroom_of_a_worker() -> None:
    """An urgent request goes to the worker whose memory is kept free for another one."""
    workers = Candidates(
        (worker(0, kv_blocks_free=900, running=1, urgent=1), worker(1, kv_blocks_free=400))
    )
    request = replace(REQUEST.request, service=ServiceLevel(priority=-1))
    policy = routing_policy("freeness")
    assert place(policy, workers) == 1
    assert place(policy, workers, replace(REQUEST, request=request)) == 0


def test_freeness_counts_leases_and_needs_reported_memory() -> None:
    """Leased tokens lower the freeness. Workers without known memory are compared by tokens."""
    leased = replace(worker(0), leased_tokens=3000), worker(1, kv_blocks_free=900)
    assert place(routing_policy("freeness"), Candidates(leased)) == 1
    assert place(routing_policy("freeness"), workers_with_tokens(5, 3, kv_blocks_total=0)) == 1


@given(st.lists(st.integers(0, 1000), min_size=3, max_size=9, unique=True), st.integers(0, 99))
def test_power_of_two_never_takes_the_most_loaded_of_three(tokens, seed) -> None:
    """The policy draws two workers and chooses the less loaded worker."""
    route = decide(routing_policy("power_of_two"), workers_with_tokens(*tokens), seed=seed)
    first, second = route.offers
    assert first.level < second.level
    assert first.worker_id != f"w-{tokens.index(max(tokens))}"


def test_power_of_two_draws_all_pairs_equally_often() -> None:
    """The policy draws each of six pairs in about a sixth of its decisions."""
    policy, draw = routing_policy("power_of_two"), Random(7).random
    workers = workers_with_tokens(1, 2, 3, 4)
    pairs = Counter(
        frozenset(offer.worker_id for offer in policy.route(REQUEST, workers, draw).offers)
        for _ in range(6000)
    )
    assert len(pairs) == 6
    assert all(880 <= count <= 1120 for count in pairs.values())  # 4 standard deviations
