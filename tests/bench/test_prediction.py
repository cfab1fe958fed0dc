"""Tests of `draftgate bench simulator`: its comparison, and a short run."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from bench.simulation.prediction import compared
from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.types import PlannedRequest, Record, RequestSpec, TextChunk

ROOT = Path(__file__).parents[2]


def record(index: int, ttft_s: float, tpot_s: float) -> Record:
    planned = PlannedRequest(index, float(index), RequestSpec("", (), 11, 0))
    first_s = index + ttft_s
    chunks = [TextChunk(first_s + n * tpot_s, 1, 0) for n in range(11)]
    usage = {"completion_tokens": 11}
    return Record(planned, index, index, chunks[-1].at_s, Verdict.OK, chunks=chunks, usage=usage)


def test_errors_are_relative_to_the_engine() -> None:
    """The error is the mean prediction over the measurement minus 1, and `apart` is the range."""
    real = [record(n, 0.1, 0.01) for n in range(9)]
    predicted = [[record(n, ttft_s, 0.02) for n in range(9)] for ttft_s in (0.11, 0.13)]
    rows = {row["figure"]: row for row in compared(real, predicted)}
    figures = {"ttft_s.mean", "chunk_gap_s.mean", "chunk_gap_s.p90", "tokens_per_chunk.mean"}
    assert set(rows) == figures
    assert rows["ttft_s.mean"]["error"] == pytest.approx(0.2, abs=1e-4)
    assert rows["ttft_s.mean"]["apart"] == pytest.approx(0.13 / 0.11 - 1, abs=1e-4)
    assert rows["chunk_gap_s.p90"]["error"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.long
def test_the_benchmark_runs_on_this_machine(tmp_path) -> None:
    """The engine and the simulator serve the same bursts, and each metric is compared."""
    out = tmp_path / "out.json"
    flags = ["--batches", "1,2", "--rounds", "1", "--max-tokens", "16", "--json", str(out)]
    command = [sys.executable, "-m", "bench.simulation.prediction", *flags]
    subprocess.run(command, cwd=ROOT, check=True)
    report = json.loads(out.read_text())
    assert len(report["profiles"]) == 2
    cells = {(row["proposer"], row["batch"]) for row in report["results"]}
    assert cells == set(product(("off", "ngram", "draft_model"), (1, 2)))
    assert all(row["engine"] > 0 and row["simulator"] > 0 for row in report["results"])
