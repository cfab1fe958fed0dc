"""Tests of the routing studies: herds of gateways, and recorded traffic over many workers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from typer.testing import CliRunner

from bench.simulation.herd_model import Ages, Backlog, Bursts, imbalances
from bench.simulation.routing import CLUSTERS, POLICIES, Study
from draftgate.backends.sim.profile import load_profile, slowed
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli import app
from draftgate.gateway.cli.simulate.trace_load import Recorded
from draftgate.loadgen.planning.traces import TraceRow
from draftgate.loadgen.types import Slo

SMALL = Bursts(bursts=2)
ONE = Bursts(bursts=1)


def mean_backlog(
    policy: str, age_s: float, bursts: Bursts = SMALL, *, leased: bool = False
) -> float:
    """The mean of max / mean backlogs at the ends of a few bursts."""
    return fmean(one.backlog for one in imbalances(bursts, policy, Ages(age_s), 0, leased=leased))


def test_a_backlog_is_known_at_any_past_time() -> None:
    """The model reports the backlog and the arrived tokens at any past time."""
    backlog = Backlog(100.0)
    backlog.add(1.0, 300)
    backlog.add(2.0, 50)
    assert [backlog.at(at_s) for at_s in (0.5, 1.0, 1.5, 2.0, 4.0, 9.0)] == [
        0,
        300,
        250,
        250,
        50,
        0,
    ]
    assert [backlog.arrived_until(at_s) for at_s in (-1.0, 0.5, 1.0, 1.9, 2.0)] == [
        0,
        0,
        300,
        300,
        350,
    ]


def test_a_herd_is_reproducible_by_seed() -> None:
    """The study repeats all metrics for one seed, and they differ for another seed."""
    few = Bursts(bursts=2, requests=160)
    first, again, other = (
        list(imbalances(few, "least_cost", Ages(0.5), seed, leased=False)) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_stale_loads_make_least_loaded_herd_but_not_least_cost() -> None:
    """`least_loaded` is the worst policy for loads one second old, and `least_cost` is the best."""
    found = {
        policy: mean_backlog(policy, 1.0)
        for policy in ("least_loaded", "power_of_two", "round_robin", "least_cost")
    }
    assert found["least_loaded"] > 1.5 * found["least_cost"]
    assert min(found, key=found.__getitem__) == "least_cost"


def test_leases_make_stale_loads_harmless() -> None:
    """The age of reports causes no imbalance if reservations include all leases."""
    for age_s in (0.1, 1.0):
        assert mean_backlog("least_cost", age_s, ONE, leased=True) < 1.2
        assert mean_backlog("least_loaded", age_s, ONE, leased=True) < 1.2


def test_staggered_ages_range_from_zero_to_twice_the_mean() -> None:
    """Staggered ages vary with each worker's reports, and equal ages are constant."""
    ages = Ages(0.5, staggered=True)
    found = [ages.at(10.0, number) for number in range(16)]
    assert all(0.0 <= age_s < 1.0 for age_s in found)
    assert fmean(found) == pytest.approx(0.5, abs=0.06)
    assert len(set(found)) == 16
    assert ages.at(10.3, 0) - ages.at(10.1, 0) == pytest.approx(0.2)
    assert Ages(0.5).at(10.0, 3) == 0.5


def test_work_done_since_a_report_is_subtracted() -> None:
    """`least_cost` has the shortest waits, because it subtracts the work since the report."""
    light = replace(ONE, utilisation=0.2)
    ours, others = (
        fmean(one.wait_s for one in imbalances(light, policy, ages, 0, leased=True))
        for ages in (Ages(0.5, staggered=True),)
        for policy in ("least_cost", "least_loaded")
    )
    assert ours < 0.5 * others


def test_the_herd_command_reports_every_policy_at_every_age(tmp_path: Path) -> None:
    """The command writes a page, and JSON with intervals and the best other policy."""
    out, html = tmp_path / "herd.json", tmp_path / "herd.html"
    flags = ["--bursts", "2", "--seeds", "2", "--gateways", "4", "--workers", "4"]
    flags += ["--requests", "40"]
    files = ["--json", str(out), "--html", str(html)]
    flags += ["--ages-ms", "100,500", "--staggered-ms", "500"]
    result = CliRunner().invoke(app, ["bench", "herd", *flags, *files])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert [(row["age_s"], row["staggered"], row["leases"]) for row in report["rows"]] == [
        (*ages, leased)
        for leased in (False, True)
        for ages in ((0.1, False), (0.5, False), (0.5, True))
    ]
    for row in report["rows"]:
        assert row["best_other"] in row["policies"]
        assert {"round_robin", "power_of_two", "least_cost"} <= set(row["policies"])
        for figures in row["policies"].values():
            assert figures["backlog"]["mean"] >= 1.0
            assert figures["placed"]["samples"] == 4
    assert "without leases" in html.read_text()


