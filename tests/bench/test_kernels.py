"""Tests of `draftgate bench kernels`: limits, goals, and the exit without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench.engine import kernels as bench
from bench.engine.kernel_cases import KernelCase


def _case(name: str, bytes_moved: int, operations: int = 0) -> KernelCase:
    return KernelCase(name, list, list, bytes_moved, operations)


_CEILINGS = bench.Ceilings(bytes_per_us=4e6, operations_per_us=8e8)


def test_the_slower_of_bytes_and_products_is_the_floor() -> None:
    """The floor of a compute-bound case is the matrix rate, and otherwise the bandwidth."""
    assert _CEILINGS.floor_us(_case("reads", 80_000_000)) == pytest.approx(20.0)
    assert _CEILINGS.floor_us(_case("multiplies", 80_000_000, 32_000_000_000)) == pytest.approx(40)


def test_ceilings_come_from_the_copy_and_the_product() -> None:
    """A copy counts its bytes twice, and a matrix product counts each multiplication twice."""
    ceilings = bench.Ceilings.of(copy_us=500.0, product_us=1400.0)
    assert ceilings.bytes_per_us == pytest.approx(2 * bench.COPIED_BYTES / 500)
    assert ceilings.operations_per_us == pytest.approx(2 * bench.MATRIX**3 / 1400)


def test_rows_have_medians_quartiles_and_shares() -> None:
    """A row has the median of its rounds, the quartiles, and the share of the limit."""
    case = _case("reads", 80_000_000)
    (row,) = bench.summary(
        [case], {"reads": [30.0, 25.0, 24.0, 26.0, 90.0]}, {"reads": 400.0}, _CEILINGS
    )
    assert row["us"] == 26.0
    assert row["quartiles_us"] == [25.0, 30.0]
    assert row["share_of_floor"] == pytest.approx(20 / 26, abs=1e-3)
    assert row["reference_us"] == 400.0


@pytest.mark.parametrize(
    ("goal", "figure", "met"),
    [
        (bench.Goal("a", bench.Limit.SHARE, 0.8), 0.75, False),
        (bench.Goal("a", bench.Limit.SHARE, 0.7), 0.75, True),
        (bench.Goal("a", bench.Limit.MICROSECONDS, 80), 40.0, True),
        (bench.Goal("a", bench.Limit.MICROSECONDS, 30), 40.0, False),
        (bench.Goal("b", bench.Limit.RATIO, 1.15, "a"), 1.25, False),
        (bench.Goal("b", bench.Limit.RATIO, 1.3, "a"), 1.25, True),
    ],
)
def test_goals_bound_shares_below_and_times_above(
    goal: bench.Goal, figure: float, met: bool
) -> None:
    """A goal is the least share, or the largest time or ratio."""
    rows = {"a": {"us": 40.0, "share_of_floor": 0.75}, "b": {"us": 50.0, "share_of_floor": 0.1}}
    judged = goal.judge(rows)
    assert (judged["figure"], judged["met"]) == (figure, met)


def test_every_goal_names_a_case() -> None:
    """Every goal names a measured case."""
    source = Path(bench.__file__).with_name("kernel_cases.py").read_text(encoding="utf-8")
    for goal in bench.GOALS:
        assert f'"{goal.case}"' in source
        assert not goal.of or f'"{goal.of}"' in source


def test_without_a_gpu_the_command_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints one line, exits with status 2 and writes no file."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--json", str(tmp_path / "out.json")])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_busy_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark rejects a busy machine unless `--allow-busy` is given."""
    monkeypatch.setattr(
        bench, "provenance", lambda _device: {"disturbed": True, "busy_share_before": 0.4}
    )
    with pytest.raises(SystemExit, match="other processes use 40% of this machine"):
        bench.measure(allow_busy=False)
