"""Tests of the simulated studies: their searches, and equal requests for all policies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from typer.testing import CliRunner

from bench.gateway import tracing
from bench.simulation import gaps, policies
from bench.simulation.capacity import LATEST_S, Point, Setting, capacity, slo_seconds
from bench.simulation.search import (
    HIGHEST,
    LOWEST,
    STEP,
    grid_rate,
    highest_place,
    nearest_place,
)
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli import app
from draftgate.gateway.cli.simulate.drawn import Drawn
from draftgate.gateway.cli.simulate.experiment import Outcome
from draftgate.loadgen.planning.traces import TraceRow, read_trace
from draftgate.loadgen.types import Slo

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
ROWS = tuple(TraceRow(0.0, 20 * (n % 50) + 1, n % 7 + 2) for n in range(100))
H100 = WorkerConfig(profile="h100-8b", proposer="ngram", max_model_len=32_768, max_num_seqs=256)


@given(st.integers(LOWEST, HIGHEST), st.integers(LOWEST, HIGHEST))
def test_the_search_finds_the_last_index_that_holds(last: int, near: int) -> None:
    """The search finds the last index that holds from any start, and tests no index twice."""
    tested: list[int] = []

    def holds(place: int) -> bool:
        tested.append(place)
        return place <= last

    assert highest_place(holds, near) == last
    assert len(tested) == len(set(tested)) <= 22


def test_a_search_without_a_result_returns_none() -> None:
    """The search returns None instead of the lowest rate if no rate holds."""
    assert highest_place(lambda _place: False, 0) is None
    assert nearest_place(grid_rate(37)) == 37


@dataclass(frozen=True)
class ServerModel:
    """A server whose gaps take 1 ms per request/s, and whose queue grows from 40 requests/s on."""

    slo_s: float

    def point(self, rate_rps: float) -> Point:
        queue_s = 3.0 if rate_rps > 40.0 else 0.1
        return Point(rate_rps, 1e-4, rate_rps * 1e-3, 1.0, queue_s, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(("slo_s", "limit_rps"), [(0.025, 25.0), (0.1, 40.0)])
def test_capacity_is_where_gaps_or_queues_reach_their_limit(slo_s, limit_rps) -> None:
    """The capacity is the last grid rate below the known limit of gaps or queue."""
    found, place = capacity(ServerModel(slo_s), near=0)
    assert found.within.rate_rps <= limit_rps < found.within.rate_rps * STEP
    assert found.beyond.rate_rps > limit_rps
    assert grid_rate(place) == found.within.rate_rps
    assert found.beyond.gap_p99_s > slo_s or found.beyond.queue_p50_s > LATEST_S


def test_rates_get_the_same_requests_in_the_same_order() -> None:
    """All rates have the same unique requests in the same order, and only arrivals scale."""
    drawn = Drawn.of(ROWS, 80, seed=3)
    slow, fast = (drawn.planned(rate_rps, Slo(tpot_s=0.1)) for rate_rps in (1.0, 4.0))
    for one, other in zip(slow, fast, strict=True):
        assert one.request == other.request
        assert one.at_s == pytest.approx(4.0 * other.at_s)
    prompts = [drawn.job(one).prompts[0] for one in slow]
    assert [len(prompt) for prompt in prompts] == [max(r.prompt_tokens, 4) for r in drawn.rows]
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 80
    assert Drawn.of(ROWS, 80, seed=4).rows != drawn.rows
    assert sorted(Drawn.of(ROWS, 200, 0).rows, key=str) == sorted(ROWS * 2, key=str)


def test_slos_are_multiples_of_a_decode_step() -> None:
    """The SLOs are 5 and 25 times the step of 32 decodes after 4,096 tokens on h100-8b."""
    slos = slo_seconds(load_profile("h100-8b"))
    step_s = 0.007768 + 131_072 * 3.93e-8
    assert slos == {"strict": pytest.approx(5 * step_s), "relaxed": pytest.approx(25 * step_s)}


def test_slack_meets_the_slo_where_prefill_first_misses_it() -> None:
    """The P99 of gaps meets the strict SLO under `slack` but not under `prefill_first`.

    The simulation has noise, and its cost estimates are 30% off.
    """
    drawn = Drawn.of(tuple(TraceRow(0.0, 3000, 60) for _ in range(10)), 80, seed=0)
    slo_s = slo_seconds(load_profile("h100-8b"))["strict"]
    held = {}
    for batching in ("slack", "prefill_first"):
        config = WorkerConfig(**shared_settings(H100), batching=batching, max_step_tokens=8192)
        held[batching] = Setting(drawn, config, slo_s).point(6.0).holds(slo_s)
    assert held == {"slack": True, "prefill_first": False}


def shared_settings(config: WorkerConfig) -> dict:
    """The settings that all tests share."""
    names = ("profile", "proposer", "max_model_len", "max_num_seqs")
    return {name: getattr(config, name) for name in names}


@pytest.mark.long
def test_the_capacity_command_is_reproducible(tmp_path) -> None:
    """Two runs of `draftgate bench capacity` write the same row for each combination."""
    trace = tmp_path / "lengths.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n" + "2000,20\n1500,15\n" * 20)
    reports = []
    for name in ("one.json", "two.json"):
        out, html = tmp_path / name, tmp_path / "page.html"
        flags = ["--trace", str(trace), "--requests", "100", "--slo", "strict", "--near", "25"]
        flags += ["--batching", "slack,fixed:256", "--speculation", "off"]
        flags += ["--json", str(out), "--html", str(html)]
        done = CliRunner().invoke(app, ["bench", "capacity", *flags])
        assert done.exit_code == 0, done.output
        reports.append(json.loads(out.read_text()))
    assert reports[0]["capacities"] == reports[1]["capacities"]
    found = [(row["slo"], row["speculation"], row["batching"]) for row in reports[0]["capacities"]]
    assert found == [("strict", "off", "slack"), ("strict", "off", "fixed:256")]
    assert all(row["capacity_rps"] > 5.0 for row in reports[0]["capacities"])
    assert reports[0]["device"] == "simulated"
    assert "lengths.csv" in reports[0]["command"]
    assert str(tmp_path) not in reports[0]["command"]
    assert "<h1>" in html.read_text()


def test_long_prompts_stall_decodes_under_prefill_first_only(tmp_path) -> None:
    """The longest gap meets the SLO under `slack`, and is a whole prefill under `prefill_first`."""
    out, html = tmp_path / "gaps.json", tmp_path / "gaps.html"
    done = CliRunner().invoke(app, ["bench", "gaps", "--json", str(out), "--html", str(html)])
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    longest_s = {row["batching"]: row["longest_gap_s"] for row in report["results"]}
    assert (
        longest_s["slack"]
        < 1.05 * report["slo_s"]
        < 3 * report["slo_s"]
        < longest_s["prefill_first"]
    )
    assert all(points[-1][0] > gaps.TO_S - 0.1 for points in report["gaps"].values())
    firsts_s = {row["batching"]: sum(row["prompt_ttft_s"]) for row in report["results"]}
    assert firsts_s["slack"] < firsts_s["fixed:512"]
    assert "Gaps between tokens" in html.read_text()


@pytest.mark.skipif(not DATA.is_dir(), reason="the public traces are not available")
def test_sarathi_lengths_equal_those_of_the_paper() -> None:
    """The ShareGPT trace of Sarathi-Serve has medians of 1,730 prompt and 415 output tokens."""
    rows = read_trace(DATA / "sarathi_serve" / "sharegpt_8k_filtered_stats_llama2_tokenizer.csv")
    middle = len(rows) // 2
    assert len(rows) == 30_731
    assert sorted(row.prompt_tokens for row in rows)[middle] == 1730
    assert sorted(row.output_tokens for row in rows)[middle] == 415


def outcome(policy: str, latencies_s: list[float]) -> Outcome:
    return Outcome(policy, samples={"latency_s.mean": list(latencies_s)})


def test_auto_is_compared_with_the_best_fixed_length() -> None:
    """The study pairs differences by seed.

    A mean difference within 2%, or an uncertain difference, counts as equal.
    """
    others = {name: outcome(name, [5.0, 6.0, 7.0]) for name in policies.POLICIES}
    others |= {"fixed:2": outcome("fixed:2", [4.0, 5.0, 6.0]), "off": outcome("off", [8, 9, 10])}
    others |= {"oracle": outcome("oracle", [3.0, 4.0, 5.0])}
    close = policies.findings(others | {"auto": outcome("auto", [4.09, 5.09, 6.09])})
    assert (close["best_fixed"], close["at_envelope"], close["at_off"]) == ("fixed:2", True, True)
    assert close["to_envelope"]["relative"] == pytest.approx(0.018)
    assert close["share_of_oracle"] == pytest.approx(3.91 / 5)
    worse = policies.findings(others | {"auto": outcome("auto", [4.11, 5.11, 6.12])})
    assert not worse["at_envelope"]
    unsure = policies.findings(others | {"auto": outcome("auto", [3.0, 5.5, 7.5])})
    assert unsure["at_envelope"]


@pytest.mark.long
def test_the_policies_command_reports_every_policy_at_every_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The JSON file and the page have all policies for each workload and rate."""
    monkeypatch.setattr(policies, "SHARES", (0.3, 1.2))
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    words = ["--workloads", "code", "--requests", "0.02", "--seeds", "2"]
    policies.main([*words, "--json", str(out), "--html", str(page)])
    cells = json.loads(out.read_bytes())["cells"]
    assert [(cell["workload"], cell["share"]) for cell in cells] == [("code", 0.3), ("code", 1.2)]
    assert cells[1]["rate_rps"] == pytest.approx(4 * cells[0]["rate_rps"])
    named = {"threshold_by_batch:batch_tiers.json", "oracle", "auto", "off", "fixed:8"}
    assert all(named <= cell["policies"].keys() for cell in cells)
    assert str(tmp_path) not in out.read_text()
    assert "Mean latency: code" in page.read_text()


