"""The comparison of two runs finds real differences and reports no false ones."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from draftgate.loadgen import cli
from draftgate.loadgen.compare.comparison import compare_runs, holm, judge_changes, parse_threshold
from draftgate.loadgen.compare.measures import PercentileMeasure, measures
from draftgate.loadgen.events import EventWriter
from draftgate.loadgen.measuring.metrics import METRICS, distribution, values_of
from draftgate.loadgen.measuring.summary import summarize
from draftgate.loadgen.types import LoadRun, Slo
from tests.loadgen.queue_runs import queue_run
from tests.loadgen.test_report import OVERLOADED


def write_events(path: Path, run: LoadRun) -> Path:
    """Write the events of a run to a file."""
    with closing(EventWriter(path, run.settings)) as events:
        for one in run.records:
            events.record(one)
        events.end(run)
    return path


def run_compare(*arguments: object):
    """Run the command line on two files."""
    return CliRunner().invoke(cli.app, ["compare", *map(str, arguments)])


def test_measures_equal_the_metrics_of_reports() -> None:
    """Each measure equals the value in the summary if every request counts once."""
    run = queue_run(120)
    summary, found = summarize(run), measures(run)
    once = np.ones((1, 120), np.int64)
    for key in ("ttft_s", "tpot_s", "latency_s", "chunk_gap_s"):
        reported = distribution(values_of(METRICS[key], run.records)).as_dict()
        values = dict(zip(found[key].statistics, found[key].evaluate(once)[0], strict=True))
        assert values == pytest.approx({point: reported[point] for point in values})
    for key in ("attainment", "goodput_rps", "accepted_tokens_per_s"):
        assert found[key].evaluate(once)[0, 0] == pytest.approx(summary[key])
    mean = summary["details"]["figures"]["fluidity"]["mean"]
    assert found["fluidity"].evaluate(once)[0, 0] == pytest.approx(mean)


def test_a_count_acts_as_a_repetition() -> None:
    """Percentiles with counts equal those of repeated values."""
    rng = np.random.default_rng(4)
    values, owners = np.sort(rng.random(40)), rng.integers(0, 10, 40)
    measure = PercentileMeasure(values, owners, 10, ("p50", "p90"))
    counts = rng.integers(0, 4, (20, 10))
    for found, own in zip(measure.evaluate(counts), counts, strict=True):
        repeated = np.repeat(values, own[owners])
        assert found == pytest.approx(np.quantile(repeated, [0.5, 0.9]))
    assert np.isnan(measure.evaluate(np.zeros((1, 10), np.int64))).all()


def test_percentiles_on_single_requests_are_not_compared() -> None:
    """The comparison skips p99 for 100 requests, but includes p99 for 500 requests."""
    assert measures(queue_run(100))["ttft_s"].statistics == ("p50", "p90")
    assert "p99" in measures(queue_run(600))["ttft_s"].statistics


@pytest.mark.parametrize("paired", [True, False])
def test_identical_servers_rarely_regress(paired: bool) -> None:
    """At most 2 of 12 seeded pairs from the same queue regress (2.5 % expected)."""
    assert regressions(12, paired=paired) <= 2


@pytest.mark.long
@pytest.mark.parametrize("paired", [True, False])
def test_few_of_a_hundred_identical_pairs_regress(paired: bool) -> None:
    """At most 7 of 100 pairs from the same queue regress, where 2.5 are expected."""
    assert regressions(100, paired=paired) <= 7


def regressions(seeds: int, *, paired: bool, slower: float = 1.0) -> int:
    """Return how many pairs of runs with 200 requests regress, one pair per seed."""
    found = 0
    for seed in range(seeds):
        other = seed if paired else 1000 + seed
        before = queue_run(200, seed=seed)
        after = queue_run(200, seed=other, noise=1, slower=slower)
        comparison = compare_runs(before, after)
        assert comparison.paired is paired
        found += comparison.regressed
    return found


def test_a_slower_server_is_a_regression() -> None:
    """All 8 pairs with a 10 % slower server regress, and the interval of TPOT holds the truth."""
    assert regressions(8, paired=True, slower=1.1) == 8
    before, after = queue_run(300), queue_run(300, noise=1, slower=1.1)
    change = next(
        c for c in compare_runs(before, after).changes if (c.key, c.statistic) == ("tpot_s", "p50")
    )
    assert change.verdict == "worse"
    low, high = change.interval
    assert low < 0.1 * change.a < high


def test_pairing_narrows_intervals() -> None:
    """Pairing the same requests at the same times makes intervals at least a third narrower."""
    before = queue_run(300)
    widths = []
    for seed in (0, 1):
        change = compare_runs(before, queue_run(300, seed=seed, noise=1)).changes[0]
        widths.append(change.interval[1] - change.interval[0])
    assert widths[0] < widths[1] * 2 / 3


def test_pairing_does_not_depend_on_the_number_of_values(monkeypatch) -> None:
    """Runs with different numbers of chunks stay paired, also if resamples are drawn in batches."""
    before = queue_run(60)
    merged = [replace(r, chunks=r.chunks[::2]) for r in before.records]
    after, widths = replace(before, records=merged), []
    for cells in (4_000_000, 6000):
        monkeypatch.setattr("draftgate.loadgen.compare.comparison.CELLS", cells)
        changes = {(c.key, c.statistic): c for c in compare_runs(before, after).changes}
        low, high = changes["chunk_gap_s", "p50"].interval
        widths.append(high - low)
    assert widths[1] == pytest.approx(widths[0], rel=0.3)


def test_an_improvement_is_not_a_regression() -> None:
    """A faster server is better, and no statistic is worse."""
    comparison = compare_runs(queue_run(300), queue_run(300, noise=1, slower=0.85))
    assert {c.verdict for c in comparison.changes} >= {"better"}
    assert not comparison.regressed


def test_a_threshold_allows_some_worsening() -> None:
    """A slowdown of 10 % exceeds a threshold of 2 % but not of 20 %."""
    before, after = queue_run(300), queue_run(300, noise=1, slower=1.1)
    for most, regressed in (("2%", True), ("20%", False), ("0.01", False)):
        comparison = compare_runs(before, after, [parse_threshold(f"tpot_s:p50:{most}")])
        assert comparison.regressed is regressed
        assert sum(change.judged for change in comparison.changes) == 1


def test_a_comparison_is_reproducible() -> None:
    """Two comparisons of the same runs give the same result."""
    runs = queue_run(60), queue_run(60, noise=1)
    assert compare_runs(*runs) == compare_runs(*runs)


def test_holm_correction_matches_its_definition() -> None:
    """The correction multiplies the i-th smallest p-value by m - i + 1, at most up to 1."""
    assert holm([0.04, 0.01, 0.5]) == pytest.approx([0.08, 0.03, 0.5])
    assert holm([0.02, 0.02]) == pytest.approx([0.04, 0.04])
    assert holm([]) == []


def test_statistics_that_are_not_judged_have_no_verdict() -> None:
    """A statistic that is not judged has no verdict, even with a small p-value."""
    change = compare_runs(queue_run(60), queue_run(60, slower=2.0)).changes[0]
    (unjudged,) = judge_changes([replace(change, judged=False, p_worse=0.0)])
    assert unjudged.verdict == ""


@pytest.mark.parametrize(
    "words", ["ttft:5%", "ttft_s", "ttft_s:5%", "ttft_s:p75:5%", "ttft_s:p90:x", "attainment:-1"]
)
def test_a_malformed_threshold_is_refused(words: str) -> None:
    """The parser rejects unknown metrics, unknown or missing statistics and missing numbers."""
    with pytest.raises(ValueError, match="threshold"):
        parse_threshold(words)


def test_thresholds_are_relative_or_absolute() -> None:
    """A percentage is a share of A's value, and a number is in the metric's unit."""
    assert parse_threshold("ttft_s:p90:5%").relative == pytest.approx(0.05)
    assert parse_threshold("attainment:0.02").absolute == pytest.approx(0.02)
    assert parse_threshold("fluidity:0.02").statistic == "mean"


def test_compare_has_an_exit_status_for_ci(tmp_path) -> None:
    """The exit status is 1 for a regression, 2 for different runs, 3 for INVALID runs, else 0."""
    before, out = write_events(tmp_path / "a.jsonl", queue_run(100)), tmp_path / "c.json"
    others = {
        "alike": queue_run(100, noise=1),
        "worse": queue_run(100, noise=1, slower=1.5),
        "few": queue_run(10),
        "promised": queue_run(100, slo=Slo(ttft_s=1.0)),
        "invalid": replace(queue_run(100, noise=1), health=OVERLOADED),
    }
    found = {}
    for name, run in others.items():
        other = write_events(tmp_path / f"{name}.jsonl", run)
        found[name] = run_compare(before, other, "--json", out).exit_code
        if name == "worse":
            result_json = json.loads(out.read_text())
            assert result_json["format"] == "compare/1"
            assert result_json["regressed"]
            assert result_json["paired"]
            assert any(change["verdict"] == "worse" for change in result_json["changes"])
    assert found == {"alike": 0, "worse": 1, "few": 2, "promised": 2, "invalid": 3}
    assert run_compare(before, tmp_path / "nowhere").exit_code == 2
    assert run_compare(before, before, "--threshold", "ttft_s:p99:5%").exit_code == 2


def test_the_table_shows_changes_and_differing_settings(tmp_path) -> None:
    """The table has both values, the change with its interval, and the settings that differ."""
    before = write_events(tmp_path / "a.jsonl", queue_run(100))
    after = write_events(tmp_path / "b.jsonl", queue_run(100, load=0.9, noise=1))
    text = run_compare(before, after).output
    for shown in ("TTFT p50", "attainment", "95 % interval", "rate_rps: 1.2 in A, 1.8 in B"):
        assert shown in text
    assert "100 and 100 requests" in text
