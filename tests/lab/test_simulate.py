"""Tests of `draftgate simulate`: reproducible results, equal requests and clear errors."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

import pytest
from msgspec import structs
from rich.console import Console
from typer.testing import CliRunner

from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli import app
from draftgate.lab.sim.environment import simulation_policy
from draftgate.lab.sim.recording import load_recording, recording_names
from draftgate.lab.simulate import cluster
from draftgate.lab.simulate.conversion import COUNTER, token_ids
from draftgate.lab.simulate.experiment import ExperimentOutcome, Results, Setup, run_experiment
from draftgate.lab.simulate.intervals import batch_means, estimate
from draftgate.lab.simulate.report import as_json, render_outcomes, simulation_page
from draftgate.loadgen.measuring.metrics import METRICS, ttft_s, values_of
from draftgate.loadgen.planning.corpus import open_corpus
from draftgate.loadgen.planning.plan import Load
from draftgate.loadgen.types import Slo
from draftgate.loadgen.workloads import WORKLOADS, make_workload
from draftgate.loadgen.workloads.base import WorkloadSettings
from draftgate.policies.registry import speculation_policy

CONTRACT = {"requests", "valid", "goodput_rps", "attainment", "errors", "accepted_tokens_per_s"}
CONTRACT |= {"ttft_s", "tpot_s", "latency_s"}


@pytest.fixture(scope="module")
def text_file(tmp_path_factory) -> Path:
    """A small text file, because reading Python's own sources takes seconds."""
    path = tmp_path_factory.mktemp("text") / "text.py"
    lines = [f"def f_{n}(value, other):\n    return value * {n} + other\n\n" for n in range(3000)]
    path.write_text("".join(lines))
    return path


def small_setup(text_file: Path, **changes) -> Setup:
    """Return a small setup. Fields of the load change the load, and other fields the setup."""
    of_load = {
        name: changes.pop(name)
        for name in ("workload", "rate_rps", "requests", "seed", "temperature")
        if name in changes
    }
    given = {"workload": "mixed", "rate_rps": 20.0, "requests": 60, "slo": Slo(1.0, 0.02)}
    load = Load(**given | of_load, text_file=text_file)
    config = WorkerConfig(profile="h100-8b", max_num_seqs=64, max_model_len=16_384)
    defaults = {"policies": ("off", "fixed:4"), "workers": 2}
    return Setup(load, config, **defaults | changes)


def test_same_seed_gives_the_same_json(text_file) -> None:
    """The same seed gives the same JSON for all policies, and another seed gives different JSON."""
    setup = small_setup(text_file, policies=("off", "fixed:4", "auto", "oracle"), requests=20)
    first, again = (json.dumps(as_json(setup, run_experiment(setup))) for _ in range(2))
    assert first == again
    second_setup = small_setup(text_file, policies=setup.policies, requests=20, seed=1)
    assert json.dumps(as_json(second_setup, run_experiment(second_setup))) != first


def test_skipping_time_changes_no_result(text_file, monkeypatch) -> None:
    """Workers get the same results if each of their steps waits for a timer of the event loop."""
    policies = ("off", "auto")
    setups = [
        small_setup(text_file, policies=policies, requests=30, rate_rps=4.0),
        small_setup(text_file, policies=policies, requests=30, rescheduling="llumnix"),
    ]
    skipping = [json.dumps(as_json(setup, run_experiment(setup))) for setup in setups]
    monkeypatch.setattr(cluster, "skip_time", lambda _seconds: False)
    assert [json.dumps(as_json(setup, run_experiment(setup))) for setup in setups] == skipping


@pytest.fixture(scope="module")
def small_run(text_file) -> tuple[Setup, Results]:
    """The small setup and its results."""
    setup = small_setup(text_file)
    return setup, run_experiment(setup)


