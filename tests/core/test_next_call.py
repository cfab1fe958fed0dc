"""Tests of KV blocks that are held for the next request of a conversation."""

from __future__ import annotations

import pytest

from draftgate.backends.core.kv_blocks import HELD_SHARE
from draftgate.backends.core.queues import LONGEST_HOLD_S
from draftgate.policies.types import ServiceLevel
from tests.core.scheduler_harness import BLOCK, SchedulerHarness

SOON = ServiceLevel(next_call_s=5.0)
NUM_BLOCKS = 16


def prompt(number: int, tokens: int = 16) -> tuple[int, ...]:
    return tuple(range(1000 * number + 1, 1000 * number + tokens + 1))


def run(harness: SchedulerHarness, number: int, **of_request: object) -> None:
    """Run a conversation of four full blocks alone."""
    harness.add(prompt=prompt(number), max_tokens=4, **of_request)
    harness.run()


def cached(harness: SchedulerHarness, index: int) -> int:
    """Return how many blocks of a sequence are still cached."""
    return harness.blocks.num_cached(harness.sequences[index].hash_blocks(BLOCK))


@pytest.mark.parametrize(("hint", "kept"), [({}, 0), ({"service": SOON}, 4)])
def test_announced_conversation_stays_cached_under_pressure(
    hint: dict[str, ServiceLevel], kept: int
) -> None:
    """Other requests evict the blocks of a conversation later if its next call is announced."""
    harness = SchedulerHarness(num_blocks=NUM_BLOCKS)
    run(harness, 0, **hint)
    for number in range(1, 8):
        run(harness, number)
    assert cached(harness, 0) == kept


@pytest.mark.parametrize("announced_s", [5.0, 3600.0])
def test_blocks_are_held_for_the_announced_time(announced_s: float) -> None:
    """After the time, at most a minute, the blocks are like other unused ones."""
    harness = SchedulerHarness(num_blocks=NUM_BLOCKS)
    run(harness, 0, service=ServiceLevel(next_call_s=announced_s))
    harness.scheduler.plan(min(announced_s, LONGEST_HOLD_S) + 1.0)
    for number in range(1, 8):
        run(harness, number)
    assert cached(harness, 0) == 0


def test_next_call_uses_the_held_blocks() -> None:
    """The next request of the conversation shares the blocks, which ends their hold."""
    harness = SchedulerHarness(num_blocks=NUM_BLOCKS)
    run(harness, 0, service=SOON)
    held = harness.blocks._cache.num_held
    assert held == 4
    harness.add(prompt=(*prompt(0), *harness.outputs[0], 7, 8), max_tokens=4)
    harness.step()
    assert harness.blocks._cache.num_held == 0
    harness.run()


def test_announced_conversations_take_half_of_the_memory() -> None:
    """Further conversations are not held, and a long sequence gets all blocks."""
    harness = SchedulerHarness(num_blocks=NUM_BLOCKS)
    for number in range(4):
        run(harness, number, service=SOON)
        assert harness.blocks._cache.num_held <= HELD_SHARE * NUM_BLOCKS
    assert harness.blocks._cache.num_held == HELD_SHARE * NUM_BLOCKS
    harness.add(prompt=prompt(9, 56), max_tokens=8)
    harness.run()
    assert harness.blocks._cache.num_held < 4
