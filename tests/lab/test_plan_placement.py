"""Tests of `draftgate plan placement` with small simulations."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli import app
from draftgate.lab.plan import goodput, planner
from draftgate.lab.plan.goodput import PLACEMENT, Simulation, speculation_of
from draftgate.lab.plan.sources import Requests, TraceSource
from draftgate.lab.planning.best_deployment import DeploymentCandidate
from draftgate.lab.planning.deployments import Deployment, Group
from draftgate.loadgen.planning.traces import TraceRow
from draftgate.loadgen.search.types import SearchGoal
from draftgate.loadgen.types import Slo
from draftgate.policies.types import Role
from tests.loadgen.md1_server import capacity

SERVICE_S = 0.1
KV_TOKENS = 160
"""Memory for two requests of a test, so that a machine serves few requests per second."""

ONE_BY_ONE = WorkerConfig(max_num_seqs=1, max_step_tokens=64, speculation="off")


def write_profile(folder: Path, name: str, step_s: float, price: float | None) -> str:
    """Write a profile with steps of `step_s` up to 64 tokens, and thrice as long up to 2,048."""
    fields: dict[str, Any] = {
        "device": name,
        "model": "test",
        "dtype": "float16",
        "source": "a test",
        "token_buckets": [64, 2048],
        "step_s": [step_s, 3 * step_s],
        "kv_token_s": 0.0,
        "sequence_s": 0.0,
        "prefill_attention_s": 0.0,
        "kv_token_bytes": 1,
        "kv_bytes": KV_TOKENS,
        "format": "profile/2",
        "price_per_hour_usd": price,
        "power_w": 1000.0,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps({key: one for key, one in fields.items() if one is not None}))
    return str(path)


def _plan(folder: Path, *flags: str, question: str = "placement") -> Result:
    trace = folder / "trace.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n" + "50,5\n60,4\n" * 10)
    out = str(folder / "plan.json")
    common = ["--trace", str(trace), "--precision", "0.3", "--json", out]
    return CliRunner().invoke(app, ["plan", question, *common, *flags])


@pytest.mark.long
def test_measured_goodput_is_the_capacity_of_the_queue(tmp_path: Path) -> None:
    """The interval of a worker with one sequence and one step per request is that of M/D/1."""
    profile = write_profile(tmp_path, "one", SERVICE_S, None)
    source = TraceSource((TraceRow(0.0, 50, 1),), Slo(ttft_s=5 * SERVICE_S))
    candidate = DeploymentCandidate(Deployment((Group("one", Role.ANY, 1),)), 1.0 / SERVICE_S)
    goal = SearchGoal(1.0, 5 * SERVICE_S, share=0.9, precision=0.3)
    found = Simulation(source, {"one": profile}, PLACEMENT, config=ONE_BY_ONE).measure(
        candidate, goal
    )
    assert found.low_rps <= capacity(0.9, SERVICE_S, 5 * SERVICE_S) <= found.high_rps


def test_rate_that_cannot_be_reached_ends_the_search_without_an_estimate(tmp_path: Path) -> None:
    """A deployment is certainly worse than twice its capacity, which one probe shows."""
    profile = write_profile(tmp_path, "one", SERVICE_S, None)
    source = TraceSource((TraceRow(0.0, 50, 1),), Slo(ttft_s=5 * SERVICE_S))
    candidate = DeploymentCandidate(Deployment((Group("one", Role.ANY, 1),)), 1.0 / SERVICE_S)
    goal = SearchGoal(1.0, 5 * SERVICE_S, share=0.9)
    found = Simulation(source, {"one": profile}, PLACEMENT, config=ONE_BY_ONE).measure(
        candidate, goal, beat_rps=20.0
    )
    assert (found.rate_rps, found.high_rps) == (None, 20.0)


def test_search_without_a_bracket_has_no_estimate(tmp_path: Path) -> None:
    """Too few requests for a bound from above give a lower bound, and no estimate."""
    profile = write_profile(tmp_path, "one", SERVICE_S, None)
    source = TraceSource((TraceRow(0.0, 50, 1),), Slo(ttft_s=5 * SERVICE_S))
    candidate = DeploymentCandidate(Deployment((Group("one", Role.ANY, 1),)), 8.0)
    simulation = Simulation(source, {"one": profile}, PLACEMENT, config=ONE_BY_ONE)
    goal = SearchGoal(1.0, 5 * SERVICE_S, share=0.9, most_requests=300)
    found = simulation.measure(candidate, goal)
    assert found.rate_rps is None
    assert found.low_rps < capacity(0.9, SERVICE_S, 5 * SERVICE_S) < found.high_rps
    assert not found.converged


def test_all_rates_have_the_same_requests_and_two_seeds_decide(tmp_path: Path) -> None:
    """A rate only scales the gaps between requests, and a check simulates two seeds."""
    rows = tuple(TraceRow(0.0, 50 + n, 1 + n) for n in range(20))
    drawn = []

    class Counted(TraceSource):
        def requests(self, rate_rps: float, seed: int, count: int) -> Requests:
            found = super().requests(rate_rps, seed, count).kept()
            drawn.append((rate_rps, seed, [rate_rps * (one.at_s or 0.0) for one in found.planned]))
            return found

    source = Counted(rows, Slo(ttft_s=1.0))
    slow, fast = (source.requests(rate, 3, 50) for rate in (1.0, 7.0))
    assert slow.lengths()[7].prompt_tokens == fast.lengths()[7].prompt_tokens
    assert drawn[0][2] == pytest.approx(drawn[1][2])
    files = {"one": write_profile(tmp_path, "one", SERVICE_S, None)}
    simulation = Simulation(source, files, PLACEMENT, config=ONE_BY_ONE)
    goal = SearchGoal(1.0, 1.0, share=0.9, seed=5)
    assert not simulation.holds(Deployment((Group("one", Role.ANY, 1),)), goal, 50.0)
    assert [seed for _, seed, _ in drawn[2:]] == [5, 6]


def test_plan_has_as_many_of_the_best_machine_as_serve_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two types with equal prices, the plan has the faster one, and a simulation confirms it."""
    monkeypatch.setattr(planner, "MOST_REQUESTS", 800)
    monkeypatch.setattr(planner, "CHECKED", 200)
    fast, slow = (write_profile(tmp_path, *one, 2.0) for one in (("fast", 0.05), ("slow", 0.2)))
    flags = ["--profiles", f"{fast},{slow}", "--slo-ttft-ms", "1000", "--slo-tpot-ms", "250"]
    flags += ["--speculation", "off"]
    result = _plan(tmp_path, *flags, "--max-machines", "1", "--rate", "12")
    assert result.exit_code == 0, result.output
    assert "recommended: " in result.output
    plan = json.loads((tmp_path / "plan.json").read_text())
    count = plan["counts"]["fast"]
    assert plan["question"] == "placement"
    assert plan["counts"] == {"fast": count, "slow": 0}
    assert plan["machines"] == [
        {"profile": fast, "role": "any", "count": count, "speculation": "off"}
    ]
    assert plan["cost_per_hour"] == pytest.approx(2.0 * count)
    assert plan["simulated"]["attainment"] >= 0.9
    (best,) = [one for one in plan["search"]["measured"] if one["deployment"] == "1 x fast"]
    assert (count - 1) * best["goodput_rps"] <= 12.0
    assert best["goodput_rps"] <= best["bound_rps"]