def test_policies_serve_the_same_requests(small_run) -> None:
    """Two policies serve the same requests at the same arrival times and differ only in
    latencies."""
    _, results = small_run
    off, fixed = results.outcomes
    for first, second in zip(off.run.records, fixed.run.records, strict=True):
        assert first.planned == second.planned
        assert first.scheduled_s == second.scheduled_s
        for count in ("prompt_tokens", "completion_tokens"):
            assert first.usage[count] == second.usage[count]
    ends = [[r.end_s for r in outcome.run.records] for outcome in (off, fixed)]
    assert ends[0] != ends[1]


def test_json_has_summaries_intervals_and_settings(small_run) -> None:
    """The JSON contains a summary per policy, paired differences and all settings of the run."""
    result = as_json(*small_run)
    for summary in result["policies"].values():
        assert set(summary) >= CONTRACT
        assert summary["requests"] == 60
        assert summary["valid"] is True
        assert set(summary["ttft_s"]) == {"mean", "p50", "p90", "p99"}
        low, high = summary["intervals"]["latency_s.mean"]["interval"]
        assert low < summary["latency_s"]["mean"] < high
    assert set(result["differences"]) == {"fixed:4"}
    assert result["differences"]["fixed:4"]["to"] == "off"
    assert result["settings"]["seeds"] == [0]
    assert "SpecDecode-Bench" in result["profile"]


def test_paired_differences_have_narrower_intervals(text_file) -> None:
    """A paired difference has a narrower interval than the means, because policies share random
    numbers."""
    setup = small_setup(text_file, workload="chat", rate_rps=4.0, requests=120)
    result = as_json(setup, run_experiment(setup))
    metric_name = "latency_s.mean"

    def width(interval: dict) -> float:
        low, high = interval["interval"]
        return high - low

    difference = result["differences"]["fixed:4"][metric_name]
    of_means = [width(result["policies"][p]["intervals"][metric_name]) for p in ("off", "fixed:4")]
    assert width(difference) < min(of_means)
    assert difference["mean"] < 0  # drafts save time at low load
    assert difference["interval"][1] < 0


def test_repeat_averages_seeds_and_gives_intervals(text_file) -> None:
    """A repeated experiment averages every metric over the seeds and includes their summaries."""
    setup = small_setup(text_file, repeat=3, requests=30)
    result = as_json(setup, run_experiment(setup))
    summary = result["policies"]["off"]
    assert summary["requests"] == 90
    assert len(summary["runs"]) == 3
    p99s = [run["latency_s"]["p99"] for run in summary["runs"]]
    assert summary["latency_s"]["p99"] == pytest.approx(sum(p99s) / 3)
    assert summary["intervals"]["latency_s.p99"]["samples"] == 3
    assert result["settings"]["seeds"] == [0, 1, 2]


def test_oracle_accepts_all_its_drafts_and_is_fastest(text_file) -> None:
    """The oracle accepts all its drafts and has the lowest mean latency at low load."""
    policies = ("oracle", "off", "fixed:4", "auto")
    # The oracle predicts tokens, not step times, so the believed times must be exact.
    setup = small_setup(text_file, policies=policies, rate_rps=4.0, belief_error=0.0)
    result = as_json(setup, run_experiment(setup))["policies"]
    decided = result["oracle"]["details"]["decisions"]
    assert decided["acceptance"] == 1.0
    assert decided["num_accepted_tokens"] > 100
    means = {policy: result[policy]["latency_s"]["mean"] for policy in policies}
    assert min(means, key=means.get) == "oracle"


def test_oracle_accepts_all_computed_drafts(text_file) -> None:
    """The oracle accepts all slots of drafts that a model computes after the decision."""
    setup = small_setup(text_file, policies=("oracle",), rate_rps=4.0, requests=20)
    config = WorkerConfig(profile="h100-8b", proposer="draft_model", max_model_len=16_384)
    setup = Setup(setup.load, config, setup.policies)
    result = as_json(setup, run_experiment(setup))["policies"]["oracle"]
    decisions = result["details"]["decisions"]
    assert decisions["acceptance"] == 1.0
    assert decisions["num_accepted_tokens"] > 100


