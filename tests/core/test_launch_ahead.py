"""Planning overlaps the steps of a device that launches ahead, also if requests may speculate.

A fake launcher in virtual time records when each step is planned, begins and ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from draftgate.backends.core.steps import StepPlan, StepResult
from draftgate.backends.types import Pace
from tests.core.fakes import ForcingGrammar, request
from tests.core.pipeline_harness import FakeDevice, PipelineHarness
from tests.examples import examples

STEP_S = 10e-3


@dataclass(frozen=True)
class TimedStep:
    """A step and its times in seconds."""

    plan: StepPlan
    planned_s: float
    began_s: float
    ended_s: float

    @property
    def drafts(self) -> int:
        return sum(work.num_drafts for work in self.plan.work)


class TimedDevice(FakeDevice):
    """A device with virtual time, on which every step takes `STEP_S` and planning takes time."""

    def __init__(self, planning_s: float) -> None:
        super().__init__()
        self._planning_s = planning_s
        self._clock_s = 0.0
        self.ran: list[TimedStep] = []

    def now_s(self) -> float:
        return self._clock_s

    def launch(self, plan: StepPlan, previous=None):
        planned_s = self._clock_s
        self._clock_s += self._planning_s
        began_s = max(self._clock_s, self.ran[-1].ended_s if self.ran else 0.0)
        self.ran.append(TimedStep(plan, planned_s, began_s, began_s + STEP_S))
        return super().launch(plan, previous)

    def fetch(self, launched) -> StepResult:
        (step,) = [step for step in self.ran if step.plan is launched[0]]
        self._clock_s = max(self._clock_s, step.ended_s)
        return replace(super().fetch(launched), step_s=STEP_S)

    def successors(self) -> Iterator[tuple[TimedStep, TimedStep, bool]]:
        """Yield each step, the next step, and whether the next was planned while the step ran."""
        for step, following in pairwise(self.ran):
            yield step, following, following.planned_s < step.ended_s


def timed_harness(
    *, asynchronous: bool = True, policy: str = "fixed:3", planning_s: float = 1e-3, **of_worker
) -> tuple[PipelineHarness, TimedDevice]:
    device = TimedDevice(planning_s)
    harness = PipelineHarness(
        asynchronous=asynchronous,
        num_blocks=2000,
        policy=policy,
        device=device,
        eos=-9,
        step_s=STEP_S,
        **of_worker,
    )
    return harness, device


@pytest.mark.parametrize("policy", ["fixed:3", "auto"])
def test_requests_that_may_speculate_do_not_serialise_steps(policy: str) -> None:
    """The device never waits while lookups find nothing, although every token is looked up."""
    looked_up: list[tuple[int, int]] = []
    harness, device = timed_harness(
        policy=policy, finds=lambda key, place: looked_up.append((key, place)) or False
    )
    for drafts in (3, 0, 3):
        harness.submit(request(prompt=4, max_tokens=40, drafts=drafts))
    harness.run()
    assert len(device.ran) == 40
    assert all(ahead for *_, ahead in device.successors())
    assert all(after.began_s == before.ended_s for before, after in pairwise(device.ran))
    keys = {key for key, _ in looked_up}
    assert keys == {0, 2}
    if policy == "fixed:3":
        # No draft fits before the last token.
        assert sorted(looked_up) == [(key, place) for key in (0, 2) for place in range(5, 43)]


WINDOWS = st.lists(st.integers(1, 6), min_size=1, max_size=12)


@settings(max_examples=examples(100))
@given(windows=WINDOWS, drafts=st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_a_draft_that_pays_is_verified_at_most_one_step_late(windows, drafts) -> None:
    """If two consecutive lookups find drafts, the step after the second one verifies a draft.

    Each step without a draft that pays is followed by a step that was planned while it ran.
    """
    found = [place % 2 == 1 for place, width in enumerate(windows) for _ in range(width)]

    def finds(key: int, place: int) -> bool:
        return found[(place + 3 * key) % len(found)]

    def verified(*, asynchronous: bool) -> tuple[set[tuple[int, int]], TimedDevice]:
        """Return the sequences and lengths with verified drafts. All drafts are wrong."""
        harness, device = timed_harness(
            asynchronous=asynchronous, finds=finds, is_wrong=lambda *_: True, branches=0.0
        )
        for each in drafts:
            harness.submit(request(prompt=4, max_tokens=30, drafts=each))
        harness.run()
        works = [work for step in device.ran for work in step.plan.work if work.num_drafts]
        return {(work.sequence.key, work.confirmed_end) for work in works}, device

    in_turn, _ = verified(asynchronous=False)
    overlapped, device = verified(asynchronous=True)
    assert overlapped <= in_turn
    assert {(key, place) for key, place in in_turn if (key, place - 1) in in_turn} <= overlapped
    for step, _, ahead in device.successors():
        pays = any((work.sequence.key, work.confirmed_end) in in_turn for work in step.plan.work)
        assert ahead == (not step.drafts and not pays)


def test_steps_overlap_again_after_the_last_draft() -> None:
    """One lookup with a draft makes the device wait twice: before and after the draft."""
    harness, device = timed_harness(finds=lambda key, place: place in {10, 11})
    for drafts in (3, 0):
        harness.submit(request(prompt=4, max_tokens=40, drafts=drafts))
    harness.run()
    assert [step.drafts > 0 for step in device.ran].count(True) == 1
    waits = [following.began_s > step.ended_s for step, following, _ in device.successors()]
    assert waits.count(True) == 2


def test_the_running_step_is_awaited_where_its_tokens_matter() -> None:
    """A penalty, a grammar, or a pause prevents the next step from being planned ahead."""

    def run(*, with_grammar: bool = False, **sampling: object) -> list[bool]:
        """Return whether the steps after those of the second request were planned ahead."""
        harness, device = timed_harness(finds=lambda key, place: False)
        harness.submit(request(prompt=4, max_tokens=20, drafts=3))
        harness.submit(request(prompt=4, max_tokens=20, drafts=3, **sampling))
        if with_grammar:
            sequence = harness.scheduler.waiting[1]
            sequence.grammar = ForcingGrammar(sequence)
        harness.run()
        return [
            ahead
            for step, _, ahead in device.successors()
            if any(work.sequence.key == 1 for work in step.plan.work)
        ]

    assert set(run()) == {True}
    assert set(run(presence_penalty=0.5)) == {False}
    assert set(run(with_grammar=True)) == {False}
    harness, device = timed_harness(finds=lambda key, place: False)
    for _ in range(2):
        harness.submit(request(prompt=4, max_tokens=20, drafts=3))
    for _ in range(5):
        harness.step()
    harness.worker.set_pace(harness.scheduler.running[0].request.request_id, Pace.PAUSED)
    before = len(device.ran)
    harness.step()
    assert [ahead for _, _, ahead in device.successors()][before - 1 :] == [False]


def test_a_draft_must_be_worth_the_lost_overlap() -> None:
    """With slow planning, `auto` drafts only on a device that waits for the plan anyway.

    A step takes 10 ms and planning takes 9 ms. Three of five drafts of one token are right. So a
    draft gives 1.6 tokens per 19 ms, compared with one token per 19 ms, or per 10 ms with overlap.
    """
    shares = {}
    for asynchronous in (False, True):
        harness, device = timed_harness(
            asynchronous=asynchronous,
            policy="auto",
            planning_s=9e-3,
            is_wrong=lambda key, place: place % 5 < 2,
            branches=0.0,
        )
        harness.submit(request(prompt=4, max_tokens=1500, drafts=1))
        harness.run()
        late = device.ran[len(device.ran) // 2 :]
        shares[asynchronous] = sum(step.drafts > 0 for step in late) / len(late)
    assert shares[False] > 0.9
    assert shares[True] < 0.1
