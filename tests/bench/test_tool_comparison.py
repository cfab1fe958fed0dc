"""The comparison of load tools: the mock's truth, and the parsing of each tool's report."""

from __future__ import annotations

import json
import math
from contextlib import closing

import pytest
from aiohttp.test_utils import TestClient, TestServer

from bench.tool_comparison.agreement import PAIRS, differ
from bench.tool_comparison.cases import CASES
from bench.tool_comparison.dialects import NAMES, differences, said_as
from bench.tool_comparison.mock import Answered, Mock
from bench.tool_comparison.table import table
from bench.tool_comparison.tools import read_aiperf
from bench.tool_comparison.truth import truth
from draftgate.loadgen.events import EventWriter
from tests.loadgen.known_records import a_run, record


def answered(arrived_s: float, ttft_s: float = 0.05, tokens: int = 11, **fields) -> Answered:
    """An answer with tokens 10 ms apart that ends with the last one."""
    first_s = arrived_s + ttft_s
    last_s = first_s + (tokens - 1) * 0.01
    values = {"end_s": last_s, "intact": True} | fields
    return Answered(arrived_s, first_s, last_s, tokens=tokens, **values)


def test_truth_counts_from_the_scheduled_time() -> None:
    """Requests that a tool delayed are counted from their scheduled time."""
    told = truth([answered(0.0), answered(0.5), answered(1.0)], 3)
    assert told["latency_p99_ms"] == pytest.approx(150)
    assert told["scheduled_p50_ms"] == pytest.approx(150 + 400)  # due at 0.1, sent at 0.5
    assert told["goodput_rps"] == pytest.approx(1 / 1.15)


def test_truth_excludes_broken_streams_and_test_requests() -> None:
    """A broken stream is a failure without tokens; test requests before the run are ignored."""
    cut = answered(0.1, tokens=5, intact=False)
    told = truth([answered(-5.0), answered(0.0), cut], 2)
    assert (told["ok"], told["failed"]) == (1, 1)
    assert told["tokens_per_s"] == pytest.approx(11 / 0.19)
    assert told["tpot_p50_ms"] == pytest.approx(10)


@pytest.mark.parametrize("name", ["cut", "error", "hollow"])
async def test_the_mock_follows_its_case(name: str) -> None:
    """A hollow stream has an empty first delta; a failing one has an error event."""
    async with TestClient(TestServer(Mock(CASES[name]).application())) as client:
        chat = await client.post("/v1/chat/completions", json={"messages": []})
        events = [e for e in (await chat.text()).split("\n\n") if e]
        (told,) = await (await client.get("/truth")).json()
    assert chat.status == 200
    assert told["intact"] == (name == "hollow")
    assert told["tokens"] == (32 if name == "hollow" else 16)
    assert ("[DONE]" in events[-1]) == (name != "cut")
    assert any('"error"' in event for event in events) == (name == "error")
    assert ('"usage"' in events[-2]) == (name == "hollow")
    second = json.loads(events[1].removeprefix("data: "))["choices"][0]["delta"]
    assert second == {"content": "" if name == "hollow" else " return"}


def test_each_dialect_has_the_figures_of_its_tool(tmp_path) -> None:
    """Every mapped name of a tool's figure exists in its dialect's report."""
    run = a_run([record(0, 0.0), record(1, 0.5)])
    with closing(EventWriter(tmp_path / "e.jsonl", run.settings)) as events:
        for one in run.records:
            events.record(one)
        events.end(run)
    said = said_as(tmp_path / "e.jsonl")
    assert set(said) == set(NAMES)
    for figures in said.values():
        assert figures["ok"] == 2
        assert all(value is not None and math.isfinite(value) for value in figures.values())


def test_differences_are_relative_to_the_tools_figures() -> None:
    """Differences need both figures, and a tool's figure other than zero."""
    found = differences({"a": 10.0, "b": 0.0, "c": None, "d": 4.0}, {"a": 11.0, "b": 1.0, "c": 1.0})
    assert found == {"a": pytest.approx(0.1), "b": None}


def test_the_report_of_aiperf_is_parsed(tmp_path) -> None:
    """Its figures get Draftgate's names; missing figures are None, missing counts 0."""
    said = {"request_count": {"avg": 3.0}, "request_latency": {"avg": 5.0, "p50": 4.0, "p99": 9.0}}
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(said))
    read = read_aiperf(tmp_path)
    assert (read["ok"], read["failed"], read["latency_p99_ms"]) == (3.0, 0, 9.0)
    assert (read["latency_mean_ms"], read["ttft_p50_ms"], read["goodput_rps"]) == (5.0, None, None)


def test_agreement_needs_both_figures() -> None:
    """A missing figure is an error."""
    one = {key: 100.0 for pair in PAIRS.values() for key in pair}
    assert differ(one, one | {"ttft_p50_ms": 101.0})["ttft"] == pytest.approx(0.01)
    with pytest.raises(RuntimeError, match="no ttft"):
        differ(one | {"ttft_p50_ms": None}, one)


def test_the_table_has_the_truth_first_and_no_failed_tool() -> None:
    """Each case has a table with the truth and a row for each tool that answered."""
    told = truth([answered(0.0)], 1)
    rows = [
        {"case": "plain", "tool": "one", "said": told, "truth": told},
        {"case": "plain", "tool": "two", "failed": "it did"},
    ]
    lines = table(rows).splitlines()
    assert [line.split(" | ")[0] for line in lines[-2:]] == ["| *truth (one)*", "| one"]
    assert "1 of 1" in lines[-1]