def test_knowledge_of_everything_is_faster_than_auto_and_the_oracle(text_file) -> None:
    """Each kind of knowledge lets `auto` serve a saturated worker at least as fast.

    With all of them it is faster than the oracle, which pays for lookups that find nothing.
    """
    everything = "auto+acceptance+cost+drafts"
    names = ("auto", "auto+cost", "auto+drafts", "auto+acceptance", everything, "oracle")
    setup = small_setup(
        text_file, workload="chat", policies=names, rate_rps=40.0, requests=150, workers=1
    )
    result = as_json(setup, run_experiment(setup))["policies"]
    means = {policy: result[policy]["latency_s"]["mean"] for policy in names}
    assert max(means, key=means.get) == "auto"
    assert min(means, key=means.get) == everything
    accepted = {name: result[name]["details"]["decisions"]["acceptance"] for name in names}
    assert accepted["auto+acceptance"] == accepted[everything] == 1.0
    assert accepted["auto+drafts"] < 1.0


def test_unknown_knowledge_is_refused() -> None:
    """The error names the unknown kind and the known kinds."""
    with pytest.raises(ValueError, match=r"'auto\+luck'.*rates.*not 'luck'"):
        simulation_policy("auto+luck")


def test_unknown_policy_is_refused_with_all_names_of_simulations() -> None:
    """The error of a simulation names the policies that servers lack, and theirs does not."""
    for build, known in ((simulation_policy, True), (speculation_policy, False)):
        with pytest.raises(ValueError, match="unknown speculation policy 'luck'") as raised:
            build("luck")
        assert all((name in str(raised.value)) is known for name in ("oracle", "auto+KIND"))


