"""Tests of `draftgate bench llumnix`."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from bench.simulation import llumnix
from draftgate.backends.sim.profile import load_profile


@pytest.mark.parametrize(("mean", "square"), [(128, 168e3), (256, 640e3), (512, 1430e3)])
def test_lengths_have_the_distribution_of_the_artifact(mean: int, square: float) -> None:
    """Mean and second moment are those of the artifact's scaled ranks, cut at 6,144 tokens."""
    random = Random(0)
    lengths = [llumnix.draw_length(mean, random) for _ in range(50_000)]
    assert fmean(lengths) == pytest.approx(mean, rel=0.05)
    assert fmean(length * length for length in lengths) == pytest.approx(square, rel=0.1)
    assert max(lengths) <= llumnix.LONGEST


def test_saturated_memory_follows_from_littles_law() -> None:
    """A request of one step in the batch that fills the memory arrives once per time of a step."""
    profile = load_profile(str(llumnix.DEVICE))
    drawn = llumnix.draw_requests((128, 128), 2000, 0)
    rows = tuple(row for row in drawn.rows if row.prompt_tokens <= 128 and row.output_tokens <= 128)
    light = llumnix.Drawn(rows, 0)
    assert llumnix.saturated_rps(light, profile) > 5 * llumnix.saturated_rps(drawn, profile)


def test_ratios_are_paired_by_seed() -> None:
    """Ratios compare rows of the same seed, and their mean is geometric."""
    rows = [{"prefill_p99_s": 1.0, "loss_mean_s": 0.0}, {"prefill_p99_s": 2.0, "loss_mean_s": 1.0}]
    base = [{"prefill_p99_s": 4.0, "loss_mean_s": 1.0}, {"prefill_p99_s": 2.0, "loss_mean_s": 2.0}]
    found = llumnix.ratios(rows, base)
    assert found["prefill_p99_s"]["ratio"] == pytest.approx(0.5)
    assert found["prefill_p99_s"]["by_seed"] == pytest.approx([0.25, 1.0])
    assert found["loss_mean_s"]["by_seed"] == [0.5]


def test_results_compare_variants_with_the_first(tmp_path: Path) -> None:
    """A small run writes the metrics of each variant, and the cost of a pool that scales."""
    out = tmp_path / "llumnix.json"
    arguments = ["--instances", "2", "--requests", "40", "--seeds", "0", "--json", str(out)]
    llumnix.main(["--only", "priorities,scaling", *arguments])
    priorities, scaling = json.loads(out.read_text())["experiments"]
    assert priorities["ratios"]["llumnix"]["urgent_request_mean_s"]["ratio"] > 0.0
    (row,) = scaling["rows"]["off"]
    assert 0.0 < row["mean_instances"] <= 2.0
