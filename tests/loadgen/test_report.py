"""Tests of the page, the tables and the live view."""

from __future__ import annotations

import asyncio
import io
import json
import math
import re
import subprocess
from dataclasses import replace
from itertools import pairwise

import plotly.graph_objects as go
import pytest
from rich.console import Console

from draftgate.lab.sim.virtual_time import run_virtual
from draftgate.loadgen.checking.lossless import Difference, LosslessCheck
from draftgate.loadgen.measuring.metrics import METRICS
from draftgate.loadgen.report.charts import thinned
from draftgate.loadgen.report.formatting import milliseconds
from draftgate.loadgen.report.html import plotly_base64
from draftgate.loadgen.report.live import (
    PROGRESS_S,
    Histogram,
    Progress,
    live_view,
    progress_line,
    render_progress,
)
from draftgate.loadgen.report.page import charts as charts_of
from draftgate.loadgen.report.page import run_page as page_of
from draftgate.loadgen.report.runs import RunReport, name_of
from draftgate.loadgen.report.terminal import render_run, render_side_by_side
from draftgate.loadgen.report.time_charts import open_requests
from draftgate.loadgen.types import ClientHealth
from tests.chromium import find_chromium
from tests.loadgen.known_records import a_run, failed, record, speculation

OVERLOADED = ClientHealth(max_lag_s=0.5, p99_lag_s=0.2, cpu_share=0.99, loop_stall_s=0.4)
LOSSY = LosslessCheck(2, 1, (Difference(1, 0, 5, "<a>", "<b>"),), ((2, "cut: gone"),), 1)


