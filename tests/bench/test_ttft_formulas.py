"""Simulated workers, compared with the formulas of DistServe for the time to first token."""

from __future__ import annotations

import pytest

from bench.simulation.placement import PROFILES, profile_file
from bench.simulation.ttft_formulas import PrefillWorkers, compare, prefill_workers

WORKERS = prefill_workers(*map(profile_file, PROFILES[:2]))
by_workers = pytest.mark.parametrize("workers", WORKERS, ids=lambda one: one.name)


@by_workers
def test_simulated_prompts_wait_as_in_a_queue(workers: PrefillWorkers) -> None:
    """Every TTFT is that of Lindley's recursion, the queue whose mean the formula gives."""
    stage_s = workers.idle_ttft_s() / workers.stages
    rate_rps, free_s = 0.7 / stage_s, 0.0
    for arrived_s, ttft_s in workers.ttft_s(rate_rps, 150, seed=0):
        free_s = max(free_s, arrived_s) + stage_s  # when the first stage is free again
        later_s = (workers.stages - 1) * stage_s  # later stages have no line
        assert arrived_s + ttft_s == pytest.approx(free_s + later_s, abs=1e-6)


def test_two_stages_take_as_long_as_one_device() -> None:
    """A prompt without a wait takes the same time on one device and in two stages of half."""
    one, two, tensor = (workers.idle_ttft_s() for workers in WORKERS)
    assert two == pytest.approx(one)
    assert tensor < one


@pytest.mark.long
@by_workers
def test_formula_is_within_two_percent_of_the_simulator(workers: PrefillWorkers) -> None:
    """The mean TTFT of 10,000 simulated prompts is that of the formula, within 2%."""
    prompt_s = WORKERS[0].idle_ttft_s()
    errors = [row["error"] for row in compare(workers, prompt_s, 10_000, seed=0)]
    assert errors == pytest.approx([0.0] * len(errors), abs=0.02)
