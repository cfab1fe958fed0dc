"""Tests of the load tool comparison: the mock's truth, and the parsing of each tool's report."""

from __future__ import annotations

import json
import math
from contextlib import closing

import pytest
from aiohttp.test_utils import TestClient, TestServer

from bench.tool_comparison.agreement import PAIRS, differ
from bench.tool_comparison.cases import CASES
from bench.tool_comparison.dialects import NAMES, dialect_metrics, differences
from bench.tool_comparison.mock import Mock, ResponseRecord
from bench.tool_comparison.table import table
from bench.tool_comparison.tools import read_aiperf
from bench.tool_comparison.truth import truth
from draftgate.loadgen.events import EventWriter
from tests.loadgen.known_records import a_run, record


def answered(arrived_s: float, ttft_s: float = 0.05, tokens: int = 11, **fields) -> ResponseRecord:
    """A response with tokens 10 ms apart that ends with its last token."""
    first_s = arrived_s + ttft_s
    last_s = first_s + (tokens - 1) * 0.01
    values = {"end_s": last_s, "intact": True} | fields
    return ResponseRecord(arrived_s, first_s, last_s, tokens=tokens, **values)


def test_truth_counts_from_the_scheduled_time() -> None:
    """The truth counts requests that a tool delayed from their scheduled time."""
    result = truth([answered(0.0), answered(0.5), answered(1.0)], 3)
    assert result["latency_p99_ms"] == pytest.approx(150)
    assert result["scheduled_p50_ms"] == pytest.approx(
        150 + 400
    )  # It was due at 0.1 and sent at 0.5.
    assert result["goodput_rps"] == pytest.approx(1 / 1.15)


def test_truth_excludes_broken_streams_and_test_requests() -> None:
    """The truth counts a broken stream as a failure without tokens.

    Test requests before the run do not count.
    """
    cut = answered(0.1, tokens=5, intact=False)
    result = truth([answered(-5.0), answered(0.0), cut], 2)
    assert (result["ok"], result["failed"]) == (1, 1)
    assert result["tokens_per_s"] == pytest.approx(11 / 0.19)
    assert result["tpot_p50_ms"] == pytest.approx(10)


@pytest.mark.parametrize("name", ["cut", "error", "hollow"])
async def test_the_mock_follows_its_case(name: str) -> None:
    """A hollow stream has an empty first delta, and a failing stream has an error event."""
    async with TestClient(TestServer(Mock(CASES[name]).application())) as client:
        chat = await client.post("/v1/chat/completions", json={"messages": []})
        events = [e for e in (await chat.text()).split("\n\n") if e]
        (result,) = await (await client.get("/truth")).json()
    assert chat.status == 200
    assert result["intact"] == (name == "hollow")
    assert result["tokens"] == (32 if name == "hollow" else 16)
    assert ("[DONE]" in events[-1]) == (name != "cut")
    assert any('"error"' in event for event in events) == (name == "error")
    assert ('"usage"' in events[-2]) == (name == "hollow")
    second = json.loads(events[1].removeprefix("data: "))["choices"][0]["delta"]
    assert second == {"content": "" if name == "hollow" else " return"}


def test_each_dialect_has_the_figures_of_its_tool(tmp_path) -> None:
    """Every mapped metric of a tool exists in its dialect's report."""
    run = a_run([record(0, 0.0), record(1, 0.5)])
    with closing(EventWriter(tmp_path / "e.jsonl", run.settings)) as events:
        for one in run.records:
            events.record(one)
        events.end(run)
    report = dialect_metrics(tmp_path / "e.jsonl")
    assert set(report) == set(NAMES)
    for figures in report.values():
        assert figures["ok"] == 2
        assert all(value is not None and math.isfinite(value) for value in figures.values())


def test_differences_are_relative_to_the_tools_figures() -> None:
    """A difference needs both values, and a value other than zero from the tool."""
    found = differences({"a": 10.0, "b": 0.0, "c": None, "d": 4.0}, {"a": 11.0, "b": 1.0, "c": 1.0})
    assert found == {"a": pytest.approx(0.1), "b": None}


def test_the_report_of_aiperf_is_parsed(tmp_path) -> None:
    """The parser gives aiperf's metrics Draftgate's names.

    Missing metrics are None, and missing counts are 0.
    """
    exported = {
        "request_count": {"avg": 3.0},
        "request_latency": {"avg": 5.0, "p50": 4.0, "p99": 9.0},
    }
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(exported))
    read = read_aiperf(tmp_path)
    assert (read["ok"], read["failed"], read["latency_p99_ms"]) == (3.0, 0, 9.0)
    assert (read["latency_mean_ms"], read["ttft_p50_ms"], read["goodput_rps"]) == (5.0, None, None)


def test_agreement_needs_both_figures() -> None:
    """The comparison raises an error if a metric is missing."""
    one = {key: 100.0 for pair in PAIRS.values() for key in pair}
    assert differ(one, one | {"ttft_p50_ms": 101.0})["ttft"] == pytest.approx(0.01)
    with pytest.raises(RuntimeError, match="no ttft"):
        differ(one | {"ttft_p50_ms": None}, one)


def test_the_table_has_the_truth_first_and_no_failed_tool() -> None:
    """The table of a case has the truth, and a row for each tool with a report."""
    result = truth([answered(0.0)], 1)
    rows = [
        {"case": "plain", "tool": "one", "said": result, "truth": result},
        {"case": "plain", "tool": "two", "failed": "crashed"},
    ]
    lines = table(rows).splitlines()
    assert [line.split(" | ")[0] for line in lines[-2:]] == ["| *truth (one)*", "| one"]
    assert "1 of 1" in lines[-1]
