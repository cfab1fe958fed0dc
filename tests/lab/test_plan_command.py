"""Tests of `draftgate plan`."""

from __future__ import annotations

import json
import math
from itertools import chain, combinations_with_replacement, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
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
        "answer": "3 x A10G + 1 x A100-80GB for 6.70 USD per hour serve 30 requests/s.",
        "feasible": True,
        "cost_per_hour": pytest.approx(6.70),
        "counts": {"A10G": 3, "A100-80GB": 1},
        "machines": [],
        "infeasible_buckets": [],
        "simulated": None,
    }


def _flat(matrix: list[list[float]]) -> list[float]:
    return [number for row in matrix for number in row]


def _least_cost(problem: dict[str, Any]) -> float | None:
    """Return the cost of the cheapest assignment of all slices, or None if there is none."""
    shares, gpus = _flat(problem["workload_distribution"]), list(problem["gpu_info"].values())
    slices, total = problem["slice_factor"], sum(shares)
    choices = []
    for bucket, share in enumerate(shares):
        slice_rps = problem["total_request_rate"] * share / total / slices
        loads = [
            (number, slice_rps / _flat(gpu["tputs"])[bucket])
            for number, gpu in enumerate(gpus)
            if _flat(gpu["tputs"])[bucket] > 0
        ]
        choices.append(list(combinations_with_replacement(loads, slices if slice_rps else 0)))
    costs = []
    for assignment in product(*choices):
        used = [0.0] * len(gpus)
        for number, load in chain.from_iterable(assignment):
            used[number] += load
        counts = (math.ceil(load - 1e-6) for load in used)
        costs.append(sum(n * gpu["cost"] for n, gpu in zip(counts, gpus, strict=True)))
    return min(costs, default=None)


@st.composite
def _problems(draw: st.DrawFn) -> dict[str, Any]:
    rows, columns = draw(st.sampled_from(((1, 1), (1, 3), (2, 2), (2, 1))))

    def matrix(*numbers: float) -> list[list[float]]:
        return [[draw(st.sampled_from(numbers)) for _ in range(columns)] for _ in range(rows)]

    gpus = {
        name: {"cost": draw(st.sampled_from((0, 0.7, 1, 1, 3.67))), "tputs": matrix(0, 0.5, 1, 3)}
        for name in ("a", "b", "c")[: draw(st.integers(1, 3))]
    }
    shares = matrix(0, 1, 2.5)
    assume(sum(_flat(shares)) > 0)
    rate, slices = draw(st.sampled_from((0, 0.3, 4, 7.7))), draw(st.integers(1, 3))
    return {
        "gpu_info": gpus,
        "workload_distribution": shares,
        "total_request_rate": rate,
        "slice_factor": slices,
    }


@given(_problems())
@settings(max_examples=60, deadline=None)
def test_plan_of_a_file_costs_as_little_as_the_best_assignment(problem: dict[str, Any]) -> None:
    """A file with any shares, prices, GPUs and rate has the cost of the best assignment."""
    with TemporaryDirectory() as folder:
        result = _plan(Path(folder), problem)
        assert result.exit_code == 0, result.output
        plan = json.loads((Path(folder) / "plan.json").read_text())
    least = _least_cost(problem)
    assert plan["feasible"] == (least is not None)
    assert plan["cost_per_hour"] == (None if least is None else pytest.approx(least))
    costs = {name: gpu["cost"] for name, gpu in problem["gpu_info"].items()}
    assert plan["counts"].keys() == costs.keys()
    total = sum(count * costs[name] for name, count in plan["counts"].items())
    assert total == pytest.approx(least or 0.0)
    assert plan["infeasible_buckets"] == [
        [row, column]
        for row, shares in enumerate(problem["workload_distribution"])
        for column, share in enumerate(shares)
        if share * problem["total_request_rate"] > 0
        and not any(gpu["tputs"][row][column] for gpu in problem["gpu_info"].values())
    ]


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    """Fields that the format does not have do not change the plan."""
    gpus = {name: gpu | {"memory": 80} for name, gpu in EXAMPLE["gpu_info"].items()}
    _plan(tmp_path, EXAMPLE | {"gpu_info": gpus, "comment": "a note", "slice_factor": 1.0})
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["counts"] == {"A10G": 3, "A100-80GB": 1}


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
        ({"slice_factor": 1.5}, [], "whole number"),
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
