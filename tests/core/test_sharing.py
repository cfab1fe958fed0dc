"""Sequences with a common prefix, which share its blocks and never write to them."""

from __future__ import annotations

from dataclasses import replace

from draftgate.backends.core.sequence import SequenceState
from tests.core.fakes import request
from tests.core.scheduler_harness import BLOCK, SchedulerHarness


def test_choices_compute_their_prompt_once() -> None:
    """The first of 4 choices computes the prompt's full blocks, and the others share them."""
    harness = SchedulerHarness(num_blocks=64, max_step_tokens=64)
    choices = harness.add_choices(request(prompt=22, max_tokens=2, n=4, ignore_eos=True))
    step_tokens = []
    while (plan := harness.step()) is not None:
        step_tokens.append(plan.num_tokens)
        if len(harness.scheduler.running) == 4:
            tables = [sequence.block_table for sequence in choices]
            assert all(table[:5] == tables[0][:5] for table in tables)
    assert step_tokens[0] == 22
    assert (
        sum(step_tokens) == 22 + 3 * 2 + 4
    )  # The prompt, its last two tokens three times, and four decodes.
    assert [sequence.cached_tokens for sequence in choices] == [0, 20, 20, 20]


def test_next_turn_of_a_conversation_uses_cached_blocks() -> None:
    """A prompt that repeats an earlier prompt and its output computes only the new tokens."""
    harness = SchedulerHarness(num_blocks=64, max_step_tokens=64)
    first = harness.add(prompt=10, max_tokens=7, ignore_eos=True)
    harness.run()
    second = harness.add(prompt=(*first.token_ids, 1, 2, 3), max_tokens=1)
    plan = harness.step()
    # 16 of the 17 tokens have keys and values in full blocks. The last token was never computed.
    assert second.cached_tokens == 16
    assert plan.num_tokens == 20 - 16


def test_tenants_share_no_blocks() -> None:
    """If two tenants send the same prompt, the worker computes the prompt for each tenant."""
    harness = SchedulerHarness(num_blocks=64, max_step_tokens=64)
    for tenant, cached in (("a", 0), ("b", 0), ("a", 8), ("b", 8)):
        generation = replace(request(prompt=12, max_tokens=1), tenant=tenant)
        (sequence,) = harness.add_choices(generation)
        harness.run()
        assert sequence.cached_tokens == cached


def test_preempted_sequence_reuses_its_own_blocks() -> None:
    """A preempted sequence reuses its blocks that were not reallocated."""
    harness = SchedulerHarness(num_blocks=9, max_num_seqs=2, max_step_tokens=64)
    harness.add(prompt=6, max_tokens=12, ignore_eos=True)
    other = harness.add(prompt=(50, 51, 52, 53, 54, 55, 56, 57), max_tokens=20, ignore_eos=True)
    while other.preemptions == 0:
        harness.step()
    done = len(other.token_ids)
    while not other.block_table:
        harness.step()
    assert other.known_blocks * BLOCK >= 8
    assert len(other.token_ids) >= done
    harness.run()


def test_waiting_for_a_prefix_lets_others_pass() -> None:
    """A sequence that waits for a shared prefix does not delay later sequences."""
    harness = SchedulerHarness(num_blocks=64, max_step_tokens=16)
    harness.add(prompt=24, max_tokens=1)
    harness.step()
    sharer = harness.add(prompt=24, max_tokens=1)
    passer = harness.add(prompt=(70, 71, 72), max_tokens=1)
    harness.step()
    assert passer.state is SequenceState.FINISHED
    assert sharer.state is SequenceState.WAITING
    harness.run()
    assert sharer.cached_tokens == 20
