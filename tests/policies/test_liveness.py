"""Liveness: a worker or stream is lost only if its work is overdue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from draftgate.policies.resilience.liveness import (
    LATE_STEPS,
    LEAST_PATIENCE_S,
    RETRY_S,
    StreamSilence,
    WorkerSilence,
    patience_s,
)
from draftgate.policies.types import WorkerLoad, WorkerSpeed

LOAD = WorkerLoad(1, 0, 8, 8, 0.0, 0.5, (), step_tokens=512, steps=5)


def check_for(
    silence: WorkerSilence, load: WorkerLoad, seconds: float, *, owes: bool = True
) -> bool:
    """Check every second for this many seconds and return the last result."""
    hung = False
    for _ in range(round(seconds)):
        hung = silence.check(load, 1.0, owes=owes)
    return hung


@pytest.mark.parametrize(
    ("speed", "patience"),
    [
        (WorkerSpeed(), LEAST_PATIENCE_S),
        (WorkerSpeed(0.02, 1e-5), LEAST_PATIENCE_S),
        (WorkerSpeed(2.0, 1e-5), LATE_STEPS * 2.0),
        (WorkerSpeed(0.02, 0.01), LATE_STEPS * 0.01 * 512),
    ],
    ids=["unknown", "fast", "slow decodes", "slow prompts"],
)
def test_patience_is_20_times_the_longest_usual_step(speed: WorkerSpeed, patience: float) -> None:
    """The patience is 20 times the longer of a decode and a full prompt step, and at least 10 s."""
    assert patience_s(structs.replace(LOAD, speed=speed)) == pytest.approx(patience)


def test_worker_without_steps_hangs_after_the_patience() -> None:
    """The patience starts with the first check, which only records the number of steps."""
    silence = WorkerSilence()
    assert not check_for(silence, LOAD, 1 + LEAST_PATIENCE_S)
    assert check_for(silence, LOAD, 1)


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=30))
def test_worker_with_steps_or_without_requests_never_hangs(spells: list[tuple[int, bool]]) -> None:
    """A worker that is silent for less than its patience, or has no requests, is not hung."""
    silence = WorkerSilence()
    for steps, (seconds, owes) in enumerate(spells):
        load = structs.replace(LOAD, steps=steps)
        assert not check_for(silence, load, seconds if owes else 100 * seconds, owes=owes)
        assert not check_for(silence, structs.replace(load, steps=None), 100, owes=True)


def test_next_step_ends_a_hang() -> None:
    """Only a step ends the hang, and a change of the waiting requests does not."""
    silence = WorkerSilence()
    assert check_for(silence, LOAD, 2 + LEAST_PATIENCE_S)
    assert check_for(silence, LOAD, RETRY_S / 2, owes=False)
    assert not check_for(silence, structs.replace(LOAD, steps=6), 1)


def test_hung_worker_is_tried_again() -> None:
    """A hung worker becomes eligible again after a while and hangs again without a step."""
    silence = WorkerSilence()
    assert check_for(silence, LOAD, 2 + LEAST_PATIENCE_S)
    assert not check_for(silence, LOAD, RETRY_S + 1, owes=False)
    assert check_for(silence, LOAD, 1 + LEAST_PATIENCE_S)


def test_silent_running_stream_is_lost_after_the_patience() -> None:
    """Every delta restarts the timer of a running stream."""
    silence = StreamSilence()
    for deltas in (1, 2):
        found = [silence.check(deltas, LOAD, 1.0, runs=True) for _ in range(12)]
        assert found == [False] * 11 + [True]


def test_stream_that_may_wait_is_not_lost() -> None:
    """A silent stream is not lost while its worker has queued requests or the stream is slowed
    down."""
    silence = StreamSilence()
    for load, runs in ((structs.replace(LOAD, waiting=1), True), (LOAD, False)):
        assert not any(silence.check(1, load, 1.0, runs=runs) for _ in range(1000))
