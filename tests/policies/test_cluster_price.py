"""What a worker's price will be once what is leased behind its report has arrived."""

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
    """What a worker says whose sequences are that long, as it comes to its price and speed."""
    kv_tokens = running * context_tokens
    step = StepView(running, kv_tokens, running, 64, ())
    speed = SpeedMeter(cost, 2048).speed(cost, running, kv_tokens)
    return load(running, slot_price(step, cost), speed)


@st.composite
def loads(draw) -> WorkerLoad:
    """Reports of every kind, those of workers that tell nothing among them."""
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
def test_nothing_behind_changes_nothing(given: WorkerLoad, usual: CapacityNeed) -> None:
    """With all that is leased included, the load is what was reported."""
    assert project_load(given, 0, usual) == given


@given(loads(), needs, st.lists(st.integers(0, 1 << 20), min_size=2))
def test_more_behind_is_never_less_load(
    given: WorkerLoad, usual: CapacityNeed, behind: list[int]
) -> None:
    """Price, sequences and prompts ahead never fall with the tokens behind, nor below the report,
    and memory never rises nor falls below nothing."""
    found = [project_load(given, tokens, usual) for tokens in sorted([0, *behind])]
    for less, more in pairwise(found):
        assert given.price <= more.price
        assert less.price <= more.price * (1.0 + 1e-12) + 1e-12  # but for what rounding takes
        assert less.running <= more.running
        assert less.running + less.waiting <= more.running + more.waiting
        assert less.prompt_tokens <= more.prompt_tokens
        assert less.kv_blocks_free >= more.kv_blocks_free >= 0


@given(loads(), needs, st.integers(1, 1 << 20))
def test_who_comes_takes_seats_first(given: WorkerLoad, usual: CapacityNeed, behind: int) -> None:
    """Nobody runs beyond the seats who did not run there before, nobody who waited waits less, and
    those who wait for a seat do not raise the price."""
    found = project_load(given, behind, usual)
    if given.max_sequences:
        assert found.running <= max(given.running, given.max_sequences - given.waiting)
        full = structs.replace(given, max_sequences=given.running + given.waiting)
        if full.max_sequences:
            assert project_load(full, behind, usual).price == given.price
    assert found.waiting >= given.waiting


@given(costs(), st.integers(0, 64), st.integers(0, 2000), st.integers(1, 200_000))
def test_a_price_is_a_number_on_any_staircase(
    cost: StepCost, running: int, context_tokens: int, behind: int
) -> None:
    """On any staircase, and on none, the projected price is a number not below the reported one."""
    given = reported(cost, running, context_tokens)
    assert given.price <= project_load(given, behind, ONE).price < float("inf")


@pytest.mark.parametrize("context_tokens", [200, 1500, 8000])
@pytest.mark.parametrize("device", ["h100-8b", "h200-8b"])
def test_it_is_the_price_that_the_worker_comes_to(device: str, context_tokens: int) -> None:
    """From 8 to 256 sequences that fill a stair, 4% below to 15% above the price of the batch that
    is there when all have come."""
    cost = load_profile(device).cost
    full = [n for n in cost.token_buckets if 8 <= n <= 256]
    for before in full:
        given = reported(cost, before, context_tokens)
        for after in full[full.index(before) + 1 :]:
            found = project_load(given, (after - before) * ONE.most_tokens, ONE)
            come_to = reported(cost, after, context_tokens)
            assert 0.96 < found.price / come_to.price < 1.15
            assert found.running == come_to.running


def test_a_burst_onto_an_idle_worker_has_a_price() -> None:
    """An idle worker reports 0; who is on the way makes slots as dear as short contexts do."""
    cost = load_profile("h100-8b").cost
    found = project_load(reported(cost, 0, 0), 128 * 500, ONE)
    assert found.price == pytest.approx(reported(cost, 128, 200).price, rel=0.1)
    assert found.prompt_tokens == 128 * 300
    assert found.kv_blocks_free == 8000 - 128 * 300 // 16


def test_what_is_usual_follows_what_is_placed() -> None:
    """The mean of all at first, in which the last fifty decide later; one token before any."""
    usual = MeanNeed()
    assert usual.need == CapacityNeed(1, 0, 1)
    usual.add(CapacityNeed(1, 100, 200))
    usual.add(CapacityNeed(3, 300, 600))
    assert usual.need == CapacityNeed(2, 201, 402)
    for _ in range(200):
        usual.add(CapacityNeed(1, 50, 80))
    assert usual.need.sequences == 1
    assert usual.need.prompt_tokens == pytest.approx(50, rel=0.1)
    assert usual.need.most_tokens == pytest.approx(80, rel=0.1)
