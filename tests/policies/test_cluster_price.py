"""The projected load and price of a worker between its reports."""

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

MAX_SEQUENCES = 256
ONE = CapacityNeed(1, 300, 500)


def load(running: int, price: float, speed: WorkerSpeed, **fields: int) -> WorkerLoad:
    """Return the load of a worker with memory for 160,000 tokens."""
    report = {
        "waiting": 0,
        "kv_blocks_free": 8000,
        "kv_blocks_total": 10_000,
        "max_sequences": MAX_SEQUENCES,
    }
    counts = {**report, **fields}
    return WorkerLoad(
        running, price=price, acceptance=0.5, proposers=("ngram",), speed=speed, **counts
    )


def reported(cost: StepCost, running: int, context_tokens: int) -> WorkerLoad:
    """Return the report of a worker with equal sequences, including its price and speed."""
    kv_tokens = running * context_tokens
    step = StepView(running, kv_tokens, running, 64, ())
    speed = SpeedMeter(cost, 2048).speed(cost, running, kv_tokens)
    return load(running, slot_price(step, cost), speed)


@st.composite
def loads(draw) -> WorkerLoad:
    """Draw reports of every kind, including reports with few fields."""
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
        max_sequences=draw(st.sampled_from([0, 8, MAX_SEQUENCES])),
        prompt_tokens=draw(st.integers(0, 5000)),
    )


needs = st.builds(CapacityNeed, st.integers(1, 4), st.integers(0, 4000), st.integers(1, 8000))


@given(loads(), needs)
def test_load_without_later_leases_is_unchanged(
    report: WorkerLoad, mean_need: CapacityNeed
) -> None:
    """If the report includes all leases, the projected load equals the report."""
    assert project_load(report, 0, mean_need) == report


@given(loads(), needs, st.lists(st.integers(0, 1 << 20), min_size=2))
def test_more_leased_tokens_never_lower_the_load(
    report: WorkerLoad, mean_need: CapacityNeed, leased_tokens: list[int]
) -> None:
    """Leases never lower price, sequences and prompts, and never raise free memory."""
    projected = [project_load(report, tokens, mean_need) for tokens in sorted([0, *leased_tokens])]
    for less, more in pairwise(projected):
        assert report.price <= more.price
        assert less.price <= more.price * (1.0 + 1e-12) + 1e-12  # up to rounding
        assert less.running <= more.running
        assert less.running + less.waiting <= more.running + more.waiting
        assert less.prompt_tokens <= more.prompt_tokens
        assert less.kv_blocks_free >= more.kv_blocks_free >= 0


@given(loads(), needs, st.integers(1, 1 << 20))
def test_arriving_requests_fill_free_capacity_and_then_wait(
    report: WorkerLoad, mean_need: CapacityNeed, leased_tokens: int
) -> None:
    """Waiting requests stay waiting, and requests beyond the capacity do not raise the price."""
    projected = project_load(report, leased_tokens, mean_need)
    if report.max_sequences:
        assert projected.running <= max(report.running, report.max_sequences - report.waiting)
        full = structs.replace(report, max_sequences=report.running + report.waiting)
        if full.max_sequences:
            assert project_load(full, leased_tokens, mean_need).price == report.price
    assert projected.waiting >= report.waiting


@given(costs(), st.integers(0, 64), st.integers(0, 2000), st.integers(1, 200_000))
def test_projected_price_is_finite_and_not_below_the_reported_price(
    cost: StepCost, running: int, context_tokens: int, leased_tokens: int
) -> None:
    """The projected price is finite and at least the reported price for any step cost."""
    report = reported(cost, running, context_tokens)
    assert report.price <= project_load(report, leased_tokens, ONE).price < float("inf")


@pytest.mark.parametrize("context_tokens", [200, 1500, 8000])
@pytest.mark.parametrize("device", ["h100-8b", "h200-8b"])
def test_projected_price_is_close_to_the_price_that_the_worker_reaches(
    device: str, context_tokens: int
) -> None:
    """The projection is 4% below to 15% above the true price for 8 to 256 sequences."""
    cost = load_profile(device).cost
    full = [n for n in cost.token_buckets if 8 <= n <= 256]
    for before in full:
        report = reported(cost, before, context_tokens)
        for after in full[full.index(before) + 1 :]:
            projected = project_load(report, (after - before) * ONE.most_tokens, ONE)
            reached = reported(cost, after, context_tokens)
            assert 0.96 < projected.price / reached.price < 1.15
            assert projected.running == reached.running


def test_burst_on_an_idle_worker_raises_its_price() -> None:
    """A burst on an idle worker raises its price from 0 to that of short contexts."""
    cost = load_profile("h100-8b").cost
    projected = project_load(reported(cost, 0, 0), 128 * 500, ONE)
    assert projected.price == pytest.approx(reported(cost, 128, 200).price, rel=0.1)
    assert projected.prompt_tokens == 128 * 300
    assert projected.kv_blocks_free == 8000 - 128 * 300 // 16


def test_mean_need_follows_placed_requests() -> None:
    """The mean need covers all requests at first, and later the last fifty requests."""
    mean_need = MeanNeed()
    assert mean_need.need == CapacityNeed(1, 0, 1)
    mean_need.add_request(CapacityNeed(1, 100, 200))
    mean_need.add_request(CapacityNeed(3, 300, 600))
    assert mean_need.need == CapacityNeed(2, 201, 402)
    for _ in range(200):
        mean_need.add_request(CapacityNeed(1, 50, 80))
    assert mean_need.need.sequences == 1
    assert mean_need.need.prompt_tokens == pytest.approx(50, rel=0.1)
    assert mean_need.need.most_tokens == pytest.approx(80, rel=0.1)
