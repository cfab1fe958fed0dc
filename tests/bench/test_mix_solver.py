"""`draftgate bench mix-solver`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.simulation.mix_solver import BUCKETS, COSTS, KINDS, RATES_RPS, main, problem


@pytest.mark.parametrize("kind", KINDS)
def test_problems_are_feasible_and_reproducible(kind: str) -> None:
    """A problem has all buckets and GPUs, and at least one GPU serves each bucket."""
    workload, types = problem(kind, 8.0, 1)
    assert (workload, types) == problem(kind, 8.0, 1)
    assert len(workload.rates_rps) == BUCKETS
    assert len(types) == len(COSTS)
    assert all(map(any, zip(*(one.throughput_rps for one in types.values()), strict=True)))


@pytest.mark.long
def test_times_are_recorded(tmp_path: Path) -> None:
    """Every problem has its CPU time and its plan."""
    pytest.importorskip("scipy")
    out = tmp_path / "solver.json"
    main(["--problems", "1", "--json", str(out)])
    rows = json.loads(out.read_text())["problems"]
    assert len(rows) == len(KINDS) * len(RATES_RPS)
    assert all(row["cpu_s"] >= 0.0 and any(row["counts"].values()) for row in rows)
