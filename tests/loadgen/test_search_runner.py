"""Tests of a search of a real server, from its warm-up to its report."""

from __future__ import annotations

import json
import re
from math import inf

import plotly.graph_objects as go
import pytest

from draftgate.loadgen.search.report import answer, attainment_chart
from draftgate.loadgen.search.runner import SearchReport
from draftgate.loadgen.search.types import (
    ProbeResult,
    ProbeVerdict,
    SearchGoal,
    SearchProbe,
    SearchResult,
    StopReason,
)
from tests.loadgen.known_records import accept_any_health
from tests.loadgen.mock_server import Mock, serving_in_a_thread
from tests.loadgen.test_cli import command, respond_with


def search(url: str, path, *flags: object):
    """Search without a TTFT limit, so that the search needs no warm-up."""
    given = ("--rate", 200, "--max-rate", 400, "--slo-tpot-ms", 60_000, "--max-tokens", 8)
    return command("search", url, *given, "--json", path, *flags)


def test_a_search_reports_its_probes(tmp_path, monkeypatch) -> None:
    """A server that meets every SLO gives a lower bound, and cut probes are valid runs."""
    accept_any_health(monkeypatch)
    respond_with(monkeypatch)
    with serving_in_a_thread(Mock()) as url:
        result = search(url, tmp_path / "found.json", "--html", tmp_path / "found.html")
    assert result.exit_code == 1, result.output
    page = (tmp_path / "found.html").read_text()
    assert "and perhaps more, 95% of the requests meet their SLO (the highest allowed rate" in page
    assert 'aria-label="Attainment against rate"' in page
    assert "prefers-color-scheme: dark" in page
    assert len(page) < 1_000_000
    assert not re.search(r"(src|href|action)\s*=|@import|url\(|<link|<iframe", page)
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["format"], found["stop"], found["rate_rps"]) == ("search/1", "max_rate", None)
    assert [probe["rate_rps"] for probe in found["probes"]] == [200.0, 400.0]
    low, high = found["interval"]
    assert (350.0 < low <= 410.0, high) == (True, None)
    for probe in found["probes"]:
        assert (probe["verdict"], probe["met"]) == ("holds", probe["counted"])
        assert probe["summary"]["errors"] == {}
        reasons = probe["summary"]["details"]["invalid_reasons"]
        assert not any("interrupted" in reason for reason in reasons)
    assert "the highest allowed rate holds" in result.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--slo-tpot-ms", 0.0), "limit must be positive"),
        (("--share", 1.5), "share must be between"),
        (("--rate", 500), "starting rate must be above 0"),
        (("--trace", "some.jsonl"), "--trace"),
    ],
)
def test_impossible_searches_are_explained(tmp_path, monkeypatch, flags, message: str) -> None:
    """The command exits with status 2 and the reason before any probe."""
    respond_with(monkeypatch)
    with serving_in_a_thread(Mock()) as url:
        result = search(url, tmp_path / "found.json", *flags)
    assert (result.exit_code, message in " ".join(result.output.split())) == (2, True), (
        result.output
    )
    assert not (tmp_path / "found.json").exists()


def test_a_broken_server_is_not_searched(tmp_path, monkeypatch) -> None:
    """The command reports the fault of the warm-up."""
    respond_with(monkeypatch, fault="cut")
    with serving_in_a_thread(Mock()) as url:
        result = search(url, tmp_path / "found.json")
    assert result.exit_code == 2
    assert "before the search" in result.output


GOAL = SearchGoal(1.0, 1.0, share=0.9)
PROBES = tuple(
    (
        ProbeResult(SearchProbe(rate, 0, 0.0, 100), (True,) * met + (False,) * (100 - met), 100, v),
        {},
    )
    for rate, met, v in ((1.0, 99, ProbeVerdict.HOLDS), (2.0, 50, ProbeVerdict.FAILS))
)


def reported(
    rate_rps: float | None, low_rps: float, high_rps: float, stop: StopReason, probes=PROBES
) -> SearchReport:
    """Return a report of a search."""
    result = SearchResult(rate_rps, low_rps, high_rps, 200, 2.0, stop)
    return SearchReport(GOAL, result, probes, {"url": "http://server"})


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            (1.5, 1.4, 1.6, StopReason.PRECISE),
            (
                "At up to 1.5 requests/s (95% interval: 1.4 to 1.6/s), 90% of the requests meet"
                " their SLO."
            ),
        ),
        (
            (None, 2.0, inf, StopReason.GENERATOR),
            (
                "At 2 requests/s and perhaps more, 90% of the requests meet their SLO"
                " (this generator cannot send faster)."
            ),
        ),
        (
            (None, 0.0, 0.5, StopReason.NEVER),
            (
                "Fewer than 90% of the requests meet their SLO at 0.5 requests/s and above"
                " (not even the slowest rate holds)."
            ),
        ),
        (
            (None, 0.0, inf, StopReason.INTERRUPTED),
            "No probe has measured the server (interrupted).",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value[3].name,
)
def test_the_answer_is_one_sentence(found, sentence: str) -> None:
    """The sentence has the rate or its bound, and why the search ended if it is not precise."""
    assert answer(reported(*found)) == sentence


def test_the_chart_has_each_probe_with_its_interval() -> None:
    """Plotly accepts the chart. The intervals contain the shares, and the band the rate."""
    chart = attainment_chart(reported(1.5, 1.4, 1.6, StopReason.PRECISE))
    go.Figure({"data": chart.data, "layout": chart.layout})
    assert [(one["name"], one["x"], one["y"]) for one in chart.data] == [
        ("holds", [1.0], [0.99]),
        ("fails", [2.0], [0.5]),
    ]
    for one in chart.data:
        assert one["error_y"]["array"][0] >= 0.0
        assert one["error_y"]["arrayminus"][0] >= 0.0
    (band,) = [shape for shape in chart.layout["shapes"] if shape["type"] == "rect"]
    assert (band["x0"], band["x1"]) == (1.4, 1.6)
    assert not attainment_chart(reported(None, 0.0, inf, StopReason.INTERRUPTED, ())).data
