"""The projected load and price of a worker."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec import structs

from draftgate.backends.sim.profile import load_profile
from draftgate.policies.capacity import CapacityNeed
from draftgate.policies.costs.speed import SpeedMeter
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.speculation.cluster_price import MeanNeed, project_load
from draftgate.policies.speculation.price import slot_price
from draftgate.policies.types import StepView, WorkerLoad, WorkerSpeed
from tests.policies.costs import costs

SEATS = 256
ONE = CapacityNeed(1, 300, 500)


def load(running: int, price: float, speed: WorkerSpeed, **fields: int) -> WorkerLoad:
    """A worker with memory for 160,000 tokens."""
    given = {
        "waiting": 0,
        "kv_blocks_free": 8000,
        "kv_blocks_total": 10_000,
        "max_sequences": SEATS,
    }
    counts = {**given, **fields}
    return WorkerLoad(
        running, price=price, acceptance=0.5, proposers=("ngram",), speed=speed, **counts
    )


def reported(cost: StepCost, running: int, context_tokens: int) -> WorkerLoad:
    """The report of a worker with sequences of that length, with its price and speed."""
    kv_tokens = running * context_tokens
    step = StepView(running, kv_tokens, running, 64, ())
    speed = SpeedMeter(cost, 2048).speed(cost, running, kv_tokens)
    return load(running, slot_price(step, cost), speed)


@st.composite
def loads(draw) -> WorkerLoad:
    """Reports of every kind, including those of workers that report little."""
    seconds = st.sampled_from([0.0, 1e-6, 2e-5, 7e-3, 1.0])
    speed = WorkerSpeed(
        step_s=draw(seconds), step_sequence_s=draw(seconds), step_token_s=draw(seconds)
    )
    return load(
        draw(st.integers(0, 300)),
        draw(st.floats(0, 3)),
        speed,
        waiting=draw(st.integers(0, 300)),
        kv_blocks_free=draw(st.integers(0, 100)),
        max_sequences=draw(st.sampled_from([0, 8, SEATS])),
        prompt_tokens=draw(st.integers(0, 5000)),
    )


needs = st.builds(CapacityNeed, st.integers(1, 4), st.integers(0, 4000), st.integers(1, 8000))


@given(loads(), needs)
def test_load_without_later_leases_is_unchanged(given: WorkerLoad, usual: CapacityNeed) -> None:
    """The report includes all leases."""
    assert project_load(given, 0, usual) == given


@given(loads(), needs, st.lists(st.integers(0, 1 << 20), min_size=2))
def test_more_leased_tokens_never_lower_the_load(
    given: WorkerLoad, usual: CapacityNeed, behind: list[int]
) -> None:
    """Price, sequences and prompts never fall below the report, and free memory never rises."""
    found = [project_load(given, tokens, usual) for tokens in sorted([0, *behind])]
    for less, more in pairwise(found):
        assert given.price <= more.price
        assert less.price <= more.price * (1.0 + 1e-12) + 1e-12  # up to rounding
        assert less.running <= more.running
        assert less.running + less.waiting <= more.running + more.waiting
        assert less.prompt_tokens <= more.prompt_tokens
        assert less.kv_blocks_free >= more.kv_blocks_free >= 0


@given(loads(), needs, st.integers(1, 1 << 20))
def test_arriving_requests_fill_free_capacity_and_then_wait(
    given: WorkerLoad, usual: CapacityNeed, behind: int
) -> None:
    """Waiting requests stay waiting, and those beyond the capacity do not raise the price."""
    found = project_load(given, behind, usual)
    if given.max_sequences:
        assert found.running <= max(given.running, given.max_sequences - given.waiting)
        full = structs.replace(given, max_sequences=given.running + given.waiting)
        if full.max_sequences:
            assert project_load(full, behind, usual).price == given.price
    assert found.waiting >= given.waiting


@given(costs(), st.integers(0, 64), st.integers(0, 2000), st.integers(1, 200_000))
def test_projected_price_is_finite_and_not_below_the_reported_one(
    cost: StepCost, running: int, context_tokens: int, behind: int
) -> None:
    """On any staircase, the projected price is finite and at least the reported one."""
    given = reported(cost, running, context_tokens)
    assert given.price <= project_load(given, behind, ONE).price < float("inf")


@pytest.mark.parametrize("context_tokens", [200, 1500, 8000])
@pytest.mark.parametrize("device", ["h100-8b", "h200-8b"])
def test_projected_price_is_close_to_the_price_that_the_worker_reaches(
    device: str, context_tokens: int
) -> None:
    """From 8 to 256 sequences that fill a stair, the projection is 4% below to 15% above."""
    cost = load_profile(device).cost
    full = [n for n in cost.token_buckets if 8 <= n <= 256]
    for before in full:
        given = reported(cost, before, context_tokens)
        for after in full[full.index(before) + 1 :]:
            found = project_load(given, (after - before) * ONE.most_tokens, ONE)
            come_to = reported(cost, after, context_tokens)
            assert 0.96 < found.price / come_to.price < 1.15
            assert found.running == come_to.running


def test_burst_on_an_idle_worker_raises_its_price() -> None:
    """The worker reports 0; the arriving requests raise the price to that of short contexts."""
    cost = load_profile("h100-8b").cost
    found = project_load(reported(cost, 0, 0), 128 * 500, ONE)
    assert found.price == pytest.approx(reported(cost, 128, 200).price, rel=0.1)
    assert found.prompt_tokens == 128 * 300
    assert found.kv_blocks_free == 8000 - 128 * 300 // 16


def test_mean_need_follows_placed_requests() -> None:
    """The mean covers all requests at first, later the last fifty; without any it is one token."""
    usual = MeanNeed()
    assert usual.need == CapacityNeed(1, 0, 1)
    usual.add_request(CapacityNeed(1, 100, 200))
    usual.add_request(CapacityNeed(3, 300, 600))
    assert usual.need == CapacityNeed(2, 201, 402)
    for _ in range(200):
        usual.add_request(CapacityNeed(1, 50, 80))
    assert usual.need.sequences == 1
    assert usual.need.prompt_tokens == pytest.approx(50, rel=0.1)
    assert usual.need.most_tokens == pytest.approx(80, rel=0.1)
