"""Tests of the sweep of policies, with mock servers of known capacity."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from bench.gateway import sweep as study
from bench.gateway.sweep import TEXT, load_of, measure
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


async def test_rates_are_shares_of_the_first_policys_capacity(text) -> None:
    """A closed loop measures capacities before the sweep.

    Every policy then receives each share of the first policy's capacity, with the same limits and
    durations.
    """
    first, second = Mock(), Mock()
    async with serving(first) as off, serving(second) as auto:
        targets = [SweepTarget("off", off), SweepTarget("auto", auto)]
        args = flags("--shares", "0.05,0.1")
        swept, done, capacities = await measure(targets, args, Console(file=io.StringIO()))
    assert set(capacities) == {"off", "auto"}
    capacity = capacities["off"]
    rates = sorted({cell.rate_rps for cell in swept.cells})
    assert rates == pytest.approx([0.05 * capacity, 0.1 * capacity], rel=0.06)
    assert len(done) == len(swept.cells) == 4
    assert swept.load.duration_s == pytest.approx(1.2 / 4)
    result = as_dict(swept, done)
    assert {cell["name"] for cell in result["cells"]} == {"off", "auto"}
    assert second.headers[-1]["x-slo-tpot-ms"] == "25"
    assert "x-slo-tpot-ms" not in second.headers[0]
    assert all(body["temperature"] == 0.8 for body in second.bodies)


async def test_given_rates_are_used(text) -> None:
    """The sweep uses given rates instead of the measured capacity."""
    mock = Mock()
    async with serving(mock) as url:
        args = flags("--rates", "20,10")
        swept, _, _ = await measure([SweepTarget("off", url)], args, Console(file=io.StringIO()))
    assert {cell.rate_rps for cell in swept.cells} == {10.0, 20.0}


def test_by_default_it_sends_for_less_than_twenty_minutes() -> None:
    """Two rounds of four policies at five rates send for less than twenty minutes."""
    args = study._parser().parse_args([])
    cells = len(args.policies.split(",")) * len(args.shares)
    seconds = load_of(args, cells).duration_s * cells * args.rounds
    assert cells == 20
    assert 1000.0 < seconds < 1200.0
