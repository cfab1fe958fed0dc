"""Sequences with a common prefix share its blocks, and nobody writes into them."""

from __future__ import annotations

from dataclasses import replace

from draftgate.backends.core.sequence import SequenceState
from tests.core.fakes import request
from tests.core.house import BLOCK, House


def test_choices_compute_their_prompt_once() -> None:
    """Of 4 choices only one computes the prompt's full blocks; the others share them."""
    house = House(num_blocks=64, max_step_tokens=64)
    choices = house.add_choices(request(prompt=22, max_tokens=2, n=4, ignore_eos=True))
    fed = []
    while (plan := house.step()) is not None:
        fed.append(plan.num_tokens)
        if len(house.scheduler.running) == 4:
            tables = [sequence.block_table for sequence in choices]
            assert all(table[:5] == tables[0][:5] for table in tables)
    assert fed[0] == 22
    assert sum(fed) == 22 + 3 * 2 + 4  # the prompt, three times its last two tokens, four decodes
    assert [sequence.cached_tokens for sequence in choices] == [0, 20, 20, 20]


def test_a_conversation_goes_on_from_its_cached_turns() -> None:
    """A prompt that repeats an earlier prompt and its output computes only what is new."""
    house = House(num_blocks=64, max_step_tokens=64)
    first = house.add(prompt=10, max_tokens=7, ignore_eos=True)
    house.run()
    second = house.add(prompt=(*first.token_ids, 1, 2, 3), max_tokens=1)
    plan = house.step()
    # 16 of the 17 tokens have keys and values (the last was never fed), all in full blocks.
    assert second.cached_tokens == 16
    assert plan.num_tokens == 20 - 16


def test_tenants_share_nothing() -> None:
    """The same prompt of another tenant is computed anew."""
    house = House(num_blocks=64, max_step_tokens=64)
    for tenant, cached in (("a", 0), ("b", 0), ("a", 8), ("b", 8)):
        wanted = replace(request(prompt=12, max_tokens=1), tenant=tenant)
        (sequence,) = house.add_choices(wanted)
        house.run()
        assert sequence.cached_tokens == cached


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    """What nobody needed in the meantime is not computed again after a preemption."""
    house = House(num_blocks=9, max_num_seqs=2, max_step_tokens=64)
    house.add(prompt=6, max_tokens=12, ignore_eos=True)
    other = house.add(prompt=(50, 51, 52, 53, 54, 55, 56, 57), max_tokens=20, ignore_eos=True)
    while other.preemptions == 0:
        house.step()
    done = len(other.token_ids)
    while not other.block_table:
        house.step()
    assert other.known_blocks * BLOCK >= 8
    assert len(other.token_ids) >= done
    house.run()


def test_a_prefix_under_way_lets_others_pass() -> None:
    """Who waits for a prefix that is being computed does not hold up those behind."""
    house = House(num_blocks=64, max_step_tokens=16)
    house.add(prompt=24, max_tokens=1)
    house.step()
    sharer = house.add(prompt=24, max_tokens=1)
    passer = house.add(prompt=(70, 71, 72), max_tokens=1)
    house.step()
    assert passer.state is SequenceState.FINISHED
    assert sharer.state is SequenceState.WAITING
    house.run()
    assert sharer.cached_tokens == 20