def test_machines_of_two_profiles_divide_the_phases(tmp_path: Path) -> None:
    """Every request gets all of its tokens from a machine for prompts and one for outputs."""
    files = {name: write_profile(tmp_path, name, 0.05, None) for name in ("a", "b")}
    source = TraceSource((TraceRow(0.0, 50, 5),), Slo())
    groups = (Group("a", Role.PREFILL, 1), Group("b", Role.DECODE, 1))
    requests = source.requests(1.0, 0, 12)
    records = Simulation(source, files, PLACEMENT).records(Deployment(groups), requests, 0)
    assert [sum(chunk.tokens or 0 for chunk in one.chunks) for one in records] == [5] * 12


def test_only_machines_that_compute_outputs_draft(tmp_path: Path) -> None:
    """Drafts shorten outputs, and the machine for prompts has the policy `off`."""
    file = write_profile(tmp_path, "one", 0.05, None)
    source = TraceSource((TraceRow(0.0, 50, 40),), Slo())
    groups = (Group("one", Role.PREFILL, 1), Group("one", Role.DECODE, 1))
    steps = {}
    for drafts in (False, True):
        deployment = Deployment(groups, drafts)
        requests = source.requests(1.0, 0, 12)
        records = Simulation(source, {"one": file}, PLACEMENT).records(deployment, requests, 0)
        assert [sum(chunk.tokens or 0 for chunk in one.chunks) for one in records] == [40] * 12
        steps[drafts] = sum(len(one.chunks) for one in records)
        assert speculation_of(deployment, Role.PREFILL) == "off"
    assert steps[True] < 0.9 * steps[False]


