"""The time that drafts save, against runs without drafts."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from draftgate.backends.core.steps import StepPlan
from draftgate.backends.types import FinishReason
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.plan_reason import LOSS_REASON, PlanCause
from draftgate.policies.speculation.revision import REPAID_REASON, RevisionCause
from draftgate.policies.speculation.savings import TRIAL_SHARE, TRIAL_TOKENS
from draftgate.policies.types import SpeculationMode
from tests.core.fakes import FakeExecutor, request
from tests.core.scheduler_harness import SchedulerHarness

TOKENS = 200

Costs = tuple[tuple[float, ...], float]
"""Seconds of steps of 1, 4, 8, 16 and 32 tokens, and of a sampled token."""

CHEAP_SLOTS: Costs = (10e-3, 10.1e-3, 10.2e-3, 10.4e-3, 11e-3), 1e-6
DEAR_SLOTS: Costs = (10e-3, 14e-3, 18e-3, 26e-3, 42e-3), 1e-3


class TimedHarness(SchedulerHarness):
    """A scheduler on a device with its own costs, which differ from the scheduler's belief.

    Attributes:
        ended_s: time at which each sequence ended.
        prompt_token_s: seconds that a prompt token takes longer than the costs say.
        host_s: seconds between two steps in which the device is idle.
    """

    def __init__(self, costs: Costs, policy: str, host_s: float = 0.0) -> None:
        super().__init__(2000, max_step_tokens=32, policy=speculation_policy(policy), wrong=0.0)
        self._cost = StepCost((1, 4, 8, 16, 32), costs[0], sample_s=costs[1])
        self.prompt_token_s, self.host_s = 0.0, host_s
        self.ended_s: dict[int, float] = {}

    def apply(self, plan: StepPlan) -> None:
        result = FakeExecutor().execute(plan)
        step_s = self._cost.size_s(plan.size) + self.prompt_token_s * plan.prompt_tokens
        self.now_s += step_s
        for work, path in zip(plan.work, result.accepted, strict=True):
            self.compact(work, path)
        for sequence, _, _, _, _ in self.scheduler.apply(plan, replace(result, step_s=step_s)):
            if sequence.finish_reason is not None:
                self.ended_s[sequence.key] = self.now_s
        self.now_s += self.host_s
        self.scheduler._now_s += self.host_s


def warm_harness(costs: Costs, policy: str, wrong: float, host_s: float = 0.0) -> TimedHarness:
    """Return a scheduler that has learned the costs of the device from steps without drafts.

    Args:
        wrong: probability that a draft token is wrong.
        host_s: seconds between two steps in which the device is idle.
    """
    harness = TimedHarness(costs, policy, host_s)
    harness.proposer._is_wrong = lambda _key, position: Random(position).random() < wrong
    for count in (1, 2, 4):
        for _ in range(count):
            harness.add(prompt=4, max_tokens=300, drafts=0, ignore_eos=True)
        while harness.step() is not None:
            pass
    return harness


def deceived_harness() -> TimedHarness:
    """Return a scheduler that believes that slots are free and drafts right, and learns nothing.

    In fact, slots are dear and all drafts wrong.
    """
    harness = warm_harness(CHEAP_SLOTS, "auto", 1.0)
    harness._cost = StepCost((1, 4, 8, 16, 32), DEAR_SLOTS[0], sample_s=1e-3)
    fit, scores = harness.scheduler._fit, harness.scheduler._drafting._scores
    fit.add_step = lambda *_: None
    scores.learn = lambda *_: None
    return harness


def seconds_of(harness: TimedHarness, drafts: int) -> float:
    """Return the seconds of a sequence that runs alone."""
    started_s = harness.now_s
    sequence = harness.add(prompt=4, max_tokens=TOKENS, drafts=drafts, ignore_eos=True)
    while harness.step() is not None:
        pass
    return harness.ended_s[sequence.key] - started_s


@pytest.mark.parametrize("costs", [CHEAP_SLOTS, DEAR_SLOTS], ids=["cheap", "dear"])
@pytest.mark.parametrize("wrong", [0.1, 0.5, 0.95])
@pytest.mark.parametrize("host_s", [0.0, 3e-3])
def test_saved_seconds_are_the_difference_to_a_run_without_drafts(
    costs: Costs, wrong: float, host_s: float
) -> None:
    """The reported seconds are within 10% of the measured ones, or 3% of the duration, and negative
    if drafts cost time."""
    harness = warm_harness(costs, "fixed:4", wrong, host_s)
    plain_s, drafted_s = (seconds_of(harness, drafts) for drafts in (0, 4))
    saved_s = harness.sequences[-1].outcome().saved_s
    assert saved_s == pytest.approx(plain_s - drafted_s, rel=0.1, abs=0.03 * plain_s)
    assert (saved_s > 0.0) == (drafted_s < plain_s)
    assert harness.sequences[-2].outcome().saved_s == 0.0


def test_slow_prompts_are_not_blamed_on_drafts() -> None:
    """The reported seconds are within 10% of the measured ones while prompts of other requests are
    fed, which take much longer than predicted."""
    saved_s, taken_s = [], []
    for drafts in (0, 4):
        harness = warm_harness(CHEAP_SLOTS, "fixed:4", 0.5)
        seconds_of(harness, 0)
        harness.scheduler._fit.add_step = lambda *_: None
        harness.prompt_token_s = 5e-3
        started_s = harness.now_s
        sequence = harness.add(prompt=4, max_tokens=TOKENS, drafts=drafts, ignore_eos=True)
        for _ in range(20):
            harness.add(prompt=20, max_tokens=2, drafts=0, ignore_eos=True)
            harness.step()
        while harness.step() is not None:
            pass
        taken_s.append(harness.ended_s[sequence.key] - started_s)
        saved_s.append(sequence.saved_s)
    assert saved_s[0] == 0.0
    assert saved_s[1] == pytest.approx(taken_s[0] - taken_s[1], rel=0.1)


def test_sequences_without_drafts_pay_for_the_drafts_of_their_batch() -> None:
    """A sequence without drafts loses the time that the drafts of its batch add to its steps."""
    harness = warm_harness(DEAR_SLOTS, "fixed:4", 0.0)
    drafted = harness.add(prompt=4, max_tokens=TOKENS, drafts=4, ignore_eos=True)
    plain = harness.add(prompt=4, max_tokens=TOKENS, drafts=0, ignore_eos=True)
    while harness.step() is not None:
        pass
    assert drafted.saved_s > 0.0 > plain.saved_s


def test_useless_drafts_of_auto_are_stopped_by_the_clock() -> None:
    """If the scheduler believes that slots are free and that drafts are right, it stops drafts that
    cost time all the same."""
    harness = deceived_harness()
    for _ in range(3):
        harness.add(prompt=4, max_tokens=4 * TOKENS, drafts=4, ignore_eos=True)
    drafting = steps = 0
    while (plan := harness.step()) is not None:
        drafting += plan.size.sampled > sum(work.samples for work in plan.work)
        steps += 1
    assert 0 < drafting < 0.1 * steps


def test_running_requests_report_that_drafts_stop_and_resume() -> None:
    """All requests that the worker drafts for record the loss and the recovery of its account. A
    request that arrives in between records only the recovery, and one that names its proposer
    nothing."""
    harness = deceived_harness()
    endless = request(prompt=4, max_tokens=8 * TOKENS, drafts=4, ignore_eos=True)
    running = [harness.add_choices(endless)[0] for _ in range(2)]
    named = replace(endless.speculation, mode=SpeculationMode.NGRAM)
    (revised_never,) = harness.add_choices(endless.planned(named))
    saved_time = harness.scheduler._drafts.saved_time
    while not saved_time.drafts_lose:
        harness.step()
    for sequence in running:
        (stop,) = sequence.revisions
        assert (stop.on, stop.cause) == (False, RevisionCause.DRAFTS_LOSE)
        assert stop.output_tokens == sequence.output_tokens - 1
        assert LOSS_REASON in stop.reason
        assert sequence.outcome().revisions == (stop,)
    assert not revised_never.revisions
    harness.scheduler.finish(revised_never, FinishReason.ABORT)  # its drafts would still lose time
    later = replace(
        endless.speculation,
        proposer=None,
        max_draft_tokens=0,
        cause=PlanCause.DRAFTS_LOSE,
        later_proposer="ngram",
        later_draft_tokens=4,
    )
    (arrived,) = harness.add_choices(endless.planned(later))
    while True:
        harness.step()
        if not saved_time.drafts_lose:
            break
        assert not any(sequence.drafting.on for sequence in (*running, arrived))
    for sequence in (*running, arrived):
        resumed = sequence.revisions[-1]
        assert (resumed.on, resumed.cause) == (True, RevisionCause.DRAFTS_LOSE)
        assert REPAID_REASON in resumed.reason
    assert [len(one.revisions) for one in (*running, arrived)] == [2, 2, 1]


@pytest.mark.parametrize("named", [False, True])
def test_wrong_drafts_of_a_request_cost_it_a_few_tokens(named: bool) -> None:
    """Drafts that are always wrong cost a request 2 tokens and 2% of its time, plus a step's
    drafts, even if every estimate stays hopeful. A proposer that the client names has no limit."""
    harness = warm_harness(DEAR_SLOTS, "auto", 1.0)
    harness.scheduler._drafting._scores.learn = lambda *_: None
    plain_s = seconds_of(harness, 0)
    wanted = request(prompt=4, max_tokens=TOKENS, drafts=4, ignore_eos=True)
    if named:
        wanted = wanted.planned(replace(wanted.speculation, mode=SpeculationMode.NGRAM))
    started_s = harness.now_s
    (sequence,) = harness.add_choices(wanted)
    while harness.step() is not None:
        pass
    lost = (harness.ended_s[sequence.key] - started_s) / plain_s - 1.0
    assert sequence.lost_tokens > 0.0
    assert (lost < TRIAL_SHARE + (TRIAL_TOKENS + 2.0) / TOKENS) is not named


def test_accepted_drafts_pay_for_further_drafts() -> None:
    """A request whose drafts bring more than they cost never uses up its trial."""
    harness = warm_harness(DEAR_SLOTS, "auto", 0.2)
    sequence = harness.add(prompt=4, max_tokens=TOKENS, drafts=4, ignore_eos=True)
    while harness.step() is not None:
        assert not sequence.trial_is_used_up
    assert sequence.lost_tokens < 0.0
