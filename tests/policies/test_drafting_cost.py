"""The host time of drafting, estimated from measured steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgate.policies.costs.drafting_cost import (
    NO_DRAFTING_COST,
    REFIT_STEPS,
    DraftingMeter,
    StepDrafting,
)

STEP_S = 1.5e-3
HOST_S, HOST_SEQUENCE_S = 60e-6, 10e-6
LOOK_UP_S, SEQUENCE_S, WEIGH_S, VERIFY_S = 40e-6, 15e-6, 100e-6, 50e-6
CALL_S, CALLED_S = 300e-6, 40e-6


def random_step(rng: np.random.Generator, sequences: int) -> StepDrafting:
    """Return a step with random numbers of lookups, matches, verifications and computed drafts."""
    looked_up = int(rng.integers(0, sequences + 1)) if rng.random() < 0.7 else 0
    computed = int(rng.integers(1, sequences + 1)) if rng.random() < 0.2 else 0
    weighed = computed or (looked_up if rng.random() < 0.5 else 0)
    verified = weighed if rng.random() < 0.7 else 0
    called = ["draft_model"] if computed else []
    return StepDrafting(sequences, looked_up, weighed, verified, called, computed, 7e-4 * computed)


def host_s(step: StepDrafting) -> float:
    """Return the true host time of a step."""
    seconds = HOST_S + HOST_SEQUENCE_S * step.sequences
    seconds += LOOK_UP_S * (step.looked_up > 0) + SEQUENCE_S * step.looked_up
    seconds += WEIGH_S * (step.weighed > 0) + VERIFY_S * (step.verified > 0)
    return seconds + CALL_S * bool(step.called) + CALLED_S * step.computed


def meter_after(steps: int, *, noise: float, stalls: float, most: int = 8) -> DraftingMeter:
    """Return a meter for a worker whose host sometimes stalls for 20 ms."""
    meter = DraftingMeter(STEP_S, ["ngram", "draft_model"])
    rng = np.random.default_rng(3)
    for _ in range(steps):
        sequences = int(rng.integers(1, most + 1))
        step, device_s = random_step(rng, sequences), STEP_S * (1 + 0.2 * sequences)
        held_up_s = 20e-3 if rng.random() < stalls else 0.0
        whole_s = device_s + step.computed_s + host_s(step) * math.exp(rng.normal(0.0, noise))
        meter.add_step(step, device_s, whole_s + held_up_s)
    return meter


@pytest.mark.parametrize(("noise", "stalls"), [(0.0, 0.0), (0.3, 0.01)])
def test_each_part_of_the_host_time_is_learned(noise: float, stalls: float) -> None:
    """The meter learns each part of the host time from random steps, with and without stalls."""
    cost = meter_after(6000, noise=noise, stalls=stalls).cost
    found_share = 0.55  # share of steps with lookups that weigh drafts
    assert cost.look_up_s == pytest.approx(LOOK_UP_S + found_share * WEIGH_S, abs=25e-6)
    assert cost.sequence_s == pytest.approx(SEQUENCE_S, abs=12e-6)
    assert cost.verify_s == pytest.approx(VERIFY_S, abs=20e-6)
    planning_s = HOST_S + 4 * HOST_SEQUENCE_S
    assert cost.planning_s(4, 0) == pytest.approx(planning_s, abs=40e-6)
    lookups_s = cost.look_up_s + 3 * cost.sequence_s
    assert cost.planning_s(4, 3) == pytest.approx(cost.planning_s(4, 0) + lookups_s)
    expected_s = CALL_S + 3 * CALLED_S
    assert cost.calling_s("draft_model", 3) == pytest.approx(expected_s, rel=0.25)
    assert cost.calling_s("ngram", 0) < 30e-6


def test_error_of_a_lone_draft_is_not_charged_to_each_sequence_of_a_batch() -> None:
    """Lone drafts that take 1 ms more than predicted make drafts for 64 sequences 5 ms dearer.

    Nothing shows whether the time grows with the sequences.
    """
    meter, error_s = DraftingMeter(STEP_S, ["sparse_self"]), 1e-3
    for number in range(20 * REFIT_STEPS):
        called = [] if number % 20 else ["sparse_self"]
        step = StepDrafting(64, called=called, computed=len(called), computed_s=3e-3 * len(called))
        meter.add_step(step, STEP_S, STEP_S + step.computed_s + error_s * len(called))
    assert meter.cost.calling_s("sparse_self", 1) == pytest.approx(error_s, rel=0.1)
    assert meter.cost.calling_s("sparse_self", 64) < 5 * error_s


def test_simulated_device_has_no_host_time() -> None:
    """Decisions depend only on the device when the host time is zero."""
    meter = DraftingMeter(STEP_S, ["ngram", "draft_model"])
    rng = np.random.default_rng(4)
    for _ in range(10 * REFIT_STEPS):
        step = random_step(rng, 4)
        meter.add_step(step, STEP_S, STEP_S + step.computed_s)
    cost = meter.cost
    parts = (cost.look_up_s, cost.sequence_s, cost.verify_s, cost.calling_s("draft_model", 4))
    assert max(parts) < 1e-9


def test_host_time_is_0_before_the_first_block() -> None:
    """Drafting costs no host time before the first block of steps."""
    assert meter_after(REFIT_STEPS - 1, noise=0.0, stalls=0.0).cost == NO_DRAFTING_COST
    assert meter_after(REFIT_STEPS, noise=0.0, stalls=0.0).cost != NO_DRAFTING_COST


def test_meter_follows_a_host_that_slows_down() -> None:
    """The meter learns lookups that take ten times as long within a few hundred steps."""
    meter = meter_after(2000, noise=0.1, stalls=0.0)
    before_s, rng = meter.cost.sequence_s, np.random.default_rng(5)
    for _ in range(600):
        step = random_step(rng, 4)
        more_s = 9 * SEQUENCE_S * step.looked_up
        meter.add_step(step, 2 * STEP_S, 2 * STEP_S + step.computed_s + host_s(step) + more_s)
    assert meter.cost.sequence_s > 4 * before_s


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=3 * REFIT_STEPS))
@settings(max_examples=30)
def test_costs_stay_finite_and_non_negative(measured) -> None:
    """Any measured durations give finite, non-negative costs."""
    meter, rng = DraftingMeter(STEP_S, ["draft_model"]), np.random.default_rng(6)
    for known_s, whole_s in measured:
        meter.add_step(random_step(rng, 3), known_s, whole_s)
    cost = meter.cost
    parts = (cost.look_up_s, cost.sequence_s, cost.verify_s, cost.calling_s("draft_model", 2))
    assert all(math.isfinite(part) and part >= 0.0 for part in parts)
