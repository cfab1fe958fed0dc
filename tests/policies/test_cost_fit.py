"""Step costs that are fitted to measurements."""

from __future__ import annotations

import math
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from draftgate.policies.costs.step_cost import StepCost, StepSize
from draftgate.policies.costs.step_cost_fit import REFIT_STEPS, StepCostFit
from tests.examples import examples

BUCKETS = (1, 2, 4, *range(8, 257, 8))


def true_s(size: StepSize) -> float:
    """Return the step time of a roofline over tiles of 16 rows plus an overhead."""
    tiles = -(-size.tokens // 16) * 16
    memory_s, compute_s = 5e-3 + 40e-9 * size.kv_tokens, 2e-3 + 40e-6 * tiles
    return max(memory_s, compute_s) + 4e-6 * size.sequences + 2e-9 * size.pairs + 3e-4


def random_step(rng: np.random.Generator) -> StepSize:
    """Return a random batch with contexts, drafts and sometimes a prompt chunk."""
    sequences, drafts = int(rng.integers(1, 65)), int(rng.integers(0, 4))
    chunk = int(rng.integers(1, 128)) if rng.random() < 0.1 else 0
    kv_tokens = sequences * int(rng.integers(200, 1000))
    pairs = drafts * kv_tokens + chunk * chunk // 2
    return StepSize(sequences * (1 + drafts) + chunk, kv_tokens, sequences, pairs)


def fit_steps(
    fit: StepCostFit, steps: int, *, outliers: float = 0.0, factor: float = 1.0
) -> StepCostFit:
    """Return the fit after measurements with 5% noise, some of which are 50 times too long."""
    rng = np.random.default_rng(7)
    for _ in range(steps):
        size = random_step(rng)
        noise = math.exp(rng.normal(0.0, 0.05)) * (50.0 if rng.random() < outliers else 1.0)
        fit.add_step(size, factor * true_s(size) * noise)
    return fit


def median_error(cost: StepCost, factor: float = 1.0) -> float:
    """Return the median relative error over new steps."""
    rng = np.random.default_rng(8)
    errors = []
    for _ in range(400):
        size = random_step(rng)
        slots = size.pairs * size.sequences / max(size.kv_tokens, 1)
        predicted = cost.seconds(size.tokens, size.kv_tokens, size.sequences, round(slots))
        errors.append(abs(predicted / (factor * true_s(size)) - 1.0))
    return float(np.median(errors))


def seed(factor: float) -> StepCost:
    table = tuple(factor * (5.2e-3 + 25e-6 * tokens) for tokens in BUCKETS)
    return StepCost(BUCKETS, table, factor * 20e-9)


steps = st.tuples(
    st.builds(
        StepSize,
        st.integers(0, 10**6),
        st.integers(0, 10**9),
        st.integers(0, 10**4),
        st.integers(0, 10**12),
        st.integers(0, 10**6),
    ),
    st.one_of(st.floats(), st.floats(1e-6, 1.0), st.floats(1e-12, 1e12)),
)


@given(st.lists(steps, max_size=150), st.booleans())
@settings(max_examples=examples(60))
def test_costs_stay_finite_non_negative_and_monotone(measured, flat) -> None:
    """Any measurements leave a valid table, because `StepCost` rejects tables that fall."""
    fit = StepCostFit(StepCost((4, 16, 64), (1e-3,) * 3) if flat else seed(1.0))
    for size, step_s in measured:
        fit.add_step(size, step_s)
    fit.refit()
    cost = fit.cost
    figures = [*cost.step_s, cost.kv_token_s, cost.sequence_s, cost.pair_s, fit.relative_error]
    assert all(math.isfinite(figure) and figure >= 0.0 for figure in figures)
    assert all(later >= earlier for earlier, later in pairwise(cost.step_s))


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.3])
def test_profile_30_percent_off_is_corrected(factor: float) -> None:
    """A profile with an error of 30% is within 6% after 256 steps and within 4% after 2,000 steps.

    The steps have 5% noise, and 2% of them are 50 times too long. A table with linear terms cannot
    match the device exactly.
    """
    fit = StepCostFit(seed(factor))
    assert median_error(fit_steps(fit, 256, outliers=0.02).cost) < 0.06
    assert median_error(fit_steps(fit, 1744, outliers=0.02).cost) < 0.04


