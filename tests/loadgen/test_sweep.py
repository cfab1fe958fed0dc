"""Tests of sweeps over rates and servers, and of their goodput."""

from __future__ import annotations

import io
import json
from collections import Counter

import pytest
from rich.console import Console
from typer.testing import CliRunner

from draftgate.loadgen import cli, sweep
from draftgate.loadgen.measuring.confidence import wilson
from draftgate.loadgen.planning.plan import Load
from draftgate.loadgen.report.goodput import (
    attainment_bounds,
    estimate_goodput,
    estimate_goodputs,
    fit_falling,
)
from draftgate.loadgen.report.runs import RunReport, points
from draftgate.loadgen.sending.target import Target
from draftgate.loadgen.sweep import Sweep, parse_rates, parse_targets, run_sweep, shuffled_cells
from draftgate.loadgen.types import Slo
from tests.loadgen.known_records import a_run, accept_any_health, record
from tests.loadgen.mock_server import Mock, serving_in_a_thread
from tests.loadgen.queue_runs import queue_run
from tests.loadgen.test_report import OVERLOADED

SLO = Slo(ttft_s=0.6)


def run_report(met: int, of: int, rate: float = 1.0, name: str = "auto"):
    """Return a run in which the first `met` of `of` requests met their SLO."""
    records = [record(i, float(i), 0.5 if i < met else 0.7, slo=SLO) for i in range(of)]
    run = a_run(records)
    run.settings["rate_rps"] = rate
    return RunReport(name, run)


def points_at(*shares: tuple[float, int, int]):
    """Return points at rates, each with a number of met requests."""
    return points([run_report(met, of, rate) for rate, met, of in shares])


def test_each_round_has_every_cell_in_its_own_order() -> None:
    """Each round runs all targets at all rates in its own order, which is reproducible."""
    targets = parse_targets(["a=http://x:1", "b=http://x:2"])
    cells = shuffled_cells(targets, [1.0, 2.0, 3.0], 3, seed=5)
    for number in (1, 2, 3):
        own = [(c.target.name, c.rate_rps) for c in cells if c.round == number]
        assert sorted(own) == sorted((n, r) for n in "ab" for r in (1.0, 2.0, 3.0))
    orders = [tuple(c.stem[:-2] for c in cells if c.round == number) for number in (1, 2, 3)]
    assert len(set(orders)) == 3
    assert cells == shuffled_cells(targets, [1.0, 2.0, 3.0], 3, seed=5)


def test_targets_get_the_same_requests_once() -> None:
    """Targets share a seed at one rate in one round, and all other cells have other seeds."""
    targets = parse_targets(["http://x"], ["off", "ngram:4"])
    cells = shuffled_cells(targets, [1.0, 2.0], 2, seed=0)
    loads = [(c, c.load(Load(rate_rps=9.0, seed=7))) for c in cells]
    seeds = {(cell.round, cell.rate_rps, load.seed) for cell, load in loads}
    assert len(seeds) == len({seed for _, _, seed in seeds}) == 4
    assert Counter(load.speculation for _, load in loads) == {"off": 4, "ngram:4": 4}
    assert all(load.rate_rps == cell.rate_rps for cell, load in loads)
    assert cells[0].load(Load(rate_rps=9.0, seed=8)).seed not in {seed for _, _, seed in seeds}


def test_targets_have_unique_names() -> None:
    """Names follow from the flags or the modes, and the parser rejects duplicates."""
    assert [c.name for c in parse_targets(["http://x/a=b"])] == ["server"]
    assert [c.name for c in parse_targets(["http://x"], ["off", "auto"])] == ["off", "auto"]
    both = parse_targets(["a=http://x", "b=http://y/"], ["off", "auto"])
    assert [c.name for c in both] == ["a-off", "a-auto", "b-off", "b-auto"]
    assert both[2].url == "http://y"
    with pytest.raises(ValueError, match="same name"):
        parse_targets(["a=http://x", "a=http://y"])


@pytest.mark.parametrize("text", ["", "0,1", "1,x", "-1", "inf", "nan"])
def test_rates_are_positive_numbers(text: str) -> None:
    """The parser sorts rates, drops repetitions and rejects other values."""
    assert parse_rates("2,1,2") == [1.0, 2.0]
    with pytest.raises(ValueError, match="positive"):
        parse_rates(text)


def test_rising_shares_are_pooled() -> None:
    """The fit pools rising neighbours by weight and leaves falling values unchanged."""
    assert fit_falling([1.0, 0.8, 0.9, 0.2], [10, 10, 30, 10]) == pytest.approx(
        [1.0, 0.875, 0.875, 0.2]
    )
    assert fit_falling([0.9, 0.5, 0.1], [1, 1, 1]) == [0.9, 0.5, 0.1]
    assert fit_falling([0.0, 1.0], [0, 0]) == [1.0, 1.0]


def test_goodput_is_interpolated() -> None:
    """The goodput at 95 % is halfway between 100 % at 1/s and 90 % at 2/s."""
    cells = points_at((1.0, 100, 100), (2.0, 90, 100), (3.0, 10, 100))
    found = estimate_goodput("auto", cells, 0.95)
    assert (found.rate_rps, found.holds_rps) == (pytest.approx(1.5), 1.0)
    assert found.low_rps == 1.0
    assert found.high_rps == 3.0