def rendered_text(renderable, width: int = 160) -> str:
    """Return the text that rich renders."""
    console = Console(width=width, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()


def page(run, lossless=None) -> str:
    """Return the page of a single run."""
    return page_of([RunReport("server", run, lossless)])


def charts(run):
    """Return the charts of a single run."""
    return charts_of([RunReport("server", run)])


def without_plotly(text: str) -> str:
    """Return the page without plotly's bundle."""
    return text.replace(plotly_base64(), "")


def test_the_page_is_self_contained() -> None:
    """The page loads nothing, embeds plotly once, and forbids the browser every request."""
    text = page(a_run())
    assert text.count(plotly_base64()) == 1
    assert len(text) < 1_000_000
    own = without_plotly(text)
    assert not re.search(r"(src|href|action)\s*=|@import|url\(|fetch\(|<link|<iframe", own)
    assert "default-src 'none'" in own
    assert set(re.findall(r"https?://[\w.:]+", own)) == {"http://server:8000"}


def test_the_page_has_every_metric_with_its_formula() -> None:
    """The page has every metric with its formula.

    It also has classes with intervals, errors with examples, decisions and settings.
    """
    own = without_plotly(page(a_run()))
    for metric in METRICS.values():
        assert metric.title in own
        assert metric.formula.replace(">", "&gt;") in own
    for shown in ("interactive", "batch", "50.0% [15.0, 85.0]", "&lt;cut&gt;", "slo.ttft_s"):
        assert shown in own
    for shown in ("ngram x 3", "16 drafted, 12 accepted (75.0%)", "TTFT p99 (p50: 500 ms)"):
        assert shown in own
    assert "INVALID" not in own


def test_text_of_the_server_is_escaped() -> None:
    """The page escapes names and details from the server, also in the data of plots."""
    evil = "</script><b onload=x>"
    run = a_run([record(class_name=evil), failed(1, verdict="cut", detail=evil)])
    run.settings["model"] = evil
    assert evil not in without_plotly(page(run))
    assert page(run).count("</script>") == page(a_run()).count("</script>") - 3


def test_an_invalid_run_shows_the_reasons_first() -> None:
    """The page shows a banner with every reason above all results."""
    own = without_plotly(page(a_run(health=OVERLOADED)))
    assert own.index("INVALID") < own.index("goodput")
    assert "largest lag: 500.0 ms, limit 100 ms" in own
    text = rendered_text(render_run(a_run(health=OVERLOADED)))
    assert text.index("INVALID") < text.index("goodput")
    assert "CPU of the generator: 99% of a core" in text


def test_charts_match_the_schema_of_plotly() -> None:
    """Plotly's schema accepts every name and value."""
    drawn = charts(a_run())
    assert [chart.title for chart in drawn] == [
        "TTFT",
        "TPOT",
        "latency",
        "chunk gap",
        "Requests",
        "Load",
        "TTFT over time",
        "Decisions over time",
        "Longest draft",
        "Accepted draft tokens",
    ]
    for chart in drawn:
        go.Figure({"data": chart.data, "layout": chart.layout})
        json.dumps(chart.data, allow_nan=False)


def test_curves_are_distributions() -> None:
    """A curve rises by 1/count at each value in milliseconds, and the chart shows the limits."""
    ttft = charts(a_run())[0]
    curves = {trace["name"]: trace for trace in ttft.data}
    assert curves["interactive"]["x"] == pytest.approx([500, 700])
    assert curves["interactive"]["y"] == pytest.approx([0.5, 1.0])
    assert curves["batch"]["x"] == pytest.approx([500])
    assert curves["all, from sending"]["x"] == pytest.approx([490, 490, 690])
    assert [shape["x0"] for shape in ttft.layout["shapes"]] == pytest.approx([600])


def test_a_long_tail_gets_a_logarithmic_axis() -> None:
    """Values over a wide range have a logarithmic axis, with the limit in place."""
    slo = a_run().records[0].planned.request.slo
    wide = [record(i, first_s=first, slo=slo) for i, first in enumerate((0.1, 0.1, 0.1, 9.0))]
    ttft = charts(a_run(wide))[0]
    assert ttft.layout["xaxis"]["type"] == "log"
    assert ttft.layout["annotations"][0]["x"] == pytest.approx(math.log10(600))


def test_requests_are_bars_by_outcome() -> None:
    """Bars run from the schedule to the first text and to the end, by outcome."""
    bars = {trace["name"]: trace for trace in charts(a_run())[4].data}
    assert bars["SLO met: waiting"]["x"][:3] == pytest.approx([0.0, 0.5, None])
    assert bars["SLO met: streaming"]["x"][:3] == pytest.approx([0.5, 0.92, None])
    assert bars["late: waiting"]["y"] == [1, 1, None]
    assert bars["failed: streaming"]["y"] == [3, 3, None]


def test_open_requests_are_counted_over_time() -> None:
    """The count rises when a request is sent and falls when it ends."""
    first = record(0, 0.0, 0.5, (), 1)
    second = replace(record(1, 0.2, 0.5, (), 1), sent_s=0.2)
    instants, open_then = open_requests([first, second])
    assert instants == pytest.approx([0.01, 0.2, 0.52, 0.72])
    assert open_then == [1, 2, 1, 0]


def test_rates_and_lags_are_over_intervals() -> None:
    """Rates add up to the requests of the run, and the completed rate excludes failures."""
    run = a_run()
    scheduled, completed, _, lag = charts(run)[5].data
    width_s = run.duration_s / len(scheduled["x"])
    assert sum(scheduled["y"]) * width_s == pytest.approx(4)
    assert sum(completed["y"]) * width_s == pytest.approx(3)
    assert max(lag["y"]) == pytest.approx(10.0)


def test_large_runs_are_thinned_evenly() -> None:
    """A chart of a large run keeps the given number of requests, with the first and the last.

    A chart of a small run keeps all requests.
    """
    assert thinned(range(5), 5) == [0, 1, 2, 3, 4]
    some = thinned(range(1000), 10)
    assert (len(some), some[0], some[-1]) == (10, 0, 999)
    assert max(b - a for a, b in pairwise(some)) == 111
    many = [record(i, i / 100, metrics=speculation()) for i in range(3000)]
    size = len(json.dumps([chart.data for chart in charts(a_run(many))]))
    assert size < 400_000


def test_a_run_without_requests_has_a_page() -> None:
    """A run without records has no plots and only known values."""
    run = a_run([], interrupted=True)
    assert charts(run) == []
    assert "0 of 0" in without_plotly(page(run))
    assert "completed" in rendered_text(render_run(run))


def test_the_table_has_all_results() -> None:
    """The table has completions, attainment, metrics with formulas, failures and speculation."""
    text = rendered_text(render_run(a_run()))
    for shown in ("3 of 4 in 4.00 s", "1.00 requests/s", "50.0% [15.0, 85.0]", "6.8 tokens/s"):
        assert shown in text
    drafts = "16 drafted, 12 accepted (75.0%)"
    for shown in ("(last text - first text) / (n - 1)", "<cut>", drafts, "1.00"):
        assert shown in text


def test_a_lossy_run_shows_its_differences() -> None:
    """Table and page show both texts at their first difference, and failed replays."""
    text, own = rendered_text(render_run(a_run(), LOSSY)), without_plotly(page(a_run(), LOSSY))
    assert "'<a>'" in text
    assert "1 replays were of another numerics class" in text
    assert "FAILED" in own
    assert "&lt;a&gt;" in own
    fine = LosslessCheck(59, 59, (), (), 0)
    assert "at most 5.0% differ" in rendered_text(render_run(a_run(), fine))
    assert "passed: 59" in without_plotly(page(a_run(), fine))


def test_progress_is_counted() -> None:
    """The view counts sent, open, done and failed requests, with percentiles so far."""
    run, progress = a_run(), Progress(8, None)
    for _ in run.records:
        progress.start()
    for one in run.records[:2] + run.records[3:]:
        progress.record(one)
    text = rendered_text(render_progress(progress, 3.0), 80)
    for shown in ("4 of 8", "open", "33.3%", "cut", "p99"):
        assert shown in text
    assert (progress.sent, progress.done, progress.met) == (4, 3, 1)
    assert progress.share(3.0) == 3 / 8
    assert Progress(None, 10.0).share(4.0) == 0.4
    assert Progress(None, None).share(4.0) is None
    assert progress_line(progress, 3.0) == (
        "sent 4 of 8 requests, 3 done, 1 failed, 3 s, about 5 s left"
    )


@pytest.mark.parametrize(
    ("progress", "left_s"),
    [
        (Progress(8, None, done=2), 12.0),
        (Progress(8, 10.0, done=2), 6.0),
        (Progress(None, 10.0), 6.0),
        (Progress(8, 3.0), 0.0),
        (Progress(8, None), None),
    ],
)
def test_time_left_is_that_of_the_schedule_or_the_requests(
    progress: Progress, left_s: float | None
) -> None:
    """A schedule has a known end, and a closed loop ends as fast as its requests did so far."""
    assert progress.left_s(4.0) == left_s


def test_percentiles_so_far_are_within_a_percent() -> None:
    """Percentiles are within 1 % over five decades, and None without values."""
    histogram, values = Histogram(), [10 ** (-5 + 5 * i / 999) for i in range(1000)]
    assert histogram.percentile(50) is None
    for value in reversed(values):
        histogram.add(value)
    for percent in (1, 50, 99, 100):
        truth = values[math.ceil(1000 * percent / 100) - 1]
        assert histogram.percentile(percent) == pytest.approx(truth, rel=0.0102)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_view_on_a_terminal_and_lines_elsewhere(terminal: bool) -> None:
    """The view is drawn at once. Other output has a line in each interval."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    progress = Progress(None, 100.0, sent=1234)

    async def run() -> None:
        async with live_view(console, progress):
            await asyncio.sleep(0.01)
            assert ("1234" in console.file.getvalue()) is terminal
            await asyncio.sleep(2.5 * PROGRESS_S)
            lines = console.file.getvalue().count("sent 1234 requests, 0 done")
            assert lines == (0 if terminal else 2)

    run_virtual(run())


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "-"),
        (0.00123, "1.23 ms"),
        (0.0123, "12.3 ms"),
        (0.123, "123 ms"),
        (12.3, "12,300 ms"),
    ],
)
def test_times_have_three_digits(seconds: float | None, words: str) -> None:
    """Milliseconds have three significant digits, or all digits before the decimal point."""
    assert milliseconds(seconds) == words


@pytest.mark.browser
@pytest.mark.parametrize("rates", [[1.0], [1.0, 2.0]])
def test_a_browser_draws_every_plot(tmp_path, rates: list[float]) -> None:
    """Chromium draws every chart without network."""
    reports, path = [at_rate(rate) for rate in rates], tmp_path / "page.html"
    path.write_text(page_of(reports))
    chromium = find_chromium()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    command = [chromium, *options, f"--user-data-dir={tmp_path}", "--dump-dom", path.as_uri()]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert without_plotly(drawn.stdout).count('class="plot-container') == len(charts_of(reports))


def at_rate(rate: float, name: str = "auto", **fields) -> RunReport:
    """Return the report of a run at a rate."""
    run = a_run(**fields)
    run.settings["rate_rps"] = rate
    return RunReport(name, run)


SEVERAL = [at_rate(1.0), at_rate(2.0), at_rate(1.0, "off"), at_rate(2.0, "off", health=OVERLOADED)]


def test_several_runs_are_curves_over_the_rate() -> None:
    """Each name is a curve and each rate a point, in charts that plotly accepts."""
    drawn = charts_of(SEVERAL)
    assert [chart.title for chart in drawn] == [
        "Attainment against rate",
        "Goodput against rate",
        "TTFT against rate",
        "TPOT against rate",
        "latency against rate",
        "chunk gap against rate",
        "Longest draft",
        "Accepted draft tokens",
    ]
    for chart in drawn:
        go.Figure({"data": chart.data, "layout": chart.layout})
        json.dumps(chart.data, allow_nan=False)
    attained = drawn[0].data
    assert [(trace["name"], trace["x"]) for trace in attained] == [
        ("auto", [1.0, 2.0]),
        ("off", [1.0, 2.0]),
    ]
    assert attained[0]["y"] == pytest.approx([0.5, 0.5])
    assert attained[0]["error_y"]["array"] == pytest.approx([0.35, 0.35], abs=1e-3)
    assert {len(chart.data) for chart in drawn[-2:]} == {2}
    assert sum(drawn[-1].data[0]["y"]) == pytest.approx(1.0)


def test_runs_at_one_rate_are_distributions() -> None:
    """Each name has a distribution if all runs have the same rate."""
    titles = [chart.title for chart in charts_of([at_rate(1.0), at_rate(1.0, "off")])]
    assert titles[:4] == ["TTFT", "TPOT", "latency", "chunk gap"]


def test_the_page_of_several_runs_has_the_details_of_each_run() -> None:
    """A table marks INVALID runs, and the page folds the details of each run."""
    own = without_plotly(page_of(SEVERAL))
    assert own.count("<details>") == 4
    assert "off (INVALID)" in own
    assert "below all rates" in own
    assert "4 runs of load: auto, off" in own
    assert not re.search(r"(src|href|action)\s*=|@import|url\(|fetch\(|<link|<iframe", own)
    table = rendered_text(render_side_by_side(SEVERAL), 200)
    assert "off (INVALID)" in table
    assert table.count("50.0%") == 4
    assert max(map(len, rendered_text(render_side_by_side(SEVERAL), 80).splitlines())) <= 80
    assert own.count("[15.0, 85.0]") == 8


@pytest.mark.parametrize(
    ("file", "rate", "name"),
    [
        ("auto-1.5.jsonl", 1.5, "auto"),
        ("fixed-4-2-1.jsonl.gz", 2.0, "fixed-4"),
        ("before.jsonl", 2.0, "before"),
        ("llama-3.jsonl", 2.0, "llama-3"),
    ],
)
def test_a_run_is_named_by_its_file(tmp_path, file: str, rate: float, name: str) -> None:
    """The name of a run is the file name without rate and round."""
    assert name_of(tmp_path / file, at_rate(rate).run) == name


def test_the_page_is_accessible() -> None:
    """Each plot has a name for screen readers, and tables are reachable by keyboard."""
    own = without_plotly(page_of(SEVERAL))
    assert own.count('role="img" aria-label="') == own.count('class="plot"') == 8
    assert own.count('class="scroll"') == own.count('class="scroll" tabindex="0" role="region"')
