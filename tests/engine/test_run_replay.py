"""Recorded runs of the shipped model replay exactly: every step, draft, price and survival."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from draftgate.backends.core.pipeline import Pipeline
from draftgate.backends.core.steps import StepPlan, StepResult
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.recorded_run import Planned
from draftgate.backends.token_ids import compact
from draftgate.backends.types import (
    Delta,
    GenerationRequest,
    Pace,
    SamplingParams,
    StepTrace,
)
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli import app
from draftgate.lab.sim.exact_replay import replay_exactly
from draftgate.lab.sim.recorded_run import load_run
from draftgate.lab.sim.recording import load_recording
from draftgate.lab.simulate.experiment import Setup, run_experiment
from draftgate.loadgen.planning.plan import Load
from draftgate.policies.costs.step_cost_fit import REFIT_STEPS
from draftgate.policies.registry import speculation_policy
from draftgate.policies.types import RequestView, ServiceLevel
from tests.engine.test_recording import PROMPT

REQUESTS = 24

TARGETS = (ServiceLevel(), ServiceLevel(0.5, 0.004), ServiceLevel(None, 0.02, 1))
"""Service levels of the requests in turn. The second one is missed, so its tokens weigh more."""


def settings(path: Path, **chosen: Any) -> WorkerConfig:
    return WorkerConfig(
        max_model_len=512,
        threads=1,
        batching="fixed:256",  # which does not depend on the machine
        record_acceptance=str(path),
        record_acceptance_share=1.0,
        **{"kv_bytes": 8 << 20} | chosen,
    )


@dataclass
class ScriptedTime:
    """A clock and an executor whose times follow a script. The tokens are those of the model."""

    engine: LoadedEngine
    random: Random
    now_s: float = 12345.678

    def clock(self) -> float:
        self.now_s += self.random.uniform(1e-5, 4e-4)
        return self.now_s

    def execute(self, plan: StepPlan) -> StepResult:
        result = self.engine.executor.execute(plan)
        step_s = 2e-3 + 5e-5 * plan.num_tokens * self.random.uniform(0.9, 1.1)
        self.now_s += step_s
        return replace(result, step_s=step_s)


def requests_for(engine: LoadedEngine, policy: str, count: int) -> Iterator[GenerationRequest]:
    """Yield requests that share prefixes, with the plans that the gateway would make now."""
    encode, end = engine.worker.tokenizer.encode, engine.served.card.eos_ids[0]
    for number in range(count):
        prompt = encode(PROMPT + f"\n\ndef part{number % 3}(shape):\n    ")
        # Some end early, with a likelier end-of-sequence token.
        bias = ((end, 9.0),) if number % 6 == 4 else ()
        sampling = SamplingParams(
            24 + 9 * (number % 4), number, 0.4 * (number % 3), logit_bias=bias
        )
        service = TARGETS[number % len(TARGETS)]
        view = RequestView(len(prompt), sampling.max_tokens, sampling.temperature, service=service)
        plan = speculation_policy(policy).decide(view, engine.worker.load())
        yield GenerationRequest(
            f"r{number}", compact(prompt), sampling, plan, service=service, traced=True
        )


def serve(config: WorkerConfig, count: int = REQUESTS) -> dict[str, list[StepTrace]]:
    """Run a worker as its thread does, and return the steps of each request."""
    engine = load_engine(config)
    time = ScriptedTime(engine, Random(7))
    worker, recording = engine.worker, engine.recording
    assert recording is not None
    steps: dict[str, list[StepTrace]] = defaultdict(list)

    def deliver(batch: list[tuple[str, Delta]]) -> None:
        recording.observe(batch)
        for request_id, delta in batch:
            steps[request_id] += delta.steps

    pipeline = Pipeline(worker, time, deliver, None, time.clock)
    pipeline.step()  # an idle worker plans, too
    for number, request in enumerate(requests_for(engine, config.speculation, count)):
        worker.submit(request, time.clock())
        recording.begin(request)
        for _ in range(1 + number % 5):
            pipeline.step()
        if number == 3:
            worker.set_pace("r2", Pace.SPARING)
        if number == 4:
            worker.set_pace("r4", Pace.PAUSED)
        if number == 5:
            worker.cancel("r5")
            recording.cancel("r5")
    worker.set_pace("r4", Pace.FULL)
    while pipeline.step():
        pass
    recording.close()
    return dict(steps)


def without_ids(step: StepTrace) -> tuple[object, ...]:
    """Return the values of a step, with the number of its draft tokens in place of their ids."""
    return step._replace(draft_ids=(len(step.draft_ids),))


@pytest.mark.parametrize(
    ("policy", "proposer", "kv_bytes", "count"),
    [
        ("auto", None, 32 << 20, 8),  # n-grams, the draft model, and sparse self-speculation
        ("auto", "ngram", 3 << 20, REQUESTS),  # with preemptions and evictions
        pytest.param("fixed:4", "ngram", 8 << 20, REQUESTS, marks=pytest.mark.long),
        # The pages of the draft model evict cached blocks.
        pytest.param("fixed:4", "draft_model", 5 << 20, REQUESTS, marks=pytest.mark.long),
    ],
)
def test_recorded_run_replays_exactly(
    policy: str, proposer: str | None, kv_bytes: int, count: int, tmp_path: Path
) -> None:
    """A replay has the steps, drafts, accepted tokens, survivals and prices of the live run."""
    path = tmp_path / "live.json.gz"
    recorded = () if proposer == "ngram" else ("draft_model",)
    live = serve(
        settings(
            path,
            speculation=policy,
            proposer=proposer,
            kv_bytes=kv_bytes,
            record_acceptance_proposers=recorded,
        ),
        count,
    )
    run = load_run(path)
    replay = replay_exactly(run)
    assert replay.steps == sum(1 for call in run.calls if isinstance(call, Planned) and call.work)
    assert count < REQUESTS or replay.steps > REFIT_STEPS
    for number, request in enumerate(replay.requests):
        expected = [without_ids(step) for step in live.get(f"r{number}", [])]
        assert [without_ids(step) for step in request.steps] == expected
    used = {step.proposer for steps in live.values() for step in steps}
    assert {proposer or "ngram"} <= used
    assert replay.accepted_tokens > 0
    assert run.stopped
    assert run.evictions or proposer != "draft_model"


def test_simulation_of_recorded_requests_accepts_what_the_live_run_accepted(
    tmp_path: Path,
) -> None:
    """With `fixed:4`, requests have the live drafts on another device, where they meet no pause."""
    path, out = tmp_path / "live.json", tmp_path / "out.json"
    live = serve(settings(path, speculation="fixed:4", proposer="ngram"))
    flags = ["--recording", str(path), "--arrival", "recorded", "--json", str(out)]
    result = CliRunner().invoke(app, ["simulate", *flags, "--speculation", "off,fixed:4,auto"])
    assert result.exit_code == 0, result.output
    assert "the replay made the same steps" in result.output
    written = json.loads(out.read_text())
    drafted = sum(len(step.draft_ids) for steps in live.values() for step in steps)
    assert written["recorded"]["drafted_tokens"] == drafted
    assert written["policies"]["fixed:4"]["requests"] == REQUESTS
    run = load_run(path)
    setup = Setup(
        Load(trace=path),
        WorkerConfig(profile="h100-8b"),
        ("fixed:4",),
        recording=load_recording(str(path)),
        replay=(run, replay_exactly(run)),
    )
    records = run_experiment(setup).outcomes[0].run.records
    same = 0
    for record in records:
        steps = live[f"r{record.planned.index}"]
        simulated = record.metrics["speculative_decoding"]
        assert record.usage["completion_tokens"] == sum(step.tokens for step in steps)
        same += simulated["num_accepted_tokens"] == sum(step.accepted for step in steps) and (
            simulated["num_drafted_tokens"] == sum(len(step.draft_ids) for step in steps)
        )
    # Two live requests were paused or slowed down, and steps with prompts leave fewer slots.
    assert same >= REQUESTS - 4
