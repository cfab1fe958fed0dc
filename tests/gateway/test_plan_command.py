"""Tests of `draftgate plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from draftgate.gateway.cli import app

pytest.importorskip("scipy")

EXAMPLE: dict[str, Any] = {
    "gpu_info": {
        "A10G": {"cost": 1.01, "tputs": [[2, 1], [5, 2]]},
        "A100-80GB": {"cost": 3.67, "tputs": [[20, 20], [40, 20]]},
    },
    "workload_distribution": [[2, 1], [5, 2]],
    "total_request_rate": 30.0,
    "slice_factor": 1,
}


def _plan(folder: Path, problem: object, *flags: str) -> Result:
    given = folder / "tputs.json"
    given.write_text(json.dumps(problem))
    arguments = ["plan", "mix", "--tputs", str(given), "--json", str(folder / "plan.json"), *flags]
    return CliRunner().invoke(app, arguments)


def test_plan_is_printed_and_written(tmp_path: Path) -> None:
    """The shares of the buckets are normalised, and the file has the format of a plan."""
    result = _plan(tmp_path, EXAMPLE)
    assert result.exit_code == 0, result.output
    assert "6.70" in result.output
    assert json.loads((tmp_path / "plan.json").read_text()) == {
        "format": "plan/1",
        "question": "mix",
        "feasible": True,
        "cost_per_hour": pytest.approx(6.70),
        "counts": {"A10G": 3, "A100-80GB": 1},
        "infeasible_buckets": [],
    }


def test_limit_excludes_a_gpu(tmp_path: Path) -> None:
    """Without A100, the requests need more of the slower GPU."""
    _plan(tmp_path, EXAMPLE, "--limit", "A100-80GB=0")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["counts"] == {"A10G": 12, "A100-80GB": 0}


def test_infeasible_bucket_is_named(tmp_path: Path) -> None:
    """A bucket that no GPU serves is named by its row and column."""
    gpus = {"A10G": {"cost": 1.01, "tputs": [[2, 1], [0, 2]]}}
    result = _plan(tmp_path, EXAMPLE | {"gpu_info": gpus})
    assert result.exit_code == 0
    assert "[1, 0]" in result.output
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["feasible"], plan["cost_per_hour"]) == (False, None)
    assert plan["infeasible_buckets"] == [[1, 0]]


@pytest.mark.parametrize(
    ("change", "flags", "words"),
    [
        ({"workload_distribution": [[0, 0], [0, 0]]}, [], "positive sum"),
        ({"workload_distribution": [[1, 1]]}, [], "differ in shape"),
        ({"slice_factor": 0}, [], "at least one slice"),
        ({"gpu_info": 3}, [], "gpu_info"),
        ({}, ["--limit", "H100=1"], "no such GPU"),
        ({}, ["--limit", "A10G"], "NAME=NUMBER"),
    ],
)
def test_wrong_file_is_explained_in_one_line(
    tmp_path: Path, change: dict[str, Any], flags: list[str], words: str
) -> None:
    """A wrong file or flag ends the command with status 2 and one line."""
    result = _plan(tmp_path, EXAMPLE | change, *flags)
    assert result.exit_code == 2, result.output
    assert words in result.output
    assert result.output.count("\n") == 1