@pytest.mark.parametrize("policy", ["off", "oracle"])
def test_batching_policy_changes_gaps_and_ttft(policy, text_file) -> None:
    """Small prompt chunks shorten the gaps between tokens and delay the first token."""
    longest_s, first_s = {}, {}
    for batching in ("fixed:64", "prefill_first"):
        setup = small_setup(
            text_file, workload="rag", rate_rps=6.0, requests=30, policies=(policy,)
        )
        setup = replace(setup, workers=1, config=structs.replace(setup.config, batching=batching))
        results = run_experiment(setup)
        result = as_json(setup, results)
        assert result["settings"]["batching"] == batching
        gaps = values_of(METRICS["chunk_gap_s"], results.outcomes[0].run.records)
        longest_s[batching] = sorted(gaps)[-len(gaps) // 50]
        first_s[batching] = result["policies"][policy]["ttft_s"]["p50"]
    assert longest_s["fixed:64"] < longest_s["prefill_first"]
    assert first_s["fixed:64"] > first_s["prefill_first"]


def test_records_have_the_scheduling_delay(text_file) -> None:
    """The scheduling delay of each record precedes the first token and grows with the load."""
    medians = []
    for rate_rps in (2.0, 200.0):
        setup = small_setup(
            text_file, workload="rag", rate_rps=rate_rps, policies=("off",), workers=1
        )
        records = run_experiment(setup).outcomes[0].run.records
        for record in records:
            assert 0.0 <= record.metrics["queue_s"] < ttft_s(record)
        medians.append(median(record.metrics["queue_s"] for record in records))
    assert medians[0] < 0.05 < medians[1]


def test_moves_are_reported_by_reason_and_end(text_file) -> None:
    """Rescheduling moves requests, which end with their lengths, and the JSON, the table and the
    page contain the numbers of moves by reason and end."""
    setup = small_setup(text_file, workload="chat", policies=("auto",), rescheduling="least_time")
    results = run_experiment(setup)
    (outcome,) = results.outcomes
    moved = outcome.moves["faster moved"]
    assert moved > 0
    for record in outcome.run.records:
        assert record.usage["completion_tokens"] == record.planned.request.max_tokens
    written = as_json(setup, results)
    assert written["policies"]["auto"]["moves"]["faster moved"] == moved
    assert written["settings"]["rescheduling"] == "least_time"
    console = Console(width=80, file=io.StringIO())
    console.print(render_outcomes(results))
    for text in (console.file.getvalue(), simulation_page(setup, results)):
        assert f"{moved} faster moved" in text


def test_rescheduling_changes_nothing_for_one_worker(text_file) -> None:
    """A pool of one worker has the same results with and without rescheduling."""
    found = []
    for rescheduling in ("off", "llumnix", "least_time"):
        setup = small_setup(text_file, workers=1, requests=20, rescheduling=rescheduling)
        found.append(as_json(setup, run_experiment(setup))["policies"])
    assert found[0] == found[1] == found[2]


def test_early_binding_queues_beside_a_free_worker(text_file) -> None:
    """With early binding, requests of a burst wait longer, because they queue for one worker while
    another worker is free."""
    means = {}
    for binding in ("early", "late"):
        setup = small_setup(text_file, policies=("off",), binding=binding, routing="round_robin")
        config = structs.replace(setup.config, max_num_seqs=1)
        result = as_json(setup, run_experiment(replace(setup, config=config)))
        means[binding] = result["policies"]["off"]["ttft_s"]["mean"]
        assert result["settings"]["binding"] == binding
    assert means["early"] > 1.1 * means["late"]


def test_too_long_requests_are_rejected_and_counted(text_file) -> None:
    """A request beyond the KV pool counts as an error, and other requests continue."""
    setup = small_setup(text_file, workload="code", requests=20)
    # The KV pool holds 512 tokens, so longer requests can never run.
    small = WorkerConfig(profile="h100-8b", kv_bytes=512 * 131072)
    setup = Setup(setup.load, small, ("off",), workers=1)
    summary = as_json(setup, run_experiment(setup))["policies"]["off"]
    assert 0 < summary["errors"]["http_status"] < 20
    assert summary["attainment"] < 1.0


def test_prompts_keep_lengths_and_shared_beginnings() -> None:
    """The number of ids equals the counted tokens, and texts with a common beginning share ids."""
    text = "class Point:\n    def __init__(self, x, y):\n" * 9
    ids = token_ids(text)
    assert len(ids) == COUNTER.count(text)
    assert token_ids(text + "and more")[: len(ids) - 1] == ids[:-1]
    assert token_ids("x" + text)[:16] != ids[:16]
    assert len(token_ids("")) == 1


def test_shared_prefixes_hit_the_cache(text_file) -> None:
    """The cache serves over 30% of the prompt tokens of the shared-prefix workload, but not of
    code."""
    cached = {}
    for workload in ("shared_prefix", "code"):
        setup = small_setup(text_file, workload=workload, policies=("off",), workers=1, requests=40)
        records = run_experiment(setup).outcomes[0].run.records
        hits = sum(r.usage["prompt_tokens_details"]["cached_tokens"] for r in records)
        cached[workload] = hits / sum(r.usage["prompt_tokens"] for r in records)
    assert cached["shared_prefix"] > 0.3 > cached["code"]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_has_a_recorded_task(workload: str, text_file) -> None:
    """Every shipped recording names the texts of every class of a workload."""
    corpus = open_corpus(text_file)
    made = make_workload(workload, WorkloadSettings(0, corpus=corpus, max_model_len=8192))
    classes = {made.request(i).class_name for i in range(40)}
    for name in recording_names():
        assert classes <= load_recording(name).classes


def test_page_shows_policies_side_by_side(text_file) -> None:
    """The page is self-contained and shows a curve and a section for each policy."""
    setup = small_setup(text_file, requests=30)
    text = simulation_page(setup, run_experiment(setup))
    for policy in setup.policies:
        assert f"<h2>{policy}</h2>" in text
        assert text.count(f'"name": "{policy}"') >= 3
    assert "plotly" in text
    assert "all, from sending" not in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workload", "chat"], "needs requests per second (--rate)"),
        (
            ["--workload", "chat", "--rate", "1", "--routing", "nowhere"],
            "unknown routing policy 'nowhere'",
        ),
        (["--workload", "poetry", "--rate", "1"], "no workload 'poetry'"),
        (["--workload", "chat", "--rate", "1", "--speculation", "best"], "'best'"),
        (["--workload", "chat", "--rate", "1", "--speculation", "off,off"], "named twice"),
        (["--workload", "chat", "--rate", "1", "--batching", "fair"], "policy 'fair'"),
        (["--workload", "chat", "--rate", "1", "--profile", "abacus"], "no profile 'abacus'"),
        (["--workload", "chat", "--rate", "1", "--truth", "it"], "roofline, profile"),
        (["--workload", "chat", "--rate", "1", "--rescheduling", "daily"], "policy 'daily'"),
        (["--workload", "chat", "--rate", "1", "--binding", "soon"], "late or early"),
        (["--workload", "chat", "--rate", "1", "--phases", "never"], "policy 'never'"),
        (["--workload", "chat", "--rate", "1", "--roles", "decoder=1"], "not 'decoder=1'"),
        (["--workload", "chat", "--rate", "1", "--roles", "any=2", "--workers", "1"], "2 roles"),
        (["--trace", "/nonexistent.csv"], "nonexistent"),
        (["--arrival", "recorded"], "needs the file of a server: --recording FILE"),
        (["--arrival", "recorded", "--recording", "x", "--rate", "1"], "excludes --rate"),
        (["--arrival", "recorded", "--recording", "/none.json"], "no recording '/none.json'"),
    ],
)
def test_bad_flags_exit_with_one_line_and_status_2(flags, words) -> None:
    """The command rejects invalid flags with an explanation and exits with status 2."""
    result = CliRunner().invoke(app, ["simulate", *flags, "--requests", "3"])
    assert result.exit_code == 2
    assert words in result.output


