"""Routing by the predicted cost of a request on each worker."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.capacity import WorkerUsage
from draftgate.policies.registry import routing_policy
from draftgate.policies.routing.prediction import predict
from draftgate.policies.routing.types import Candidate, Candidates, PrefixPull, RouteView
from draftgate.policies.types import (
    DraftCounts,
    ServiceLevel,
    SpeculationMode,
    WorkerSpeed,
)
from tests.policies.routing_workers import (
    REQUEST,
    SPEED,
    decide,
    load,
    place,
    prompt,
    worker,
    workers_with_tokens,
)


def cheapest(*workers: Candidate, request: RouteView = REQUEST) -> int:
    """Return the index of the worker that a new `least_cost` policy chooses."""
    return place(routing_policy("least_cost"), Candidates(workers), request)


def test_least_cost_weighs_backlog_batch_speed_and_cache() -> None:
    """Backlog, batch, speed and cache each decide between otherwise equal workers."""
    assert cheapest(worker(0, prompt_tokens=4000), worker(1)) == 1
    assert cheapest(worker(0, running=8), worker(1, running=2)) == 1
    slow = replace(SPEED, step_s=0.02, step_token_s=4e-5)
    assert cheapest(worker(0, speed=slow), worker(1)) == 1
    assert cheapest(worker(0, running=64, waiting=4), worker(1, running=60)) == 1
    holder = replace(worker(1), cached_tokens=4095)
    assert cheapest(worker(0), holder, worker(2), request=prompt("a", 256)) == 1


def test_request_avoids_a_worker_whose_memory_is_full() -> None:
    """A busier worker with free memory costs less than one that must preempt a sequence.

    The wait for memory counts also if only the output does not fit, and rises with what is missing.
    """
    busy = worker(0, running=12, kv_blocks_free=200)
    assert cheapest(busy, worker(1, running=11, kv_blocks_free=30)) == 0
    assert cheapest(busy, worker(1, running=11, kv_blocks_free=80)) == 1
    full, fuller = (worker(n, running=12, kv_blocks_free=free) for n, free in ((0, 40), (1, 20)))
    assert cheapest(fuller, full) == 1
    (one,), (other,) = (predict(REQUEST, [each]) or [] for each in (full, fuller))
    assert other.ttft_s > one.ttft_s > worker_ttft_s()


def worker_ttft_s() -> float:
    """Return the predicted TTFT on a worker as busy as the full ones, with free memory."""
    (free,) = predict(REQUEST, [worker(0, running=12)]) or []
    return free.ttft_s


def test_priority_classes_weigh_the_time_of_requests() -> None:
    """A request delays urgent sequences only if another worker is far busier. Its own time counts
    twice if it is urgent."""
    assert cheapest(worker(0, running=8, urgent=8), worker(1, running=9)) == 1
    assert cheapest(worker(0, running=8, urgent=8), worker(1, running=18)) == 0
    high = replace(REQUEST, request=replace(REQUEST.request, service=ServiceLevel(priority=-1)))
    (usual,), (urgent,) = (predict(one, [worker(0)]) or [] for one in (REQUEST, high))
    assert urgent.score.value == pytest.approx(2 * usual.score.value)


def test_wait_for_memory_rises_with_leases() -> None:
    """With leases that its load does not contain, a full worker costs more for each token."""
    (full,), (free,) = (
        predict(REQUEST, [worker(0, running=8, kv_blocks_free=blocks)]) or []
        for blocks in (10, 500)
    )
    assert full.score.per_token > 2 * free.score.per_token


@pytest.mark.parametrize(
    ("slow", "running", "target", "strict"),
    [
        (
            replace(SPEED, step_token_s=4e-4),
            30,
            ServiceLevel(ttft_s=0.3),
            ServiceLevel(ttft_s=0.02),
        ),
        (replace(SPEED, step_s=0.03), 60, ServiceLevel(tpot_s=0.012), ServiceLevel(tpot_s=0.005)),
    ],
)
def test_worker_that_would_miss_a_target_is_avoided(
    slow: WorkerSpeed, running: int, target: ServiceLevel, strict: ServiceLevel
) -> None:
    """A slow idle worker costs least, but loses to a busy fast one that alone meets the target. If
    no worker meets the target, the least cost decides."""
    workers = worker(0, speed=slow), worker(1, running=running)
    for service, chosen in ((ServiceLevel(), 0), (target, 1), (strict, 0)):
        request = replace(REQUEST, request=replace(REQUEST.request, service=service))
        assert cheapest(*workers, request=request) == chosen


def test_pull_lets_requests_leave_the_busy_holder_of_a_prefix() -> None:
    """A worker that can pull the prefix faster than compute it wins over the busy holder. Without
    the pull, or with one that takes longer than computing, the holder wins."""
    request = prompt("a", 256)
    holder = replace(worker(0, running=2), cached_tokens=4000)
    idle = worker(1)
    assert cheapest(holder, idle, request=request) == 0
    for pull_s, chosen in ((0.002, 1), (0.5, 0)):
        pulling = replace(idle, pull=PrefixPull(4000, pull_s, 0.6))
        policy = routing_policy("least_cost")
        route = decide(policy, Candidates((holder, pulling)), request)
        assert route.worker_id == f"w-{chosen}"
        assert ("4000 to pull" in route.reason) == bool(chosen)


@given(st.integers(0, 63), st.integers(1, 999), st.floats(1e-3, 1.0), st.floats(1.0, 100.0))
def test_pull_never_raises_the_cost(running, tokens, pull_s, times) -> None:
    """The option of a pull never makes a worker worse, and a slow pull changes nothing."""
    plain = worker(0, running=running)
    pulling = replace(plain, pull=PrefixPull(tokens, pull_s, pull_s * times))
    (without,), (with_pull,) = predict(REQUEST, (plain,)), predict(REQUEST, (pulling,))
    assert with_pull.score.value <= without.score.value + 1e-12
    assert with_pull.ttft_s <= without.ttft_s + 1e-12
    if pull_s >= tokens * SPEED.step_token_s:
        assert with_pull == without


def test_faster_worker_gets_more_but_not_everything() -> None:
    """The faster worker receives more requests but stays faster than the slow worker."""
    policy, slow = routing_policy("least_cost"), replace(SPEED, step_s=0.02, step_sequence_s=2e-4)
    counts = [0, 0]
    for _ in range(300):
        workers = (worker(0, running=counts[0]), worker(1, running=counts[1], speed=slow))
        counts[place(policy, Candidates(workers))] += 1
    tpots_s = [
        predicted.tpot_s
        for predicted in predict(
            REQUEST,
            (worker(0, running=counts[0]), worker(1, running=counts[1], speed=slow)),
        )
    ]
    assert counts[0] > counts[1] > 0
    assert tpots_s[0] < tpots_s[1]


def test_nearly_equal_idle_workers_take_turns() -> None:
    """Idle workers take turns although one worker was measured as 2% faster."""
    policy = routing_policy("least_cost")
    speeds = [replace(SPEED, step_s=0.01 * times) for times in (1.02, 1.0, 1.01)]
    workers = tuple(worker(number, speed=speed) for number, speed in enumerate(speeds))
    taken = Counter(place(policy, Candidates(workers)) for _ in range(30))
    assert taken == {0: 10, 1: 10, 2: 10}


def test_without_known_speed_tokens_decide() -> None:
    """If no speed is known, the policy chooses the worker with the fewest tokens, and says so in
    its reason."""
    policy, unknown = (
        routing_policy("least_cost"),
        {"speed": WorkerSpeed(0.02, 1e-4), "max_sequences": 0},
    )
    route = decide(policy, workers_with_tokens(9, 4, 7, **unknown))
    assert route.worker_id == "w-1"
    assert route.ttft_s is None
    assert "no speed is known" in route.reason
    assert [place(policy, workers_with_tokens(0, 0, **unknown)) for _ in range(4)] == [0, 1, 0, 1]


def test_worker_without_speed_counts_as_average() -> None:
    """The policy neither avoids nor floods a worker of unknown speed."""
    fresh = worker(0, speed=WorkerSpeed())
    assert cheapest(fresh, worker(1, running=3)) == 0
    assert cheapest(replace(fresh, usage=WorkerUsage(load(running=5), 5, 5)), worker(1)) == 1


def test_placement_and_drafts_are_one_decision() -> None:
    """A request with good drafts avoids the worker with expensive slots.

    The two workers are equal for requests without drafts and for `:undrafted`.
    """
    good = replace(REQUEST.request, tenant_drafts=DraftCounts(900.0, 50.0))
    drafting = replace(REQUEST, request=good)
    plain = replace(REQUEST, request=replace(good, mode=SpeculationMode.OFF))
    cheap = worker(0, 10, running=16, price=0.05)
    expensive = worker(1, 10, running=16, price=0.9)
    route = decide(routing_policy("least_cost"), Candidates((expensive, cheap)), drafting)
    assert route.worker_id == "w-0"
    assert route.draft_tokens >= 4
    assert route.offers[0].level < 0.5 * route.offers[1].level
    for spec, request in (("least_cost", plain), ("least_cost:undrafted", drafting)):
        offers = decide(routing_policy(spec), Candidates((expensive, cheap)), request).offers
        assert offers[0].level == pytest.approx(offers[1].level)


@given(
    st.integers(0, 63),
    st.integers(0, 20_000),
    st.integers(0, 999),
    st.floats(0.0, 1.0),
    st.floats(0.0, 5.0),
)
def test_cost_rises_with_load_and_falls_with_cached_tokens(
    running, ahead, cached, price, age_s
) -> None:
    """The cost rises with every sequence and prompt token, and falls with cached tokens."""
    current = worker(0, running=running, prompt_tokens=ahead, price=price)
    busier = worker(0, running=running + 1, prompt_tokens=ahead, price=price)
    more_ahead = worker(0, running=running, prompt_tokens=ahead + 100, price=price)
    old = replace(current, age_s=age_s)
    (now,), (with_sequence,), (with_prompt,), (with_age,), (with_cache,) = (
        predict(REQUEST, (candidate,))
        for candidate in (current, busier, more_ahead, old, replace(current, cached_tokens=cached))
    )
    assert now.score.value <= with_sequence.score.value
    assert now.score.value < with_prompt.score.value
    assert with_age.score.value <= now.score.value
    assert with_cache.score.value <= now.score.value
    assert with_cache.ttft_s <= now.ttft_s
    assert now.score.per_token > 0.0