@pytest.mark.parametrize("question", [pytest.param("placement", marks=pytest.mark.long), "pools"])
def test_plan_with_speculation_is_written_in_all_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    """Each deployment is compared without and with drafts, and the plan starts as recommended."""
    monkeypatch.setattr(planner, "MOST_REQUESTS", 300)
    monkeypatch.setattr(planner, "CHECKED", 100)
    monkeypatch.setattr(goodput, "CHECKED", 100)
    one = write_profile(tmp_path, "one", 0.05, 2.0)
    flags = ["--profiles", one, "--slo-ttft-ms", "1000", "--slo-tpot-ms", "250", "--rate", "3"]
    flags += ["--max-machines", "1"]
    written = {name: str(tmp_path / f"plan.{name}") for name in ("html", "yaml", "k8s")}
    flags += ["--html", written["html"], "--compose", written["yaml"]]
    result = _plan(tmp_path, *flags, "--kubernetes", written["k8s"], question=question)
    assert result.exit_code == 0, result.output
    plan = json.loads((tmp_path / "plan.json").read_text())
    known = [
        row["deployment"] for rows in ("measured", "unmeasured") for row in plan["search"][rows]
    ]
    assert sorted(known) == ["1 x one", "1 x one with drafts"]
    assert plan["phases"] == "together"
    (machine,) = plan["machines"]
    compose = yaml.safe_load(Path(written["yaml"]).read_text())
    (manifest,) = yaml.safe_load_all((tmp_path / "plan.k8s/workers.yaml").read_text())
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    for command in (compose["services"]["worker-one"]["command"], container["args"]):
        assert command[command.index("--speculation") + 1] == machine["speculation"]
    assert "1 x one with drafts" in Path(written["html"]).read_text()


def test_targets_that_no_machine_meets_make_the_plan_infeasible(tmp_path: Path) -> None:
    """If every step is longer than the TPOT target, no deployment is simulated."""
    slow = write_profile(tmp_path, "slow", 0.2, 1.0)
    result = _plan(tmp_path, "--profiles", slow, "--slo-tpot-ms", "100")
    assert result.exit_code == 0, result.output
    assert "no deployment meets the targets" in result.output
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["feasible"], plan["cost_per_hour"], plan["machines"]) == (False, None, [])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--slo-ttft-ms", "100"], "price_per_hour_usd"),
        ([], "--slo-ttft-ms or --slo-tpot-ms"),
        (["--slo-ttft-ms", "100", "--workload", "chat"], "either --workload or --trace"),
        (["--slo-ttft-ms", "100", "--share", "1"], "between 0 and 1"),
        (["--slo-ttft-ms", "100", "--speculation", "on"], "off or auto"),
    ],
)
def test_wrong_options_are_explained_in_one_line(
    tmp_path: Path, flags: list[str], words: str
) -> None:
    """A wrong option ends the command with status 2 and one line."""
    price = None if words == "price_per_hour_usd" else 1.0
    result = _plan(tmp_path, "--profiles", write_profile(tmp_path, "one", 0.01, price), *flags)
    assert result.exit_code == 2, result.output
    assert words in result.output
    assert result.output.count("\n") == 1


