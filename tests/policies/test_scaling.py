"""The scaling advice: what raises and lowers it, and that it does not flap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.scaling import (
    CAPACITY_TARGET,
    DOWN_S,
    GOAL,
    IDLE_SHARE,
    MEAN_S,
    MOVES_DOWN_S,
    PRICE_TARGET,
    WITH_MOVES,
    DemandView,
    ScalingAdvice,
    ScalingAdvisor,
    ScalingReason,
    signals,
)
from draftgate.policies.types import WorkerLoad


def load(price: float = 0.0, used: int = 0, prompts: int = 0, running: int = 0) -> WorkerLoad:
    """Return the load of a worker with 100 blocks and 10 sequences."""
    return WorkerLoad(
        *(running, 0, 100 - used, 100, price, 0.5, ()), max_sequences=10, prompt_tokens=prompts
    )


def idle(workers: int) -> DemandView:
    return DemandView([load()] * workers)


def priced(workers: int, demand: float) -> DemandView:
    """Return a pool whose price demands a number of workers, divided among those it has."""
    return DemandView([load(demand * PRICE_TARGET / workers)] * workers)


def advise(views: Iterable[DemandView], advisor: ScalingAdvisor | None = None) -> ScalingAdvice:
    """Return the advice after one view per second."""
    advisor, advice = advisor or ScalingAdvisor(), None
    for second, view in enumerate(views):
        advice = advisor.update(view, float(second))
    assert advice is not None
    return advice


def follow(demand: Callable[[int], float], seconds: int, delay: int, workers: int) -> list[int]:
    """Return the advice of each second in a pool that follows it after a delay.

    Args:
        demand: returns the workers that the load of a second demands.
    """
    advisor, advised = ScalingAdvisor(), list[int]()
    for second in range(seconds):
        if second > delay:
            workers = advised[second - delay]
        advice = advisor.update(priced(workers, demand(second)), float(second))
        assert advice is not None
        advised.append(advice.workers)
    return advised


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (DemandView([load(price=0.5)] * 2), ScalingReason.PRICE),
        (DemandView([load(prompts=500)] * 2), ScalingReason.PROMPTS),
        (DemandView([load(used=95)] * 2), ScalingReason.MEMORY),
        (DemandView([load(running=10)] * 2), ScalingReason.SEQUENCES),
        (DemandView([load()] * 2, queued=1), ScalingReason.QUEUE),
        (DemandView([load(price=0.28)] * 2, attainment=0.8), ScalingReason.SLO),
    ],
    ids=lambda value: value.value if isinstance(value, ScalingReason) else "",
)
def test_each_signal_of_a_busy_pool_adds_workers(view: DemandView, reason: ScalingReason) -> None:
    """Each signal that stays above its target raises the advice, and is its reason."""
    advice = advise([view] * 60)
    assert advice.workers > 2
    assert advice.reason is reason


def test_an_idle_pool_keeps_one_worker() -> None:
    """A pool without load gives up all workers but one, after `DOWN_S`."""
    assert advise([idle(5)] * int(DOWN_S)).workers == 5
    advice = advise([idle(5)] * int(DOWN_S + MEAN_S))
    assert (advice.workers, advice.reason) == (1, ScalingReason.IDLE)


def test_pool_whose_streams_move_gives_up_workers_sooner() -> None:
    """With moves, fewer workers suffice for the same memory, and the advice falls sooner."""
    used = DemandView([load(used=45)] * 4)
    assert advise([used] * int(DOWN_S + MEAN_S), ScalingAdvisor()).workers == 4
    moving = advise([used] * int(MOVES_DOWN_S + MEAN_S), ScalingAdvisor(WITH_MOVES))
    assert (moving.workers, moving.reason) == (3, ScalingReason.IDLE)
    full = DemandView([load(used=85)] * 4)
    assert advise([full] * 60, ScalingAdvisor(WITH_MOVES)).workers == 4
    assert advise([full] * 60, ScalingAdvisor()).workers == 5


def test_a_short_burst_adds_no_workers() -> None:
    """A queue that is empty again after a few seconds does not raise the advice."""
    burst = DemandView([load()] * 4, queued=500, queue_s=60.0)
    views = [idle(4)] * 60 + [burst] * 3 + [idle(4)] * 60
    assert advise(views).workers == 4


def test_a_long_queue_doubles_the_workers_at_most() -> None:
    """Queued work of any length demands at most twice the present workers."""
    found = advise([DemandView([load()] * 4, queued=9000, queue_s=1e6)] * 120)
    assert found.workers == 8


def test_missed_targets_of_an_idle_pool_add_no_workers() -> None:
    """A pool whose requests miss targets at a low load gets no workers, which would not help."""
    view = DemandView([load(price=0.1)] * 4, attainment=0.0)
    assert advise([view] * 120).workers == 4


def test_streams_of_leaving_workers_count() -> None:
    """The load of a worker that is leaving counts, because the others get its streams."""
    busy = load(used=80)
    demand = signals(DemandView([busy], leaving=[busy, busy]))
    assert demand[ScalingReason.MEMORY] == pytest.approx(3 * 0.8 / CAPACITY_TARGET)


def test_prompts_in_the_queue_of_a_worker_need_memory() -> None:
    """Prompts that wait on a full worker demand more than one worker."""
    demand = signals(DemandView([load(used=100, prompts=200 * 16)]))
    assert demand[ScalingReason.MEMORY] == pytest.approx(3 / CAPACITY_TARGET)


def test_lost_workers_keep_the_advice() -> None:
    """The advice stays as it is while no worker is left, and there is none before the first."""
    assert ScalingAdvisor().update(DemandView([]), 0.0) is None
    assert advise([idle(3)] * 10 + [DemandView([], queued=50)] * 1000).workers == 3


@given(st.integers(0, 500), st.integers(1, 20))
def test_a_constant_load_changes_the_advice_once(tenths: int, workers: int) -> None:
    """Under a constant load, the advice changes at most once, to a number within its limits, and
    the pool stays there."""
    demand = tenths / 10 + 0.05  # no limit is a rounding error away
    advised = follow(lambda _: demand, 2 * int(DOWN_S), 20, workers)
    changes = [(old, new) for old, new in pairwise(advised) if old != new]
    assert len(changes) <= 1
    last = advised[-1]
    assert math.ceil(demand) <= last <= math.ceil(demand / IDLE_SHARE)


@given(st.lists(st.floats(IDLE_SHARE + 0.01, 0.99), min_size=1, max_size=60), st.integers(2, 20))
def test_noise_within_the_limits_changes_nothing(shares: list[float], workers: int) -> None:
    """A load that varies between the two limits never changes the advice."""
    loads = [workers * share for share in shares]
    advised = follow(lambda second: loads[second % len(loads)], 700, 20, workers)
    assert set(advised) == {workers}


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(0, 30)), min_size=1, max_size=12))
def test_the_advice_falls_only_long_after_it_rose(phases: list[tuple[int, float]]) -> None:
    """The advice is at least 1, and after it rose to a number, it stays there or above for
    `DOWN_S`, whatever the load does."""
    loads = [demand for seconds, demand in phases for _ in range(seconds)]
    advised = follow(loads.__getitem__, len(loads), 20, 3)
    assert min(advised) >= 1
    for second, (old, new) in enumerate(pairwise(advised), 1):
        if new > old:
            assert min(advised[second : second + int(DOWN_S)]) >= new


@given(st.floats(0, 1), st.floats(0, 40), st.integers(0, 50), st.integers(1, 8))
def test_missed_targets_never_lower_the_advice(
    attainment: float, demand: float, queued: int, workers: int
) -> None:
    """A pool that misses its targets never gets fewer workers than one that meets them."""
    view = priced(workers, demand)
    views = [DemandView(view.loads, (), queued, 0.1 * queued, one) for one in (attainment, GOAL)]
    missed, met = (advise([one] * 400) for one in views)
    assert missed.workers >= met.workers
