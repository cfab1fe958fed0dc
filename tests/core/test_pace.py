"""Sequences with slow readers, which yield to others and lose no tokens."""

from __future__ import annotations

import pytest

from draftgate.backends.core.queues import SPARING_STEPS
from draftgate.backends.core.sequence import Sequence, SequenceState
from draftgate.backends.types import FinishReason, Pace
from draftgate.policies.registry import speculation_policy
from draftgate.policies.types import ServiceLevel
from tests.core.scheduler_harness import BLOCK, SchedulerHarness


def add_decodes(harness: SchedulerHarness, count: int, **of_request: object) -> list[Sequence]:
    """Add this number of sequences and run until their prompts are computed."""
    fields = {"prompt": 2, "max_tokens": 40, "ignore_eos": True, **of_request}
    sequences = [harness.add(**fields) for _ in range(count)]
    while any(s.output_tokens == 0 for s in sequences):
        harness.step()
    return sequences


def test_paused_sequence_is_in_no_step_and_resumes_unchanged() -> None:
    """Other sequences run during the pause, and a resume recomputes at most one block."""
    harness = SchedulerHarness(num_blocks=64)
    slow, fast = add_decodes(harness, 2)
    for _ in range(8):
        harness.step()
    harness.scheduler.set_pace(slow, Pace.PAUSED)
    before = slow.output_tokens
    for _ in range(6):
        plan = harness.step()
        assert [work.sequence for work in plan.work] == [fast]
    assert (slow.output_tokens, fast.output_tokens) == (before, before + 6)
    harness.scheduler.set_pace(slow, Pace.FULL)
    (work,) = [work for work in harness.step().work if work.sequence is slow]
    assert len(work.token_ids) <= BLOCK
    assert slow.preemptions == 0
    harness.run()


def test_sequence_paused_during_a_step_keeps_its_tokens() -> None:
    """A sequence that is paused during a step keeps the tokens of that step."""
    harness = SchedulerHarness(num_blocks=64)
    (slow,) = add_decodes(harness, 1)
    plan = harness.scheduler.plan()
    harness.check_plan(plan)
    harness.scheduler.set_pace(slow, Pace.PAUSED)
    before = slow.output_tokens
    harness.apply(plan)
    assert slow.output_tokens > before
    assert harness.scheduler.load().paused == 1
    assert harness.step() is None
    harness.run()


def test_no_step_is_planned_for_paused_sequences() -> None:
    """The scheduler plans no step until a sequence resumes."""
    harness = SchedulerHarness(num_blocks=64)
    sequences = add_decodes(harness, 3)
    for sequence in sequences:
        harness.scheduler.set_pace(sequence, Pace.PAUSED)
    assert [harness.step() for _ in range(3)] == [None] * 3
    load = harness.scheduler.load()
    assert (load.running, load.waiting, load.paused, load.prompt_tokens) == (0, 0, 3, 0)
    assert load.kv_blocks_free == load.kv_blocks_total
    harness.run()


def test_2000_paused_sequences_take_no_capacity_from_others() -> None:
    """A new sequence enters the next step and is never preempted for paused sequences."""
    harness = SchedulerHarness(num_blocks=64, max_num_seqs=4)
    slow = add_decodes(harness, 4)
    for sequence in slow:
        harness.scheduler.set_pace(sequence, Pace.PAUSED)
    for _ in range(2000):
        sequence = Sequence.for_choice(
            len(harness.sequences), slow[0].request, slow[0].request.choices[0]
        )
        harness.sequences.append(sequence)
        harness.outputs[sequence.key] = []
        harness.scheduler.add(sequence)
        harness.scheduler.set_pace(sequence, Pace.PAUSED)
    fast = [harness.add(prompt=8, max_tokens=30, ignore_eos=True) for _ in range(4)]
    plan = harness.scheduler.plan()
    assert {work.sequence for work in plan.work} <= set(fast)
    harness.check_plan(plan)
    harness.apply(plan)
    while any(s.state is not SequenceState.FINISHED for s in fast):
        assert harness.step() is not None
    assert sum(s.preemptions for s in fast) == 0
    for sequence in harness.open[4:]:
        harness.scheduler.finish(sequence, FinishReason.ABORT)
    harness.run()


def test_paused_prefill_does_not_hold_up_its_sharers() -> None:
    """Sequences that share a paused prefix compute that prefix themselves."""
    harness = SchedulerHarness(num_blocks=64, max_step_tokens=4)
    first = harness.add(prompt=17, max_tokens=2)
    harness.step()
    other = harness.add(prompt=17, max_tokens=2)
    harness.step()
    assert other.state is SequenceState.WAITING
    harness.scheduler.set_pace(first, Pace.PAUSED)
    harness.step()
    assert other.state is SequenceState.RUNNING
    harness.run()


def test_resumed_sequence_returns_in_order_of_arrival() -> None:
    """A resumed sequence precedes all later arrivals and follows all earlier arrivals."""
    harness = SchedulerHarness(num_blocks=64, max_num_seqs=1)
    _, second, third = (harness.add(max_tokens=9, ignore_eos=True) for _ in range(3))
    harness.step()
    harness.scheduler.set_pace(second, Pace.PAUSED)
    assert harness.scheduler.waiting == (third,)
    harness.scheduler.set_pace(second, Pace.SPARING)
    assert harness.scheduler.waiting == (second, third)
    harness.run()


