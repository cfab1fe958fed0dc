"""Sequences whose readers are slow: they give way, and lose nothing."""

from __future__ import annotations

import pytest

from draftgate.backends.core.scheduler import SPARING_STEPS
from draftgate.backends.core.sequence import Sequence, SequenceState
from draftgate.backends.types import FinishReason, Pace
from draftgate.policies.registry import speculation_policy
from tests.core.house import BLOCK, House


def decoding(house: House, count: int, **of_request: object) -> list[Sequence]:
    """So many sequences, their prompts computed."""
    wanted = {"prompt": 2, "max_tokens": 40, "ignore_eos": True, **of_request}
    sequences = [house.add(**wanted) for _ in range(count)]
    while any(s.output_tokens == 0 for s in sequences):
        house.step()
    return sequences


def test_a_paused_sequence_is_in_no_step_and_goes_on_as_if_nothing_had_been() -> None:
    """Others run meanwhile; resumed, it computes no more than a block again."""
    house = House(num_blocks=64)
    slow, fast = decoding(house, 2)
    for _ in range(8):
        house.step()
    house.scheduler.set_pace(slow, Pace.PAUSED)
    before = slow.output_tokens
    for _ in range(6):
        plan = house.step()
        assert [work.sequence for work in plan.work] == [fast]
    assert (slow.output_tokens, fast.output_tokens) == (before, before + 6)
    house.scheduler.set_pace(slow, Pace.FULL)
    (work,) = [work for work in house.step().work if work.sequence is slow]
    assert len(work.token_ids) <= BLOCK
    assert slow.preemptions == 0
    house.run()


def test_the_step_under_way_still_counts() -> None:
    """Who is paused while a step runs keeps its tokens."""
    house = House(num_blocks=64)
    (slow,) = decoding(house, 1)
    plan = house.scheduler.plan()
    house.check_plan(plan)
    house.scheduler.set_pace(slow, Pace.PAUSED)
    before = slow.output_tokens
    house.apply(plan)
    assert slow.output_tokens > before
    assert house.scheduler.load().paused == 1
    assert house.step() is None
    house.run()


def test_a_worker_of_paused_sequences_has_nothing_to_do() -> None:
    """No step is planned until one goes on, however often it is asked."""
    house = House(num_blocks=64)
    sequences = decoding(house, 3)
    for sequence in sequences:
        house.scheduler.set_pace(sequence, Pace.PAUSED)
    assert [house.step() for _ in range(3)] == [None] * 3
    load = house.scheduler.load()
    assert (load.running, load.waiting, load.paused, load.prompt_tokens) == (0, 0, 3, 0)
    assert load.kv_blocks_free == load.kv_blocks_total
    house.run()


def test_2000_paused_sequences_take_neither_seats_nor_memory_from_others() -> None:
    """A newcomer behind them is admitted with the next step and never preempted for them."""
    house = House(num_blocks=64, max_num_seqs=4)
    slow = decoding(house, 4)
    for sequence in slow:
        house.scheduler.set_pace(sequence, Pace.PAUSED)
    for _ in range(2000):
        sequence = Sequence.for_choice(
            len(house.sequences), slow[0].request, slow[0].request.choices[0]
        )
        house.sequences.append(sequence)
        house.outputs[sequence.key] = []
        house.scheduler.add(sequence)
        house.scheduler.set_pace(sequence, Pace.PAUSED)
    fast = [house.add(prompt=8, max_tokens=30, ignore_eos=True) for _ in range(4)]
    plan = house.scheduler.plan()
    assert {work.sequence for work in plan.work} <= set(fast)
    house.check_plan(plan)
    house.apply(plan)
    while any(s.state is not SequenceState.FINISHED for s in fast):
        assert house.step() is not None
    assert sum(s.preemptions for s in fast) == 0
    for sequence in house.open[4:]:
        house.scheduler.finish(sequence, FinishReason.ABORT)
    house.run()