def test_prompts_do_not_interrupt_outputs_on_a_decode_worker(tmp_path) -> None:
    """While prompts arrive, gaps between tokens are shorter if the phases are apart. `--roles`
    gives the number of workers, and the JSON has both settings and counts the long outputs that
    moved."""
    trace = tmp_path / "trace.jsonl"
    sizes = [(60, 400), (60, 400), *[(6000, 4)] * 6]
    rows = [
        {"at_s": n / 4, "prompt_tokens": prompt, "output_tokens": output}
        for n, (prompt, output) in enumerate(sizes)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    gaps_s = {}
    for phases in ("together", "apart"):
        out = tmp_path / f"{phases}.json"
        flags = ["--trace", str(trace), "--speculation", "off", "--json", str(out)]
        roles = ["--phases", phases, "--roles", "prefill=1,decode=1"]
        result = CliRunner().invoke(app, ["simulate", *flags, *roles])
        assert result.exit_code == 0, result.output
        written = json.loads(out.read_text())
        settings, policy = written["settings"], written["policies"]["off"]
        assert (settings["phases"], settings["workers"]) == (phases, 2)
        assert settings["roles"] == ["prefill", "decode"]
        gaps_s[phases] = policy["details"]["figures"]["chunk_gap_s"]["p99"]
        assert policy["moves"].get("phases moved", 0) == (2 if phases == "apart" else 0)
    assert gaps_s["apart"] < 0.5 * gaps_s["together"]


def test_command_writes_json_html_and_table(tmp_path) -> None:
    """The command writes both files and prints a table line for each policy."""
    trace = tmp_path / "trace.jsonl"
    rows = [{"at_s": n / 5, "prompt_tokens": 40, "output_tokens": 20} for n in range(12)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    out, html = tmp_path / "out.json", tmp_path / "out.html"
    flags = ["--trace", str(trace), "--speculation", "off,fixed:2", "--speculation", "auto"]
    files = ["--json", str(out), "--html", str(html)]
    result = CliRunner().invoke(app, ["simulate", *flags, *files])
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert list(written["policies"]) == ["off", "fixed:2", "auto"]
    assert written["policies"]["auto"]["requests"] == 12
    for policy in written["policies"]:
        assert policy in result.output
    assert "per CPU second" in result.output
    assert html.read_text().startswith("<!")


def test_rate_arrival_and_memory_of_a_simulated_trace(tmp_path) -> None:
    """A trace arrives as recorded or by another process at any rate. Little memory delays it."""
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp_s": n / 5, "input_tokens": 40, "output_tokens": 20} for n in range(12)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    latencies_s = {}
    for name, flags in {
        "recorded": ["--rate", "50", "--arrival", "recorded"],
        "constant": ["--rate", "50", "--arrival", "constant"],
        "full": ["--rate", "50", "--arrival", "constant", "--kv-tokens", "64"],
    }.items():
        out = tmp_path / f"{name}.json"
        given = ["--trace", str(trace), "--speculation", "off", "--json", str(out), *flags]
        result = CliRunner().invoke(app, ["simulate", *given])
        assert result.exit_code == 0, result.output
        policy = json.loads(out.read_text())["policies"]["off"]
        assert policy["requests"] == 12
        latencies_s[name] = policy["latency_s"]["mean"]
    assert latencies_s["recorded"] == pytest.approx(latencies_s["constant"], rel=0.05)
    assert latencies_s["full"] > 2.0 * latencies_s["constant"]  # one request after another


def test_progress_is_printed_without_a_terminal(tmp_path) -> None:
    """The command prints a line with the policy and the seed when each run starts."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"at_s": 0.0, "prompt_tokens": 40, "output_tokens": 20}))
    flags = ["--trace", str(trace), "--speculation", "off,auto", "--repeat", "2"]
    result = CliRunner().invoke(app, ["simulate", *flags])
    assert result.exit_code == 0, result.output
    for line in ("run 1 of 4: off, seed 0", "run 4 of 4: auto, seed 1"):
        assert line in result.output


def test_table_fits_80_columns() -> None:
    """The table shows complete headers and values at 80 columns and folds long policy names."""
    distribution = {"mean": 123.456, "p99": 234.567}
    summary = {"requests": 1, "valid": True, "errors": {}, "goodput_rps": 1.0, "attainment": 1.0}
    summary |= {"accepted_tokens_per_s": 123_456.0}
    summary |= dict.fromkeys(("latency_s", "ttft_s", "tpot_s"), distribution)
    samples = {"latency_s.mean": [123.0, 124.0, 129.0]}
    others = {"latency_s.mean": [223.0, 244.0, 229.0]}
    outcomes = [
        ExperimentOutcome("off", [summary], samples=samples),
        ExperimentOutcome("a_third_party_policy:with=many,long=options", [summary], samples=others),
    ]
    console = Console(width=80, file=io.StringIO())
    console.print(render_outcomes(Results(outcomes, 1, 1.0)))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "…" not in text
    for word in ("latency", "tokens", "TPOT", "SLO", "vs first", "123456", "234567", "±"):
        assert word in text


def test_intervals_have_their_nominal_coverage() -> None:
    """The 95% intervals contain the true mean in about 95% of 400 samples."""
    random = Random(0)
    covered = 0
    for _ in range(400):
        found = estimate([random.gauss(1.0, 2.0) for _ in range(10)])
        covered += abs(found.mean - 1.0) <= found.half
    assert 366 <= covered <= 393  # within about 3 standard deviations of 380


def test_batch_means_skip_missing_values() -> None:
    """A batch mean covers consecutive requests, and a batch without values has no mean."""
    assert batch_means([1.0, 3.0, None, 5.0, None, None], 3) == [2.0, 5.0, None]
    assert batch_means([], 3) == []
    assert estimate([]) is None
    assert estimate([1.0, 2.0]).half is None
