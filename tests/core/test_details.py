"""Details of deltas: the steps of a traced request, and the phases before its first token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftgate.backends.core.drafts import ROOT, Draft
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.types import Delta, GenerationRequest, Phases
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.registry import speculation_policy
from tests.core.fakes import (
    FakeExecutor,
    FakeProposer,
    ForcingGrammar,
    hashed_token,
    request,
    scripted,
)
from tests.core.pipeline_harness import LETTERS, LetterTokenizer

STEP_S = 1e-3
"""The duration of each step of the fake device."""


class RecordedWorker:
    """A worker on a clock of its steps that records the deltas of the first request."""

    def __init__(self, proposer=None, policy="fixed:4", true_token=hashed_token, **config) -> None:
        bounds = SchedulerConfig(**{"max_num_seqs": 4, "max_step_tokens": 64, **config})
        self.scheduler = Scheduler(
            bounds,
            KvBlocks(64, 4),
            speculation_policy(policy),
            {"ngram": proposer or FakeProposer(true_token)},
            StepCost((64,), (STEP_S,)),
        )
        self.worker = WorkerCore(self.scheduler, LetterTokenizer(), 200)
        self.device = FakeExecutor(true_token)
        self.now_s = 100.0

    def step(self) -> list[tuple[str, Delta]] | None:
        plan = self.worker.plan(self.now_s)
        if plan is None:
            return None
        self.now_s += STEP_S
        return self.worker.complete(plan, self.device.execute(plan), self.now_s)

    def run(self, *submitted: GenerationRequest) -> list[Delta]:
        """Run requests and return the deltas of the first request."""
        for generation in submitted:
            self.worker.submit(generation, self.now_s)
        deltas = []
        while (batch := self.step()) is not None:
            deltas += [
                delta for request_id, delta in batch if request_id == submitted[0].request_id
            ]
        return deltas


def traced(**of_request: object) -> GenerationRequest:
    return replace(request(ignore_eos=True, **of_request), traced=True)


@pytest.mark.parametrize("branches", [0.0, 0.5])
@pytest.mark.parametrize("policy", ["off", "fixed:3", "auto"])
def test_traces_report_proposed_verified_and_accepted_tokens(branches: float, policy: str) -> None:
    """The trace of each step is complete for chains and for trees."""
    proposer = FakeProposer(is_wrong=lambda key, place: place % 3 == 0, branches=branches)
    generation = traced(max_tokens=40, drafts=4)
    deltas = RecordedWorker(proposer, policy).run(
        generation, request(max_tokens=40, drafts=4, ignore_eos=True)
    )
    steps = [step for delta in deltas for step in delta.steps]
    assert len(steps) == len(deltas)
    for step, delta in zip(steps, deltas, strict=True):
        assert step.tokens == len(delta.token_ids)
        assert step.accepted == step.tokens - 1 <= len(step.draft_ids) <= step.offered
        assert len(step.survivals) == len(step.draft_ids)
        assert all(0.0 <= survival <= 1.0 for survival in step.survivals)
        assert set(delta.token_ids[: step.accepted]) <= set(step.draft_ids)
        assert (step.proposer is None) == (step.offered == 0)
    outcome = deltas[-1].outcome
    assert sum(len(step.draft_ids) for step in steps) == outcome.num_drafted_tokens
    assert sum(step.accepted for step in steps) == outcome.num_accepted_tokens
    assert any(step.price > 0.0 for step in steps)
    assert policy == "off" or outcome.num_accepted_tokens > 0
    assert policy == "auto" or any(step.offered > len(step.draft_ids) for step in steps)


def test_an_untraced_request_gets_no_traces() -> None:
    """In a batch with a traced request, an untraced request receives only its tokens."""
    plain = request(max_tokens=12, drafts=3, ignore_eos=True)
    deltas = RecordedWorker().run(plain, traced(max_tokens=12, drafts=3))
    assert [delta.steps for delta in deltas] == [()] * len(deltas)


def test_traces_count_computed_drafts_as_proposed() -> None:
    """A trace counts all computed tokens as proposed, even if the policy verifies fewer."""
    proposer = FakeProposer(depth_s=1e-6)
    deltas = RecordedWorker(proposer, "fixed:3").run(traced(max_tokens=30, drafts=4))
    steps = [step for delta in deltas for step in delta.steps]
    assert {step.offered for step in steps if step.proposer == "ngram"} >= {3}


def test_traces_leave_out_tokens_after_a_stop_string() -> None:
    """A stop string in an accepted draft cuts the tokens and the accepted count of its step."""
    true_token = scripted(*range(1, 30))
    text = LetterTokenizer().decode(range(1, 30))
    generation = traced(max_tokens=29, drafts=4, stop=(text[6],))
    last = RecordedWorker(true_token=true_token).run(generation)[-1]
    (step,) = last.steps
    assert len(step.draft_ids) == 4
    assert step.tokens == len(last.token_ids) == step.accepted + 1 < 5


@pytest.mark.parametrize(
    ("continues", "source", "tokens"), [(False, "grammar", 2), (True, "ngram", 4)]
)
def test_lookup_replaces_forced_tokens_only_if_it_continues_them(
    continues: bool, source: str, tokens: int
) -> None:
    """A trace names `grammar`, or the proposer whose draft continues the forced tokens."""
    recorder = RecordedWorker(FakeProposer(is_wrong=lambda *_: not continues), "fixed:4")
    generation = traced(max_tokens=10, drafts=4)
    recorder.worker.submit(generation)
    (sequence,) = recorder.scheduler.waiting
    sequence.grammar = ForcingGrammar(sequence)
    steps = []
    while (batch := recorder.step()) is not None:
        steps += [step for _, delta in batch for step in delta.steps]
    assert steps[0].proposer is None
    assert {step.proposer for step in steps[1:-1]} == {source}
    assert steps[1].draft_ids == tuple(hashed_token(sequence, 5 + place) for place in range(tokens))


def test_traces_list_survivals_best_first() -> None:
    """A trace lists the survivals of a tree in the order of selection."""
    tree = Draft((7, 8, 9, 10), (ROOT, ROOT, 0, 1), (0.6, 0.4, 1.0, 1.0))
    proposer = FakeProposer()
    proposer.draft = lambda sequence, max_tokens: tree.first(max_tokens)
    steps = [
        d.steps[0] for d in RecordedWorker(proposer, "fixed:4").run(traced(max_tokens=9, drafts=4))
    ]
    drafted = [step for step in steps if step.draft_ids]
    for step in drafted:
        assert list(step.survivals) == sorted(step.survivals, reverse=True)
    assert drafted[0].draft_ids == tree.token_ids[: len(drafted[0].draft_ids)]


def test_first_delta_reports_phases() -> None:
    """The first delta has the times of arrival, first step, each prompt chunk, and first token."""
    recorder = RecordedWorker(max_step_tokens=8)
    prompt = tuple(place % LETTERS for place in range(19))
    first, *others = recorder.run(request(prompt=prompt, max_tokens=5, ignore_eos=True))
    phases = first.phases
    assert (phases.queued_s, phases.scheduled_s) == (100.0, 100.0)
    assert [tokens for _, tokens in phases.chunks] == [8, 8, 3]
    ends = [100.0 + STEP_S * step for step in (1, 2, 3)]
    assert [at_s for at_s, _ in phases.chunks] == pytest.approx(ends)
    assert phases.first_token_s == phases.chunks[-1][0]
    assert [delta.phases for delta in others] == [None] * len(others)


def test_single_token_choice_reports_phases() -> None:
    """The only delta has the phases of its own choice, including the time in the queue."""
    recorder = RecordedWorker(max_num_seqs=1)
    deltas = recorder.run(request(max_tokens=1, n=3))
    assert [delta.choice for delta in deltas] == [0, 1, 2]
    scheduled = [delta.phases.scheduled_s for delta in deltas]
    assert scheduled == pytest.approx([100.0 + STEP_S * step for step in range(3)])
    assert {delta.phases.queued_s for delta in deltas} == {100.0}


def test_phases_add_up_step_times_without_a_clock() -> None:
    """A worker without a clock adds up step times."""
    recorder = RecordedWorker()
    recorder.worker.submit(request(max_tokens=2))
    plan = recorder.worker.plan()
    ((_, delta),) = recorder.worker.complete(plan, recorder.device.execute(plan))
    assert delta.phases == Phases(0.0, 0.0, ((STEP_S, 4),), STEP_S)
