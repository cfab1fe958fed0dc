"""The decisions about moves: which stream is next, and when its source stops."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.moves import (
    MOST_COMPUTED_BLOCKS,
    MOST_FAILURES,
    MOST_STAGES,
    WAIT_S,
    Missing,
    MoveStep,
    MoveView,
    next_move,
    next_step,
    predict_move,
)
from draftgate.policies.types import WorkerSpeed

SPEED = WorkerSpeed(tpot_s=0.01, step_s=0.01, step_token_s=1e-4)
BLOCK_TOKENS = 16
VIEW = MoveView(4000, 1000, 1, 6144, BLOCK_TOKENS, 1e8, SPEED)


@given(tokens=st.lists(st.integers(1, 100_000), min_size=1, max_size=20))
def test_the_shortest_move_is_first(tokens: list[int]) -> None:
    """Among streams of one kind, the stream with the shortest context moves first."""
    views = [replace(VIEW, tokens=one, left_tokens=10**9) for one in tokens]
    assert tokens[next_move(views)] == min(tokens)


def test_stream_that_ends_soon_stays() -> None:
    """A stream that ends before its blocks could be copied does not move."""
    assert next_move([replace(VIEW, left_tokens=10)]) is None
    assert next_move([replace(VIEW, left_tokens=10), VIEW]) == 1


def test_stream_stays_after_failed_moves() -> None:
    """A stream does not move again after its last allowed failure."""
    assert next_move([replace(VIEW, failures=MOST_FAILURES - 1)]) == 0
    assert next_move([replace(VIEW, failures=MOST_FAILURES)]) is None


@given(tokens=st.integers(1, 50_000), bandwidth=st.floats(1e7, 1e10), choices=st.integers(1, 8))
def test_a_faster_link_never_lengthens_a_move(tokens: int, bandwidth: float, choices: int) -> None:
    """A link of twice the bandwidth lengthens neither the copy nor the gap."""
    view = replace(VIEW, tokens=tokens, bytes_per_s=bandwidth, choices=choices)
    found, faster = predict_move(view), predict_move(replace(view, bytes_per_s=2 * bandwidth))
    assert faster.copy_s <= found.copy_s
    assert faster.gap_s <= found.gap_s + choices * view.block_tokens * SPEED.step_token_s


@given(
    added=st.lists(st.integers(0, 1000), min_size=MOST_STAGES, max_size=MOST_STAGES),
    pair_s=st.sampled_from([0.0, 1e-7, 1e-6]),
)
def test_every_move_stops_or_is_given_up(added: list[int], pair_s: float) -> None:
    """A move copies at least once and at most `MOST_STAGES` times, waits less than `WAIT_S` for
    each block, and the source stops only if the destination computes few blocks."""
    context, stages, waits, missing = 4000, 0, 0, None
    speed = replace(SPEED, pair_s=pair_s)
    while (step := next_step(stages, missing)) in (MoveStep.COPY, MoveStep.WAIT):
        if step is MoveStep.COPY:
            held = (context - 1) // BLOCK_TOKENS
            context += added[stages]
            stages, waits = stages + 1, 0
        else:
            context, waits = context + 1, waits + 1
            assert waits * speed.tpot_s <= WAIT_S
        missing = Missing(context - held * BLOCK_TOKENS, context, BLOCK_TOKENS, speed)
    assert 1 <= stages <= MOST_STAGES
    most = 0 if stages < MOST_STAGES else MOST_COMPUTED_BLOCKS
    assert (step is MoveStep.STOP) == (missing.blocks <= most)


@pytest.mark.parametrize(("tokens", "step"), [(1, MoveStep.STOP), (12, MoveStep.WAIT)])
def test_move_waits_if_the_source_would_get_far_ahead(tokens: int, step: MoveStep) -> None:
    """A move waits for a full block only if its tokens take longer than half a step."""
    speed = replace(SPEED, pair_s=1e-7)
    assert next_step(1, Missing(tokens, 7600, BLOCK_TOKENS, speed)) is step
    assert next_step(1, Missing(tokens, 7600, BLOCK_TOKENS, SPEED)) is MoveStep.STOP


def test_move_of_a_preempted_stream_copies_nothing_more() -> None:
    """After the first stage, the destination computes whatever the source has lost."""
    missing = Missing(4000, 7600, BLOCK_TOKENS, SPEED)
    assert next_step(0, None, preempted=True) is MoveStep.COPY
    assert next_step(1, missing) is MoveStep.COPY
    assert next_step(1, missing, preempted=True) is MoveStep.STOP


def test_move_of_a_slow_stream_does_not_wait() -> None:
    """A move does not wait longer than `WAIT_S` for a full block."""
    speed = replace(SPEED, tpot_s=WAIT_S / 4, pair_s=1e-5)
    assert next_step(1, Missing(12, 7600, BLOCK_TOKENS, speed)) is MoveStep.STOP
    assert next_step(1, Missing(13, 7600, BLOCK_TOKENS, speed)) is MoveStep.WAIT
