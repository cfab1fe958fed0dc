"""`draftgate plan mix` for traces and workloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from bench.harness.provenance import bench_parser
from draftgate.gateway.cli import app
from draftgate.lab.plan.load_question import LoadQuestion, best_attempt, is_better, search_mix
from draftgate.lab.plan.machines import Rentable
from draftgate.lab.plan.mix_report import answer_of
from draftgate.lab.plan.sources import source_of
from draftgate.lab.planning.mix import Mix
from draftgate.lab.planning.throughput import Targets
from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.types import PlannedRequest, Record, RequestSpec, Slo

pytest.importorskip("scipy")


def _mix_at(factor: float) -> Mix:
    """A mix with a machine of a dollar for each tenth of the factor."""
    machines = int(10 * factor + 0.999)
    return Mix({"gpu": machines}, float(machines))


def _records(met: int) -> list[Record]:
    one = PlannedRequest(0, 0.0, RequestSpec("", (), 1, 0))
    verdicts = [Verdict.OK] * met + [Verdict.HTTP_STATUS] * (100 - met)
    return [Record(one, 0.0, 0.0, 1.0, verdict) for verdict in verdicts]


@pytest.mark.parametrize("needed", [10, 13, 17, 24, 40])
def test_search_finds_the_cheapest_mix_that_meets_the_share(needed: int) -> None:
    """The plan has at most 12% more than it needs, from a factor that is too small or too large."""
    for factor in (1.0, 1.5, 3.0):
        attempts = list(
            search_mix(
                _mix_at,
                lambda mix: _records(96 if mix.counts["gpu"] >= needed else 90),
                0.95,
                factor,
            )
        )
        found = best_attempt(attempts, 0.95)
        assert needed <= found.mix.counts["gpu"] <= 1.12 * needed
        assert len(attempts) <= 8


def test_search_ends_if_the_share_is_never_met() -> None:
    """The number of simulations is bounded, and the nearest attempt is the plan."""
    search = search_mix(_mix_at, lambda mix: _records(min(mix.counts["gpu"], 90)), 0.95, 1.0)
    attempts = list(search)
    assert len(attempts) == 8
    assert best_attempt(attempts, 0.95) is attempts[-1]


def test_search_ends_at_the_limits() -> None:
    """A factor for which no mix is feasible ends the search."""
    attempts = search_mix(
        lambda factor: _mix_at(factor) if factor < 1.5 else Mix({"gpu": 0}, 0.0, (0,)),
        lambda _mix: _records(50),
        0.95,
        1.0,
    )
    assert [one.factor for one in attempts] == [1.0, 1.4]


def _found(cost: float, attainment: float, *, feasible: bool = True) -> dict[str, Any]:
    return {
        "feasible": feasible,
        "cost_per_hour": cost,
        "simulated": {"attainment": attainment},
        "targets": {"share": 0.95},
    }


@pytest.mark.parametrize(
    ("without", "with_drafts", "chosen"),
    [
        (_found(3.0, 0.96), _found(4.0, 1.0), True),
        (_found(3.0, 0.96), _found(3.0, 0.96), False),
        (_found(3.0, 0.90), _found(4.0, 0.96), False),
        (_found(4.0, 0.96), _found(3.0, 0.90), True),
        (_found(0.0, 0.0, feasible=False), _found(3.0, 0.90), False),
    ],
)
def test_speculation_never_makes_a_plan_more_expensive(
    without: dict[str, Any], with_drafts: dict[str, Any], chosen: bool
) -> None:
    """The plan is the one without speculation if that is cheaper and meets the share."""
    assert is_better(without, with_drafts) == chosen


def _trace(folder: Path, prompt: int, output: int) -> Path:
    file = folder / "trace.jsonl"
    rows = [
        {"at_s": 0.7 * index, "prompt_tokens": prompt + index, "output_tokens": output}
        for index in range(30)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def _plan(folder: Path, *arguments: str) -> tuple[Result, dict[str, Any]]:
    file = folder / "plan.json"
    result = CliRunner().invoke(app, ["plan", "mix", "--json", str(file), *arguments])
    return result, json.loads(file.read_text()) if file.exists() else {}


def test_plan_for_a_trace_is_simulated(tmp_path: Path) -> None:
    """The plan has machines that meet the targets in the simulation, and the price of each type."""
    trace, compose = _trace(tmp_path, 300, 40), tmp_path / "compose.yaml"
    result, plan = _plan(
        tmp_path,
        *("--trace", str(trace), "--rate", "3", "--slo-ttft-ms", "2000", "--slo-tpot-ms", "60"),
        *("--compose", str(compose), "--html", str(tmp_path / "plan.html")),
        *("--profiles", "a10g-8b,h100-8b", "--class", "code", "--share", "0.9"),
    )
    assert result.exit_code == 0, result.output
    assert "simulated requests met their targets" in result.output
    assert plan["feasible"]
    assert plan["simulated"]["attainment"] >= 0.9
    assert plan["simulated"]["requests"] == 30
    prices = plan["prices_per_hour"]
    assert plan["cost_per_hour"] == pytest.approx(
        sum(count * prices[name] for name, count in plan["counts"].items())
    )
    machines = " + ".join(f"{count} x {name}" for name, count in plan["counts"].items() if count)
    assert plan["answer"].startswith(f"{machines} for {plan['cost_per_hour']:.2f} USD per hour")
    page = (tmp_path / "plan.html").read_text()
    assert all(plan["answer"] in text for text in (result.output, page))
    assert "prompts of 250 to 499" in page
    alone = [one["cost_per_hour"] for one in plan["single_types"].values()]
    assert plan["cost_per_hour"] <= min(alone)
    assert all(f"worker-{one['profile']}" in compose.read_text() for one in plan["machines"])
    assert plan["machines"] == [
        {"profile": name, "role": "any", "count": count, "speculation": "auto"}
        for name, count in plan["counts"].items()
        if count
    ]


def test_infeasible_lengths_are_named_in_tokens(tmp_path: Path) -> None:
    """A GPU that is too slow for the TPOT leaves the plan infeasible, with status 0.

    The lengths are sorted, in whatever order the requests arrive.
    """
    trace = _trace(tmp_path, 300, 40)
    shorter = '{"at_s": 30.0, "prompt_tokens": 60, "output_tokens": 40}'
    trace.write_text(f"{trace.read_text()}\n{shorter}\n")
    result, plan = _plan(
        tmp_path,
        *("--trace", str(trace), "--rate", "1", "--slo-tpot-ms", "40", "--speculation", "off"),
        *("--profiles", "l4-8b"),
    )
    assert result.exit_code == 0, result.output
    assert "prompts of 250 to 499 tokens with outputs of 25 to 49" in result.output
    assert (plan["feasible"], plan["cost_per_hour"]) == (False, None)
    assert plan["infeasible_buckets"] == [
        {"class": "trace", "prompt_tokens": [50, 99], "output_tokens": [25, 49]},
        {"class": "trace", "prompt_tokens": [250, 499], "output_tokens": [25, 49]},
    ]
    assert plan["answer"] == (
        "No mix within the limits serves 1 requests/s with a TPOT of 40 ms for 95% of the requests."
    )


@given(after=st.integers(0, 9), needed=st.integers(1, 12))
@settings(max_examples=20, deadline=None)
def test_interrupted_search_returns_what_it_knows(after: int, needed: int) -> None:
    """An interruption at any simulation leaves the best mix so far, and says so."""
    simulated, interrupted = 0, False

    class Question(LoadQuestion):
        def simulate(self, mix: Mix) -> list[Record]:
            nonlocal simulated, interrupted
            if simulated == after:
                interrupted = True
                raise KeyboardInterrupt
            simulated += 1
            return _records(100 if sum(mix.counts.values()) >= needed else 50)

    source = source_of("chat", None, Slo(2.0, 0.2))
    types = {name: Rentable.load(name, "ngram") for name in ("l4-8b", "a10g-8b")}
    requests = source.requests(2.0, 0, 20).kept()
    plan, records = Question(requests, 2.0, Slo(2.0, 0.2), 0.95, types, {}).answer()
    assert plan["interrupted"] == interrupted
    assert plan["feasible"]
    assert bool(records) == (after > 0)
    answer = answer_of(plan, Targets(2.0, 0.2))
    assert ("according to a prediction only" in answer) == (after == 0)


@pytest.mark.long
def test_plan_for_a_workload(tmp_path: Path) -> None:
    """A built-in workload with Poisson arrivals is planned for and simulated."""
    result, plan = _plan(
        tmp_path,
        *("--workload", "chat", "--rate", "4", "--slo-ttft-ms", "2000", "--slo-tpot-ms", "60"),
        *("--profiles", "a10g-8b,a100-8b", "--requests", "200"),
    )
    assert result.exit_code == 0, result.output
    assert plan["simulated"]["attainment"] >= 0.95


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workload", "chat"], "--rate"),
        (["--tputs", "none.json"], "No such file"),
        (["--workload", "chat", "--rate", "0"], "must be positive"),
        (["--rate", "1"], "either --workload or --trace"),
        (["--workload", "chat", "--rate", "1", "--profiles", "cpu-demo"], "price_per_hour_usd"),
        (["--workload", "chat", "--rate", "1", "--limit", "h100=1"], "no such profile"),
        (["--workload", "chat", "--rate", "1", "--speculation", "on"], "off or auto"),
    ],
)
def test_wrong_flags_are_explained_in_one_line(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    """A missing or wrong flag ends the command with status 2 and one line."""
    result, _ = _plan(tmp_path, "--requests", "4", *arguments)
    assert result.exit_code == 2, result.output
    assert words in result.output
    assert result.output.count("\n") == 1


def test_plan_of_a_single_type_has_one_number_of_machines(tmp_path: Path) -> None:
    """The machines of a plan of one type are also what this type needs alone."""
    out = tmp_path / "plan.json"
    flags = ["--workload", "chat", "--rate", "60", "--requests", "60", "--speculation", "off"]
    flags += ["--slo-ttft-ms", "2000", "--slo-tpot-ms", "100", "--profiles", "l4-8b"]
    result = CliRunner().invoke(app, ["plan", "mix", *flags, "--json", str(out)])
    assert result.exit_code == 0, result.output
    plan = json.loads(out.read_text())
    assert plan["single_types"]["l4-8b"]["count"] == plan["counts"]["l4-8b"] >= 1
    assert plan["single_types"]["l4-8b"]["cost_per_hour"] == plan["cost_per_hour"]


@pytest.mark.parametrize("question", ["mix", "placement", "pools"])
def test_folder_that_cannot_be_made_is_refused_before_the_work(
    tmp_path: Path, question: str
) -> None:
    """A file in the way of the manifests costs no plan."""
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "manifests"):
        result = CliRunner().invoke(app, ["plan", question, "--kubernetes", str(path)])
        assert result.exit_code == 2, result.output
        assert "is not a folder" in " ".join(result.output.split())


def test_results_of_a_study_that_cannot_be_written_are_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder in place of the file, or a file in place of its folder, ends the command."""
    file = tmp_path / "file"
    file.write_text("")
    for path, why in ((tmp_path, "is a folder"), (file / "found.json", "is not a folder")):
        with pytest.raises(SystemExit, match="2"):
            bench_parser("study", None).parse_args(["--json", str(path)])
        assert why in capsys.readouterr().err
