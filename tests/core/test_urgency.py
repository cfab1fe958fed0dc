"""The urgency of the next step: its class, its slack and its predicted duration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftgate.backends.core.text_batcher import TextBatcher, TextLimits
from draftgate.backends.types import Pace, Task
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.turns import StepUrgency
from draftgate.policies.types import BATCH_PRIORITY, ServiceLevel
from tests.core.fakes import FakeExecutor, request
from tests.core.pipeline_harness import LetterTokenizer, PipelineHarness

STEP_S = 1e-3
TEXT_COST = StepCost((1, 8, 16, 48), (0.01, 0.02, 0.03, 0.05))


def harness() -> PipelineHarness:
    """Return a worker whose steps of any size take `STEP_S`."""
    return PipelineHarness(asynchronous=False, num_blocks=40, policy="off", step_s=STEP_S)


def submit(worker, now_s: float, task: Task = Task.GENERATE, tokens: int = 4, **targets) -> None:
    each = request(tokens, max_tokens=20, ignore_eos=True, task=task)
    worker.submit(replace(each, service=ServiceLevel(**targets)), now_s)


def decode(worker, now_s: float) -> None:
    """Run a step that ends at this time."""
    plan = worker.plan(now_s)
    worker.render(worker.apply(plan, FakeExecutor().execute(plan), now_s))


def test_worker_without_work_has_no_urgency() -> None:
    """A worker that is idle, or has only paused requests, wants no step."""
    worker = harness().worker
    assert worker.urgency(0.0) is None
    submit(worker, 0.0)
    assert worker.urgency(0.0) == StepUrgency(0, None, STEP_S)
    (request_id,) = worker.open_requests
    worker.set_pace(request_id, Pace.PAUSED)
    assert worker.urgency(0.0) is None


def test_first_token_has_the_slack_of_its_ttft_target() -> None:
    """The slack of a prompt is the time to its target, less the step, and a missed target has
    none."""
    worker = harness().worker
    submit(worker, 1.0, ttft_s=0.5)
    submit(worker, 1.2, ttft_s=0.5)
    assert worker.urgency(1.3).slack_s == pytest.approx(0.2 - STEP_S)
    assert worker.urgency(1.6).slack_s == pytest.approx(0.1 - STEP_S)
    assert worker.urgency(1.8).slack_s is None


def test_decode_has_the_slack_of_its_tpot_target() -> None:
    """The slack of a decode is the time until its token is due, from half of its target to all of
    it, less the step."""
    worker = harness().worker
    submit(worker, 0.0, tpot_s=0.1)
    decode(worker, 1.0)
    for now_s, wait_s in ((0.95, 0.1), (1.03, 0.07), (5.0, 0.05)):
        assert worker.urgency(now_s).slack_s == pytest.approx(wait_s - STEP_S)


def test_only_the_most_urgent_class_counts() -> None:
    """Targets of a less urgent class give no slack, whether its sequences run or wait."""
    worker = harness().worker
    submit(worker, 0.0, priority=BATCH_PRIORITY, tpot_s=0.05)
    decode(worker, 1.0)
    assert worker.urgency(1.0).priority == BATCH_PRIORITY
    assert worker.urgency(1.0).slack_s is not None
    submit(worker, 1.0, priority=-1)
    assert worker.urgency(1.0) == StepUrgency(-1, None, STEP_S)


def test_step_of_texts_is_predicted_within_the_limit_of_its_class() -> None:
    """The prediction counts the waiting tokens up to the limit of a step, or the first text."""
    worker = TextBatcher(TextLimits(40, 48, 16, 9), LetterTokenizer(), TEXT_COST)
    assert worker.urgency(0.0) is None
    for _ in range(4):
        submit(worker, 0.0, Task.EMBED, tokens=8, priority=BATCH_PRIORITY)
    assert worker.urgency(0.0) == StepUrgency(BATCH_PRIORITY, None, 0.03)
    submit(worker, 0.0, Task.EMBED, tokens=8, ttft_s=0.5)
    assert worker.urgency(0.1) == StepUrgency(0, pytest.approx(0.38), 0.02)
    decode(worker, 0.2)
    assert worker.urgency(0.2) == StepUrgency(BATCH_PRIORITY, None, 0.03)
    long = TextBatcher(TextLimits(40, 48, 4, 9), LetterTokenizer(), TEXT_COST)
    submit(long, 0.0, Task.EMBED, tokens=12, priority=BATCH_PRIORITY)
    assert long.urgency(0.0) == StepUrgency(BATCH_PRIORITY, None, 0.03)
