"""Tests of recorded decisions: memory, files and replays."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from draftgate.backends.types import (
    Delta,
    FinishReason,
    GrammarKind,
    GrammarSpec,
    SamplingParams,
    SpeculationOutcome,
)
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.config.models import ModelPlan
from draftgate.gateway.dispatch.decisions import (
    KEPT,
    KEPT_MOVES_OF_RUN,
    Decisions,
    MoveRecord,
    read_decisions,
)
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.json_lines import JsonLinesFile
from draftgate.gateway.node import Node
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.tracing import Tracing
from draftgate.policies.moves import MoveEnd
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.revision import PlanRevision, RevisionCause, SlotWorth
from draftgate.policies.types import (
    UNTESTED,
    DraftCounts,
    RequestView,
    ServiceLevel,
    SpeculationMode,
    WorkerLoad,
)
from tests.gateway.harness import ScriptedBackend, client, placed, running, scripted_fleet
from tests.gateway.test_cli import draftgate

LOAD = WorkerLoad(3, 1, 5, 8, 0.2, 0.7, ("ngram",))


def decide(decisions: Decisions, count: int, policy: str = "auto") -> None:
    """Record the decisions of a policy for `count` different requests."""
    decider, modes = speculation_policy(policy), list(SpeculationMode)[:3]
    for index in range(count):
        view = RequestView(10 + index, 20, 0.5, modes[index % 3], None)
        decisions.record(str(index), "w", view, LOAD, decider.decide(view, LOAD))


def test_latest_decisions_are_kept_newest_first() -> None:
    """The recorder keeps the latest `KEPT` decisions in memory and lists the newest first."""
    decisions = Decisions(None, lambda: 7.0)
    decide(decisions, KEPT + 5)
    latest = decisions.latest(3)
    assert [decision.request_id for decision in latest] == [str(KEPT + n) for n in (4, 3, 2)]
    assert len(decisions.latest(10 * KEPT)) == KEPT
    assert latest[0].decided_s == 7.0


def test_decision_keeps_its_latest_moves() -> None:
    """A request that tries to move for a long time keeps only its latest attempts."""
    decisions = Decisions(None, lambda: 7.0)
    decide(decisions, 1)
    (decision,) = decisions.latest(1)
    for number in range(KEPT_MOVES_OF_RUN + 5):
        move = MoveRecord("w", f"v{number}", "drain", MoveEnd.NO_ROOM)
        decisions.add_move("0", 0, "", decision, move)
    assert len(decision.moves) == KEPT_MOVES_OF_RUN
    assert decision.moves[-1].sink == f"v{KEPT_MOVES_OF_RUN + 4}"


def test_decisions_are_read_back_from_a_file_and_replayed(tmp_path: Path) -> None:
    """A replay of the recorded decisions with the same policy gives the same plans."""
    path = tmp_path / "decisions.jsonl"
    file = JsonLinesFile(path, "--decisions-file")
    decisions = Decisions(file, lambda: 7.0)
    for _ in range(2):
        decide(decisions, 30)
        file.write()
    found = list(read_decisions(path))
    assert found == decisions.latest(60)[::-1]
    assert all(decision.under(speculation_policy("auto")) == decision.plan for decision in found)
    assert any(decision.under(speculation_policy("fixed:3")) != decision.plan for decision in found)


def test_outcomes_of_a_plan_are_read_back_from_a_file(tmp_path: Path) -> None:
    """A decision read from a file has the outcome of all its choices, with revisions in words."""
    path, times = tmp_path / "decisions.jsonl", iter([7.0, 8.0])
    file = JsonLinesFile(path, "--decisions-file")
    decisions = Decisions(file, times.__next__)
    view = RequestView(10, 20, 0.5)
    plan = speculation_policy("auto").decide(view, LOAD)
    ended, running = (decisions.record("r", "w", view, LOAD, plan) for _ in range(2))
    revision = PlanRevision(False, RevisionCause.PRICE, 33, SlotWorth(1.2, 1.0, 0.97), 12.5)
    decisions.add_outcome(ended, SpeculationOutcome(2, 5, 3, (1, 0, 0, 1), (revision,)))
    file.write()
    decisions.add_outcome(ended, SpeculationOutcome(1, 4, 1, (0, 1)))
    file.write()
    first, second = read_decisions(path)
    assert (first, second) == (ended, running)
    assert second.outcome is None
    assert (first.outcome.choices, first.outcome.spec_steps) == (2, 3)
    assert (first.outcome.drafted_tokens, first.outcome.accepted_tokens) == (9, 4)
    assert [one.reason for one in first.outcome.revisions] == [revision.reason]
    shown = draftgate("explain", str(path)).stdout
    assert "outcome: 4 of 9 draft tokens accepted in 3 steps" in shown
    assert f"revised: {revision.reason}" in shown


def test_damaged_file_is_reported_with_its_line(tmp_path: Path) -> None:
    """The reader names the file and the line of a damaged record."""
    path = tmp_path / "decisions.jsonl"
    file = JsonLinesFile(path, "--decisions-file")
    decisions = Decisions(file, lambda: 7.0)
    decide(decisions, 1)
    file.write()
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(ValueError, match=r"decisions\.jsonl, line 2: .*request_id"):
        list(read_decisions(path))


async def test_dispatcher_records_the_inputs_of_each_decision(scripted: ScriptedBackend) -> None:
    """The dispatcher records one decision with its inputs for each prompt."""
    config = ServeConfig(speculation="fixed:4")
    fleets = [(ModelPlan(None, config), scripted_fleet(config, [scripted]))]
    node = Node(config, fleets, MemoryStore(), Tracing())
    await node.start()
    prompts, sampling = ((7, 7), (8, 8, 8)), SamplingParams(1, 0)
    job = Job("r", prompts, sampling, 5, max_draft_tokens=2, repetitions=(None, 0.5))
    holds = await placed(node, job)
    second, first = node.decisions.latest(9)
    assert (first.request.prompt_tokens, second.request.prompt_tokens) == (2, 3)
    assert (first.request.repetition, second.request.repetition) == (None, 0.5)
    assert [first.plan, second.plan] == [hold.request.speculation for hold in holds]
    assert all(decision.under(node.policy) == decision.plan for decision in (first, second))


OLD_LINE = """{"request_id": "r", "decided_s": 7.0, "worker_id": "w",
"request": {"prompt_tokens": 10, "max_tokens": 20, "temperature": 0.5, "mode": "auto",
"max_draft_tokens": null}, "load": {"running": 3, "waiting": 1, "kv_blocks_free": 5,
"kv_blocks_total": 8, "price": 0.2, "acceptance": 0.7, "proposers": ["ngram"]},
"plan": {"policy": "auto", "mode": "auto", "proposer": "ngram", "max_draft_tokens": 4,
"reason": "up to 4 draft tokens", "price": 0.2}}"""


def test_decision_of_an_older_version_is_read(tmp_path: Path) -> None:
    """The reader accepts records of an older version and treats missing inputs as unknown."""
    path = tmp_path / "decisions.jsonl"
    path.write_text(OLD_LINE.replace("\n", " ") + "\n")
    (decision,) = read_decisions(path)
    assert decision.request == RequestView(10, 20, 0.5)
    assert decision.load == LOAD
    assert decision.under(speculation_policy("fixed:3")).max_draft_tokens == 3
    assert draftgate("explain", str(path), "--policy", "auto").returncode == 0


async def finish(node: Node, scripted: ScriptedBackend, job: Job, *outcomes: object) -> None:
    """Run a job whose choices end with these outcomes."""
    async with node.dispatcher.run(job) as run:
        reading = asyncio.ensure_future(anext(run.deltas))
        request = await scripted.submitted.get()
        for choice, outcome in enumerate(outcomes):
            last = Delta(choice, (1,), "x", (), FinishReason.STOP, outcome)
            scripted.sinks.deliver([(request.request_id, last)])
        await reading
        async for _ in run.deltas:
            pass


async def test_outcomes_of_a_tenant_are_inputs_of_its_next_decision(
    scripted: ScriptedBackend,
) -> None:
    """The outcomes of a tenant's requests are inputs of its next decision at the same
    temperature."""
    config = ServeConfig(speculation="auto")
    fleets = [(ModelPlan(None, config), scripted_fleet(config, [scripted]))]
    node = Node(config, fleets, MemoryStore(), Tracing())
    await node.start()
    job = Job("r", ((7,) * 9,), SamplingParams(1, 0, 0.0), 5, n=2, tenant="a")
    outcome = SpeculationOutcome(10, 40, 30, (0, 0, 5, 0, 5))
    await finish(node, scripted, job, outcome, outcome)
    await finish(node, scripted, replace(job, n=1, mode=SpeculationMode.OFF), SpeculationOutcome())
    await placed(node, job)
    await placed(node, replace(job, tenant="b"))
    await placed(node, replace(job, sampling=SamplingParams(1, 0, 0.8)))
    drawn, other, again, _, first = node.decisions.latest(9)
    assert first.request.tenant_drafts == first.request.model_drafts == UNTESTED
    assert again.request.tenant_drafts.accepted == pytest.approx(60, rel=0.01)
    assert again.request.tenant_drafts.rejected == pytest.approx(10, rel=0.01)
    assert other.request.tenant_drafts == UNTESTED
    assert other.request.model_drafts == again.request.tenant_drafts
    assert drawn.request.model_drafts == UNTESTED
    assert "of this tenant at temperature 0" in again.plan.reason
    assert all(d.under(node.policy) == d.plan for d in (first, again, other, drawn))


async def test_forced_tokens_are_not_counted_as_accepted_drafts(scripted: ScriptedBackend) -> None:
    """The statistics exclude tokens that a grammar forces, because any draft of them is
    accepted."""
    config = ServeConfig(speculation="auto")
    fleets = [(ModelPlan(None, config), scripted_fleet(config, [scripted]))]
    node = Node(config, fleets, MemoryStore(), Tracing())
    await node.start()
    job = Job("r", ((7,) * 9,), SamplingParams(1, 0, 0.0), 5)
    forced = replace(job, grammar=GrammarSpec(GrammarKind.REGEX, "aaaa"))
    await finish(node, scripted, forced, SpeculationOutcome(1, 4, 4, (0, 0, 0, 0, 1)))
    await placed(node, job)
    assert node.decisions.latest(1)[0].request.model_drafts == UNTESTED


async def test_listed_decision_has_all_inputs_and_no_text() -> None:
    """The listing contains targets, repetition and draft counts, but no prompt and no output."""
    text = "alpha beta gamma delta " * 30
    headers = {"x-slo-tpot-ms": "5"}
    async with running(speculation="auto") as gateway, client(gateway) as http:
        body = {"prompt": text, "max_tokens": 200, "priority": -1, "ignore_eos": True}
        for _ in range(2):
            response = await http.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 200
        listed = await http.get("/decisions")
    second = listed.json()["decisions"][0]
    service = {
        "ttft_s": None,
        "tpot_s": 0.005,
        "priority": -1,
        "expected_tokens": None,
        "next_call_s": None,
    }
    assert second["request"]["service"] == service
    assert second["request"]["repetition"] > 0.9
    assert second["request"]["tenant_drafts"]["agreed"] > 0
    assert second["load"]["step_cost_error"] > 0.0
    assert "repetition" in second["plan"]["reason"]
    assert "alpha" not in listed.text
    assert response.json()["choices"][0]["text"] not in listed.text


async def test_decisions_are_listed_newest_first() -> None:
    """The server lists the newest decision first and rejects an invalid limit."""
    async with running(speculation="auto") as gateway, client(gateway) as http:
        for tokens in (3, 4):
            body = {"model": gateway.node.served.name, "prompt": "x", "max_tokens": tokens}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
        found = (await http.get("/decisions", params={"limit": 2})).json()["decisions"]
        assert [decision["request"]["max_tokens"] for decision in found] == [4, 3]
        assert found[0]["plan"]["reason"]
        wrong = await http.get("/decisions", params={"limit": "0"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "limit")


def test_explain_shows_and_replays_a_file(tmp_path: Path) -> None:
    """The command `explain` shows recorded decisions and the plans of another policy."""
    path = tmp_path / "decisions.jsonl"
    file = JsonLinesFile(path, "--decisions-file")
    decisions = Decisions(file, lambda: 7.0)
    decide(decisions, 3)
    file.write()
    shown = draftgate("explain", str(path), "--policy", "fixed:9").stdout
    assert "auto: up to" in shown
    assert "fixed:9: up to 9 by ngram" in shown
    assert "fixed:9 would decide differently in 2 of 3" in shown  # one request disables speculation
    record = json.loads(draftgate("explain", str(path), "--request", "1", "--json").stdout)
    assert record["decision"]["request_id"] == "1"
    assert record["replayed"] is None
    request = decisions.latest(1)[0].request
    request = replace(request, service=ServiceLevel(1.0, 0.02, 3), repetition=0.4)
    request = replace(request, tenant_drafts=DraftCounts(30, 10))
    plan = speculation_policy("auto").decide(request, LOAD)
    decisions.record("k", "w", request, LOAD, plan)
    file.write()
    known = draftgate("explain", str(path), "--request", "k").stdout
    assert "TTFT within 1000 ms, TPOT within 20 ms, priority 3" in known
    assert "repetition 0.40, 30 of 40 draft tokens accepted (tenant)" in known
    missing = draftgate("explain", str(path), "--request", "9")
    assert (missing.returncode, missing.stderr) == (
        1,
        f"draftgate: no matching decision in {path}\n",
    )


async def test_explain_reads_the_decisions_of_a_server() -> None:
    """The command `explain` with an address shows the server's decisions from oldest to newest."""
    async with running(speculation="auto", api_keys=("k",)) as gateway:
        async with client(gateway) as http:
            http.headers["authorization"] = "Bearer k"
            for tokens in (3, 4):
                body = {"model": gateway.node.served.name, "prompt": "x", "max_tokens": tokens}
                assert (await http.post("/v1/completions", json=body)).status_code == 200
        arguments = ("explain", gateway.url)
        shown = await asyncio.to_thread(draftgate, *arguments, "--api-key", "k")
        assert shown.stdout.index("up to 3 new") < shown.stdout.index("up to 4 new")
        refused = await asyncio.to_thread(draftgate, *arguments)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "requires an API key" in refused.stderr
    gone = await asyncio.to_thread(draftgate, *arguments)
    assert gone.stderr.startswith(f"draftgate: cannot reach {gateway.url}: ")
    assert gone.stderr.count("\n") == 1