def test_a_slow_rate_with_few_requests_does_not_bound_a_faster_one() -> None:
    """200 of 200 requests at 2/s are certain although 20 of 20 at 1/s are not."""
    cells = points_at((1.0, 20, 20), (2.0, 200, 200), (3.0, 0, 50))
    found = estimate_goodput("auto", cells, 0.95)
    assert (found.low_rps, found.high_rps) == (2.0, 3.0)
    odd = estimate_goodput("auto", points_at((1.0, 0, 200), (2.0, 200, 200)), 0.95)
    assert (odd.low_rps, odd.high_rps) == (None, None)


def test_goodput_outside_the_measured_rates_is_unknown() -> None:
    """The estimate is None if all rates hold or all rates fail."""
    held = estimate_goodput("auto", points_at((1.0, 20, 20), (2.0, 20, 20)), 0.95)
    assert (held.rate_rps, held.low_rps, held.high_rps, held.holds_rps) == (None, None, None, 2.0)
    lost = estimate_goodput("auto", points_at((1.0, 10, 100), (2.0, 0, 100)), 0.95)
    assert (lost.rate_rps, lost.low_rps, lost.high_rps, lost.holds_rps) == (None, None, 1.0, None)


def test_correlated_requests_widen_the_interval() -> None:
    """A busy queue has a wider interval than independent requests."""
    run = queue_run(400, load=0.8, seed=3)
    (cell,) = points([RunReport("x", run)])
    kept = sum(r.chunks[0].at_s - r.scheduled_s <= 2.0 for r in run.records)
    plain, found = wilson(kept, 400), attainment_bounds(cell)
    assert found.high - found.low > 1.5 * (plain.high - plain.low)


def test_invalid_runs_are_left_out() -> None:
    """A point drops INVALID runs if it has valid runs, and otherwise marks them."""
    good, bad = run_report(100, 100), run_report(0, 100)
    bad.run.health = OVERLOADED
    (cell,) = points([good, bad])
    assert len(cell.records) == 100
    assert cell.label == "auto (1 INVALID left out)"
    (alone,) = points([bad])
    assert alone.label == "auto (INVALID)"
    assert estimate_goodputs([alone]) == []


def sweep_command(url: str, *flags: object):
    """Run the command line against a server."""
    rates = ["--rates", "40,80", "--duration", "0.1", "--max-tokens", "4", "--warm-up", "2"]
    return CliRunner().invoke(cli.app, ["sweep", url, *rates, *map(str, flags)])


def test_a_sweep_reports_every_cell(tmp_path, monkeypatch) -> None:
    """`sweep/1` has a summary per cell, and a second call runs only missing cells."""
    accept_any_health(monkeypatch)
    out, page, folder = tmp_path / "s.json", tmp_path / "p.html", tmp_path / "events"
    mock = Mock()
    files = ["--json", out, "--html", page, "--events", folder]
    with serving_in_a_thread(mock) as url:
        result = sweep_command(url, "--speculation", "off,ngram:2", "--rounds", 2, *files)
        assert result.exit_code == 0, result.output
        sent = len(mock.bodies)
        again = sweep_command(url, "--speculation", "off,ngram:2", "--rounds", 2, *files)
        assert (again.exit_code, len(mock.bodies)) == (0, sent)
        other = sweep_command(
            url, "--speculation", "off,ngram:2", "--rounds", 2, "--seed", 9, *files
        )
        assert other.exit_code == 0
        assert len(mock.bodies) > sent
    report = json.loads(out.read_text())
    assert report["format"] == "sweep/1"
    assert report["cells_planned"] == len(report["cells"]) == 8
    names = Counter((cell["name"], cell["rate_rps"]) for cell in report["cells"])
    assert names == {(n, r): 2 for n in ("off", "ngram:2") for r in (40.0, 80.0)}
    assert all(cell["summary"]["requests"] for cell in report["cells"])
    assert {(r["name"], r["share"]) for r in report["goodput"]} == {
        (n, s) for n in ("off", "ngram:2") for s in (0.9, 0.95, 0.99)
    }
    assert "at least 80.00" in result.output
    assert "<title>8 runs of load" in page.read_text()
    assert len(list(folder.iterdir())) == 8


async def test_an_interrupted_sweep_keeps_completed_cells(monkeypatch) -> None:
    """An interrupted sweep drops the current cell and keeps earlier cells."""
    ran = []

    async def a_cell(load, target, console):
        ran.append(load)
        return a_run(interrupted=len(ran) == 3), None

    monkeypatch.setattr(sweep, "run_load", a_cell)
    cells = tuple(shuffled_cells(parse_targets(["http://x"]), [1.0, 2.0, 3.0, 4.0], 1, 0))
    done = await run_sweep(
        Sweep(cells, Load(rate_rps=1.0), Target("")), Console(file=io.StringIO())
    )
    assert [cell for cell, _ in done] == list(cells[:2])
    assert len(ran) == 3


def test_wrong_sweeps_are_refused() -> None:
    """Invalid rates and unreachable servers give exit status 2."""
    assert CliRunner().invoke(cli.app, ["sweep", "http://x", "--rates", "0"]).exit_code == 2
    assert sweep_command("http://127.0.0.1:9").exit_code == 2