ROWS = tuple(TraceRow(n * 0.1, 700 + 16 * (n % 5), 20, (n % 6, 100 + n), 512) for n in range(120))


def test_recorded_prompts_share_the_prefixes_of_the_trace() -> None:
    """Prompts have the lengths of the trace, and equal blocks have equal token ids."""
    recorded = Recorded.of(ROWS, 20, 4096)
    jobs = [recorded.job(one) for one in recorded.planned(10.0, Slo(), 0)]
    prompts = [job.prompts[0].tolist() for job in jobs]
    assert [len(one) for one in prompts] == [row.prompt_tokens for row in ROWS[:20]]
    assert prompts[0][:512] == prompts[6][:512]
    assert prompts[0][512:528] != prompts[6][512:528]
    assert prompts[0][:16] != prompts[1][:16]
    with pytest.raises(ValueError, match="121 requests are needed, but only 120"):
        Recorded.of(ROWS, 121, 4096)
    assert len(Recorded.of(ROWS, 24, 720).rows) == 24  # These rows fit.


def test_a_slower_device_scales_all_times() -> None:
    """The factor scales every term of a step and of drafting."""
    profile = load_profile("h100-8b")
    slow = slowed(profile, 2.0)
    for size in ((1, 100, 1, 0), (300, 9000, 30, 40), (4000, 4000, 2, 0)):
        assert slow.cost.seconds(*size) == pytest.approx(2 * profile.cost.seconds(*size))
    for name, cost in profile.draft.items():
        assert slow.draft[name].depth_s(7) == pytest.approx(2 * cost.depth_s(7))
        assert slow.draft[name].call_s == 2 * cost.call_s


@pytest.mark.long
def test_policies_of_a_cluster_get_the_same_requests() -> None:
    """Prefix-aware policies find shared prefixes, and cost-aware policies spare slow workers.

    A second run gives the same result.
    """
    config = WorkerConfig(
        profile="h100-8b", proposer="ngram", max_num_seqs=64, max_model_len=4096, kv_bytes=10**9
    )
    study = Study(Recorded.of(ROWS, 120, 4096), 30, config, Slo(2.0, 0.05), 0)
    equal, mixed = (study.cell(4, mix, 0.3) for mix in ("equal", "mixed"))
    assert set(equal["policies"]) == set(POLICIES)
    cached = {policy: summary["cached"] for policy, summary in equal["policies"].items()}
    assert cached["least_cost"] > cached["round_robin"]
    assert cached["prefix_affinity"] > cached["round_robin"]
    latency = {policy: summary["latency_mean_s"] for policy, summary in mixed["policies"].items()}
    assert latency["least_cost"] < latency["round_robin"]
    assert study.cell(4, "equal", 0.3) == equal


@pytest.mark.long
def test_a_mixed_cluster_has_workers_of_every_kind() -> None:
    """An H200 sustains more than an H100, and a cluster's rate is the sum over its workers."""
    config = WorkerConfig(proposer="ngram", max_model_len=4096)
    study = Study(Recorded.of(ROWS, 120, 4096), 20, config, Slo(2.0, 0.05), 0, windows=2)
    fast, usual, _, slow = sustained = [study.sustained_rps(kind) for kind in CLUSTERS["mixed"]]
    assert fast > usual > slow
    cell = study.cell(3, "mixed", 0.5)
    assert cell["rate_rps"] == pytest.approx(0.5 * sum(sustained[:3]))
    summary = cell["policies"]["least_cost"]
    assert len(summary["windows"]) == 2
    assert summary["ttft_p50_s"] == pytest.approx(
        fmean(one["ttft_p50_s"] for one in summary["windows"])
    )


@pytest.mark.long
def test_the_routing_command_writes_a_row_for_each_policy(tmp_path: Path) -> None:
    """The JSON file and the page cover every requested cluster and share."""
    trace, out, html = (tmp_path / name for name in ("t.jsonl", "o.json", "o.html"))
    rows = [{"at_s": n / 5, "prompt_tokens": 40, "output_tokens": 20} for n in range(12)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    flags = ["--trace", str(trace), "--workers", "2,3", "--requests", "4", "--clusters", "equal"]
    files = ["--shares", "0.5,0.8", "--json", str(out), "--html", str(html)]
    result = CliRunner().invoke(app, ["bench", "routing", *flags, *files])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert [(cell["workers"], cell["share"]) for cell in report["cells"]] == [
        *((2, 0.5), (2, 0.8), (3, 0.5), (3, 0.8)),
    ]
    for cell in report["cells"]:
        assert list(cell["policies"]) == list(POLICIES)
        assert set(cell["to_ours"]) == set(POLICIES) - {"least_cost"}
    assert report["settings"]["trace"] == "t.jsonl"
    assert "P99 TTFT" in html.read_text()