@pytest.mark.parametrize("pace", Pace)
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_sequences_of_any_pace_are_cancelled_at_once(pace: Pace, steps: int) -> None:
    """A queued, running, leaving or paused sequence frees its blocks and all its state."""
    harness = SchedulerHarness(num_blocks=64)
    sequence = harness.add(prompt=9, max_tokens=30, ignore_eos=True)
    harness.scheduler.set_pace(sequence, pace if steps == 1 else Pace.FULL)
    for _ in range(steps):
        harness.step()
    harness.scheduler.set_pace(sequence, pace)
    harness.scheduler.finish(sequence, FinishReason.ABORT)
    harness.scheduler.set_pace(sequence, Pace.FULL)  # A change of pace has no effect after the end.
    load = harness.scheduler.load()
    assert (load.running, load.waiting, load.paused, load.prompt_tokens) == (0, 0, 0, 0)
    assert load.kv_blocks_free == load.kv_blocks_total
    assert harness.step() is None


def test_sparing_sequences_get_no_drafts() -> None:
    """A sparing sequence receives no drafts, and its neighbour receives all slots."""
    harness = SchedulerHarness(num_blocks=200, policy=speculation_policy("fixed:4"), wrong=0.0)
    slow, fast = add_decodes(harness, 2, max_tokens=60, drafts=4)
    harness.scheduler.set_pace(slow, Pace.SPARING)
    drafted = slow.drafted_tokens
    while fast.state is not SequenceState.FINISHED:
        harness.step()
    assert slow.drafted_tokens == drafted
    assert slow.output_tokens < 40
    harness.run()


def test_sparing_decodes_come_last_but_do_not_starve() -> None:
    """Sparing sequences are served last, within the bound, if only half of the decodes fit."""
    harness = SchedulerHarness(num_blocks=200, max_num_seqs=4, max_step_tokens=8)
    slow, *fast = add_decodes(harness, 4, max_tokens=100)
    harness.scheduler.set_pace(slow, Pace.SPARING)
    harness.set_budget(2)
    before = [s.output_tokens for s in (slow, *fast)]
    for _ in range(60):
        harness.step()
    gained = [s.output_tokens - b for s, b in zip((slow, *fast), before, strict=True)]
    assert gained[0] == 0
    assert sum(gained) == 120
    for _ in range(SPARING_STEPS - 60 + 2):
        harness.step()
    assert slow.output_tokens == before[0] + 1


def test_sparing_sequences_are_preempted_before_younger_sequences() -> None:
    """The scheduler preempts the only sparing sequence even if that sequence is the oldest."""
    harness = SchedulerHarness(num_blocks=12, max_num_seqs=4)
    slow, *fast = add_decodes(harness, 3, max_tokens=20)
    harness.scheduler.set_pace(slow, Pace.SPARING)
    while not slow.preemptions:
        harness.step()
    assert [s.preemptions for s in fast] == [0, 0]
    harness.run()


def test_slow_client_decodes_at_its_own_rate_beside_others() -> None:
    """A sparing sequence takes part in as many steps as its client can take tokens, and the other
    sequence takes part in every step."""
    harness = SchedulerHarness(num_blocks=200, policy=speculation_policy("off"))
    slow, fast = add_decodes(harness, 2, max_tokens=200)
    before, began_s = slow.output_tokens, harness.now_s
    harness.scheduler.set_pace(slow, Pace.SPARING, tpot_s=5e-3)
    steps = [harness.step() for _ in range(120)]
    assert all(any(work.sequence is fast for work in plan.work) for plan in steps)
    elapsed_s = harness.now_s - began_s
    assert slow.output_tokens - before == pytest.approx(elapsed_s / 5e-3, abs=2)
    harness.scheduler.set_pace(slow, Pace.FULL)
    before = slow.output_tokens
    for _ in range(10):
        harness.step()
    assert slow.output_tokens == before + 10


def test_slow_client_alone_runs_at_full_speed() -> None:
    """A sparing sequence takes part in every step if no other sequence could use the step."""
    harness = SchedulerHarness(num_blocks=200, policy=speculation_policy("off"))
    (slow,) = add_decodes(harness, 1)
    harness.scheduler.set_pace(slow, Pace.SPARING, tpot_s=60.0)
    before = slow.output_tokens
    for _ in range(10):
        harness.step()
    assert slow.output_tokens == before + 10


def test_slow_client_is_not_late_for_its_own_time() -> None:
    """The TPOT target of a slow client's sequence is as long as its client needs, and after its
    recovery the sequence owes no tokens for the time before."""
    harness = SchedulerHarness(num_blocks=200, policy=speculation_policy("off"))
    slow, _ = add_decodes(harness, 2, max_tokens=200, service=ServiceLevel(tpot_s=2e-3))
    harness.scheduler.set_pace(slow, Pace.SPARING, tpot_s=20e-3)
    for _ in range(60):
        harness.step()
    assert slow.tpot_s == 20e-3
    harness.scheduler.set_pace(slow, Pace.FULL)
    assert slow.tpot_s == 2e-3
    assert slow.due_in_s(harness.now_s) == pytest.approx(2e-3)
