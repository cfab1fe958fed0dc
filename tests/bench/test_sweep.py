"""Tests of the sweep of policies, with mock servers of known capacity."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from bench.gateway import sweep as study
from bench.gateway.sweep import TEXT, load_of, measure, planned_sweep
from draftgate.loadgen.sweep import SweepTarget, as_dict
from tests.loadgen.mock_server import Mock, serving


def flags(*more: str):
    """The flags of the study."""
    return study._parser().parse_args(["--round-s", "1.2", "--rounds", "1", *more])


@pytest.fixture
def text(tmp_path, monkeypatch) -> None:
    """A folder with the text of the questions."""
    monkeypatch.chdir(tmp_path)
    code = "".join(f"def f{i}(x):\n    if x:\n        return {i}\n\n" for i in range(3000))
    Path(TEXT).write_text(code)


def test_rates_are_shares_of_the_first_policys_capacity() -> None:
    """Every policy receives the same shares of the first policy's capacity, for the same time."""
    targets = [SweepTarget("off", "http://off"), SweepTarget("auto", "http://auto")]
    swept = planned_sweep(targets, flags("--shares", "0.05,0.1"), {"off": 412.0, "auto": 90.0})
    cells = {(cell.target.name, cell.rate_rps) for cell in swept.cells}
    assert cells == {(name, rate) for name in ("off", "auto") for rate in (21.0, 41.0)}
    assert len(swept.cells) == 4
    assert swept.load.duration_s == pytest.approx(1.2 / 4)


async def test_capacities_are_measured_before_the_sweep(text) -> None:
    """Each policy runs a closed loop without limits, and then the given rates with limits."""
    first, second = Mock(), Mock()
    async with serving(first) as off, serving(second) as auto:
        targets = [SweepTarget("off", off), SweepTarget("auto", auto)]
        args = flags("--rates", "80,40")
        swept, done, capacities = await measure(targets, args, Console(file=io.StringIO()))
    assert set(capacities) == {"off", "auto"}
    assert min(capacities.values()) > 0.0
    assert {cell.rate_rps for cell in swept.cells} == {40.0, 80.0}
    assert len(done) == len(swept.cells) == 4
    # The seed fixes the arrivals, so every cell has requests.
    assert all(report.run.records for _, report in done)
    result = as_dict(swept, done)
    assert {cell["name"] for cell in result["cells"]} == {"off", "auto"}
    assert second.headers[-1]["x-slo-tpot-ms"] == "25"
    assert "x-slo-tpot-ms" not in second.headers[0]
    assert all(body["temperature"] == 0.8 for body in second.bodies)


def test_by_default_it_sends_for_less_than_twenty_minutes() -> None:
    """Two rounds of four policies at five rates send for less than twenty minutes."""
    args = study._parser().parse_args([])
    cells = len(args.policies.split(",")) * len(args.shares)
    seconds = load_of(args, cells).duration_s * cells * args.rounds
    assert cells == 20
    assert 1000.0 < seconds < 1200.0