def test_interrupted_search_writes_what_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM ends a search with its own status, after its answer has been written."""

    def interrupt(_self: object, *_args: object) -> Iterator[object]:
        os.kill(os.getpid(), signal.SIGTERM)
        yield

    monkeypatch.setattr(planner._Processes, "results", interrupt)
    fast, slow = (write_profile(tmp_path, *one, 2.0) for one in (("fast", 0.05), ("slow", 0.2)))
    flags = ["--profiles", f"{fast},{slow}", "--slo-ttft-ms", "1000", "--slo-tpot-ms", "250"]
    result = _plan(tmp_path, *flags)
    assert result.exit_code == 143, result.output
    assert "no deployment was found before the interruption" in result.output
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["search"]["interrupted"]
    assert not plan["search"]["complete"]
    assert all(row["goodput_rps"] is None for row in plan["search"]["measured"])


@pytest.mark.parametrize(("objective", "known"), [("cost", True), ("power", False)])
def test_interrupted_pools_show_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str, *, known: bool
) -> None:
    """Before the first simulation, a search for a rate has the deployments that may serve it."""

    def interrupt(_self: object, *_args: object) -> Iterator[object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(planner._Processes, "results", interrupt)
    profile, page = write_profile(tmp_path, "one", 0.05, 2.0), tmp_path / "plan.html"
    flags = ["--profiles", profile, "--slo-ttft-ms", "1000", "--slo-tpot-ms", "250", "--rate", "6"]
    flags += ["--speculation", "off", "--html", str(page), "--objective", objective]
    result = _plan(tmp_path, *flags, question="pools")
    assert result.exit_code == 130, result.output
    plan = json.loads((tmp_path / "plan.json").read_text())
    left = plan["search"]["unmeasured"]
    assert all(one["bound_rps"] >= 6.0 for one in left)
    least = min(one["weight"] for one in left)
    for text in (" ".join(result.output.split()), page.read_text()):
        assert f"{len(left):,} deployments are left" in text
        assert left[0]["deployment"] in text
        assert (f"None that costs less than {least:.2f} USD per hour" in text) == known


def test_pools_with_the_least_cost_serve_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan has the least cost of all machines that served the rate."""
    monkeypatch.setattr(goodput, "CHECKED", 200)
    monkeypatch.setattr(planner, "CHECKED", 200)
    one = write_profile(tmp_path, "one", 0.05, 2.0)
    flags = ["--profiles", one, "--slo-ttft-ms", "1000", "--slo-tpot-ms", "250", "--rate", "6"]
    flags += ["--speculation", "off"]
    result = _plan(tmp_path, *flags, "--max-machines", "3", question="pools")
    assert result.exit_code == 0, result.output
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["question"] == "pools"
    assert plan["simulated"]["attainment"] >= 0.9
    measured = plan["search"]["measured"]
    serving = [row["weight"] for row in measured if row["interval"][0] >= 6.0]
    assert all(row["goodput_rps"] is None for row in measured)
    assert plan["cost_per_hour"] == min(serving) == 2.0 * plan["counts"]["one"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--objective", "power"], "needs --rate"),
        (["--objective", "throughput", "--max-machines", "0"], "max-machines"),
    ],
)
def test_wrong_options_of_pools_are_explained(tmp_path: Path, flags: list[str], words: str) -> None:
    """An objective without its rate ends the command with status 2."""
    profile = write_profile(tmp_path, "one", 0.01, 1.0)
    given = ["--profiles", profile, "--slo-ttft-ms", "100", *flags]
    result = _plan(tmp_path, *given, question="pools")
    assert result.exit_code == 2, result.output
    assert words in result.output
