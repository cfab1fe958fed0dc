"""The measured speed of a worker."""

from __future__ import annotations

import pytest

from draftgate.policies.costs.speed import LAST_STEPS, SpeedMeter
from draftgate.policies.costs.step_cost import StepCost

COST = StepCost((1, 8, 64), (1e-3, 2e-3, 5e-3), sequence_s=1e-5)
BUDGET = 64


def run(meter: SpeedMeter, steps: int, step_s: float, *did: int, start_s: float = 0.0) -> float:
    """Run equal steps and return the end time of the last step, in seconds."""
    now_s = start_s
    for _ in range(steps):
        meter.begin_step(now_s)
        meter.record_step(*did)
        now_s += step_s
    meter.begin_step(now_s)
    return now_s


def test_worker_without_steps_reports_predicted_speeds() -> None:
    """A worker without steps reports the predicted speeds of a lone decode and a full
    prompt step."""
    speed = SpeedMeter(COST, BUDGET).speed(COST, 0, 0)
    assert speed.tpot_s == pytest.approx(COST.seconds(1, 1, 1))
    assert speed.prompt_token_s == pytest.approx(COST.seconds(BUDGET, BUDGET, 1) / BUDGET)
    assert speed.sequence_s == pytest.approx(COST.seconds(2, 0, 2) - COST.seconds(1, 0, 1))


def test_speeds_are_those_of_the_last_steps() -> None:
    """The meter forgets the forecast and slower steps after a few windows."""
    meter = SpeedMeter(COST, BUDGET)
    now_s = run(meter, 100, 0.5, 4, 4, 32)
    run(meter, 10 * LAST_STEPS, 0.02, 4, 8, 50, start_s=now_s)
    speed = meter.speed(COST, 4, 100)
    assert speed.tpot_s == pytest.approx(0.02 / 2, rel=1e-3)
    assert speed.prompt_token_s == pytest.approx(0.02 / 50, rel=1e-3)


def test_rate_is_total_seconds_over_total_tokens() -> None:
    """The meter reports 110 ms per 101 tokens for alternating steps of 1 and 100 tokens."""
    meter = SpeedMeter(COST, BUDGET)
    now_s = 0.0
    for turn in range(20 * LAST_STEPS):
        meter.begin_step(now_s)
        meter.record_step(0, 0, 100 if turn % 2 else 1)
        now_s += 0.1 if turn % 2 else 0.01
    meter.begin_step(now_s)
    assert meter.speed(COST, 0, 0).prompt_token_s == pytest.approx(0.11 / 101, rel=0.05)


def test_idle_time_does_not_count() -> None:
    """An idle hour does not change the speed of a worker."""
    meter = SpeedMeter(COST, BUDGET)
    now_s = run(meter, 10 * LAST_STEPS, 0.02, 2, 2, 0)
    meter.record_idle()
    before = meter.speed(COST, 2, 10)
    run(meter, 3, 0.02, 2, 2, 0, start_s=now_s + 3600.0)
    assert meter.speed(COST, 2, 10).tpot_s == pytest.approx(before.tpot_s)


def test_cost_of_another_sequence_is_spread_over_the_tokens_of_a_step() -> None:
    """A longer step delays each of two tokens per step by half."""
    plain, drafted = SpeedMeter(COST, BUDGET), SpeedMeter(COST, BUDGET)
    run(plain, 10 * LAST_STEPS, 0.02, 4, 4, 0)
    run(drafted, 10 * LAST_STEPS, 0.02, 4, 8, 0)
    more_s = plain.speed(COST, 4, 40).sequence_s
    assert more_s == pytest.approx((COST.seconds(8, 80, 8) - COST.seconds(4, 40, 4)) / 4)
    assert drafted.speed(COST, 4, 40).sequence_s == pytest.approx(more_s / 2, rel=1e-4)


def test_begin_returns_the_time_since_the_last_step() -> None:
    """The result is None after idle time and after an unrecorded step."""
    meter = SpeedMeter(COST, BUDGET)
    assert meter.begin_step(1.0) is None
    assert meter.begin_step(2.0) is None
    meter.record_step(1, 1, 0)
    assert meter.begin_step(2.5) == pytest.approx(0.5)
    meter.record_step(1, 1, 0)
    assert meter.begin_step(3.0) == pytest.approx(0.5)
    meter.record_idle()
    assert meter.begin_step(9.0) is None