def test_a_paused_prefill_lets_those_in_who_share_its_prefix() -> None:
    """They compute the prefix themselves, since nobody is computing it any more."""
    house = House(num_blocks=64, max_step_tokens=4)
    first = house.add(prompt=17, max_tokens=2)
    house.step()
    other = house.add(prompt=17, max_tokens=2)
    house.step()
    assert other.state is SequenceState.WAITING
    house.scheduler.set_pace(first, Pace.PAUSED)
    house.step()
    assert other.state is SequenceState.RUNNING
    house.run()


def test_who_goes_on_takes_its_place_in_the_order_of_arrival() -> None:
    """It stands ahead of all who came later, and behind those before it."""
    house = House(num_blocks=64, max_num_seqs=1)
    _, second, third = (house.add(max_tokens=9, ignore_eos=True) for _ in range(3))
    house.step()
    house.scheduler.set_pace(second, Pace.PAUSED)
    assert house.scheduler.waiting == (third,)
    house.scheduler.set_pace(second, Pace.SPARING)
    assert house.scheduler.waiting == (second, third)
    house.run()


@pytest.mark.parametrize("pace", Pace)
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_sequence_of_any_pace_is_cancelled_at_once(pace: Pace, steps: int) -> None:
    """Queued, running, leaving or paused: its blocks are free, and it leaves no trace."""
    house = House(num_blocks=64)
    sequence = house.add(prompt=9, max_tokens=30, ignore_eos=True)
    house.scheduler.set_pace(sequence, pace if steps == 1 else Pace.FULL)
    for _ in range(steps):
        house.step()
    house.scheduler.set_pace(sequence, pace)
    house.scheduler.finish(sequence, FinishReason.ABORT)
    house.scheduler.set_pace(sequence, Pace.FULL)  # too late, and no matter
    load = house.scheduler.load()
    assert (load.running, load.waiting, load.paused, load.prompt_tokens) == (0, 0, 0, 0)
    assert load.kv_blocks_free == load.kv_blocks_total
    assert house.step() is None


def test_a_sparing_sequence_is_not_drafted_for() -> None:
    """Not even what it would cost nothing to look up; its neighbour gets all the drafts."""
    house = House(num_blocks=200, policy=speculation_policy("fixed:4"), wrong=0.0)
    slow, fast = decoding(house, 2, max_tokens=60, drafts=4)
    house.scheduler.set_pace(slow, Pace.SPARING)
    drafted = slow.drafted_tokens
    while fast.state is not SequenceState.FINISHED:
        house.step()
    assert slow.drafted_tokens == drafted
    assert slow.output_tokens < 40
    house.run()


def test_sparing_decodes_come_last_but_do_not_starve() -> None:
    """With room for half of them the others go first, and it is served within the bound."""
    house = House(num_blocks=200, max_num_seqs=4, max_step_tokens=8)
    slow, *fast = decoding(house, 4, max_tokens=100)
    house.scheduler.set_pace(slow, Pace.SPARING)
    house.set_budget(2)
    before = [s.output_tokens for s in (slow, *fast)]
    for _ in range(60):
        house.step()
    gained = [s.output_tokens - b for s, b in zip((slow, *fast), before, strict=True)]
    assert gained[0] == 0
    assert sum(gained) == 120
    for _ in range(SPARING_STEPS - 60 + 2):
        house.step()
    assert slow.output_tokens == before[0] + 1


def test_sparing_sequences_are_preempted_before_younger_ones() -> None:
    """When blocks run out the oldest one gives way if it alone is sparing."""
    house = House(num_blocks=12, max_num_seqs=4)
    slow, *fast = decoding(house, 3, max_tokens=20)
    house.scheduler.set_pace(slow, Pace.SPARING)
    while not slow.preemptions:
        house.step()
    assert [s.preemptions for s in fast] == [0, 0]
    house.run()