def test_tracing_costs_are_differences_within_a_round() -> None:
    """The study pairs differences by round, so a slow round does not affect a single mode."""
    cost_s = {"off": (1e-3, 2e-3), "unsampled": (1.1e-3, 2.1e-3), "on": (1.5e-3, 2.564e-3)}
    rows = [
        {"mode": mode, "round": number, "chunks": chunks, "cpu_s": cpu_s * (1 + number)}
        for number in range(2)
        for mode, both in cost_s.items()
        for chunks, cpu_s in zip((tracing.SHORT, tracing.LONG), both, strict=True)
    ]
    off, unsampled, on = tracing.summary(rows)
    assert (off["added_request_us"], off["added_chunk_us"]) == (0, 0)
    assert unsampled["added_request_us"] == pytest.approx(150)
    assert unsampled["added_chunk_us"] == pytest.approx(0)
    assert on["added_chunk_us"] == pytest.approx(1.5)
    assert on["request_us"] == pytest.approx(2250)


@pytest.mark.long
def test_the_tracing_study_runs(tmp_path: Path) -> None:
    """Every round measures every mode, and the result has its provenance."""
    out = tmp_path / "out.json"
    arguments = ["--rounds", "1", "--requests", "32", "--profile", "cpu-demo", "--json", str(out)]
    done = CliRunner().invoke(app, ["bench", "tracing", *arguments])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert [row["mode"] for row in found["summary"]] == list(tracing.MODES)
    assert len(found["rounds"]) == 2 * len(tracing.MODES)
    assert found["observe_us"] > 0