def test_step_50_times_too_long_moves_predictions_by_less_than_2_percent() -> None:
    """A single outlier in a block has almost no effect on predictions."""
    predictions = []
    for hiccup in (1.0, 50.0):
        fit = fit_steps(StepCostFit(seed(1.0)), 1024)
        fit.add_step(StepSize(8, 4000, 8, 0), hiccup * true_s(StepSize(8, 4000, 8, 0)))
        fit_steps(fit, REFIT_STEPS - 1)
        predictions.append([fit.cost.seconds(n, 500 * n, n) for n in (1, 8, 64)])
    assert predictions[1] == pytest.approx(predictions[0], rel=0.02)
    assert predictions[1] != predictions[0]


def test_fit_follows_a_device_that_slows_down() -> None:
    """Predictions are within 10% after 512 steps when step times double."""
    fit = fit_steps(StepCostFit(seed(1.0)), 2048)
    assert median_error(fit_steps(fit, 512, factor=2.0).cost, factor=2.0) < 0.10


def test_unmeasured_stairs_follow_measured_stairs() -> None:
    """Unmeasured stairs rise with the measured stairs when the whole profile was 30% too low."""
    truth, fit = seed(1.0), StepCostFit(seed(0.7))
    for _ in range(256):
        for tokens in (1, 4, 16, 32):
            fit.add_step(StepSize(tokens, 0, 0, 0), truth.seconds(tokens))
    assert fit.cost.seconds(256) == pytest.approx(truth.seconds(256), rel=0.15)


def test_prompts_do_not_lower_the_cost_of_slots() -> None:
    """Draft slots keep their cost while a worker learns from prompts and from steps without drafts.

    The device has the times of SmolLM2-135M on a core with AMX: a token takes 0.3 ms, and its
    logits over 49,152 tokens take 1 ms more. The profile is a fifth too high.
    """
    stairs = tuple(range(16, 529, 16))
    table = tuple(43e-3 + 0.3e-3 * (tokens - 16) for tokens in stairs)
    truth = StepCost(stairs, table, 4e-6, 1e-4, 7e-7, 1e-3)
    high = StepCost((16, 32, 64, 128), (52e-3, 57e-3, 69e-3, 92e-3), 4e-6, 1e-4, 7e-7, 1.2e-3)
    fit = StepCostFit(high)
    for step in range(4 * REFIT_STEPS):
        chunk, contexts = (0, 512)[step % 16 == 0], 16 * (200 + step)
        size = StepSize(16 + chunk, contexts + chunk, 16 + (chunk > 0), chunk**2 // 2, 16)
        fit.add_step(size, truth.size_s(size))
    for slots in (16, 48):
        size = StepSize(16 + slots, 6400, 16, slots * 400, 16 + slots)
        assert fit.cost.size_s(size) == pytest.approx(truth.size_s(size), rel=0.1)


def test_relative_error_falls_from_the_profiles_to_that_of_measurements() -> None:
    """The relative error falls from 30% to the noise of the measurements."""
    fit = StepCostFit(seed(0.7))
    fit_steps(fit, 64)
    assert fit.relative_error > 0.05
    fit_steps(fit, 4000)
    assert 0.02 < fit.relative_error < 0.08


def test_invalid_durations_are_ignored() -> None:
    """Empty steps and durations of NaN, infinity or zero leave the cost unchanged."""
    fit = StepCostFit(seed(1.0))
    for step_s in (math.nan, math.inf, 0.0, -1.0):
        fit.add_step(StepSize(4, 0, 1, 0), step_s)
    fit.add_step(StepSize(0, 0, 0, 0), 1.0)
    fit.refit()
    assert fit.cost == seed(1.0)
