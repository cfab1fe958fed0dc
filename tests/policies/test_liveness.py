"""Liveness: a worker or stream is lost only if it owes something for long enough."""

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


def looks(silence: WorkerSilence, load: WorkerLoad, seconds: float, *, owes: bool = True) -> bool:
    """Checks every second for some time; returns the last answer."""
    hung = False
    for _ in range(round(seconds)):
        hung = silence.look(load, 1.0, owes=owes)
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
    """The longer of a decode and a full prompt step; at least 10 s."""
    assert patience_s(structs.replace(LOAD, speed=speed)) == pytest.approx(patience)


def test_worker_without_steps_hangs_after_the_patience() -> None:
    """Not earlier; the first check only records the number of steps."""
    silence = WorkerSilence()
    assert not looks(silence, LOAD, 1 + LEAST_PATIENCE_S)
    assert looks(silence, LOAD, 1)


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=30))
def test_worker_with_steps_or_without_requests_never_hangs(spells: list[tuple[int, bool]]) -> None:
    """Every silence is shorter than the patience, or no request waits."""
    silence = WorkerSilence()
    for steps, (seconds, owes) in enumerate(spells):
        load = structs.replace(LOAD, steps=steps)
        assert not looks(silence, load, seconds if owes else 100 * seconds, owes=owes)
        assert not looks(silence, structs.replace(load, steps=None), 100, owes=True)


def test_next_step_ends_a_hang() -> None:
    """Until then the worker hangs, whatever waits."""
    silence = WorkerSilence()
    assert looks(silence, LOAD, 2 + LEAST_PATIENCE_S)
    assert looks(silence, LOAD, RETRY_S / 2, owes=False)
    assert not looks(silence, structs.replace(LOAD, steps=6), 1)


def test_hung_worker_is_tried_again() -> None:
    """After a while without a step it counts as well, and hangs again without one."""
    silence = WorkerSilence()
    assert looks(silence, LOAD, 2 + LEAST_PATIENCE_S)
    assert not looks(silence, LOAD, RETRY_S + 1, owes=False)
    assert looks(silence, LOAD, 1 + LEAST_PATIENCE_S)


def test_silent_running_stream_is_lost_after_the_patience() -> None:
    """Every delta restarts the time."""
    silence = StreamSilence()
    for deltas in (1, 2):
        found = [silence.look(deltas, LOAD, 1.0, runs=True) for _ in range(12)]
        assert found == [False] * 11 + [True]


def test_stream_that_may_wait_is_not_lost() -> None:
    """It may wait if a request waits on its worker, or if it is held back."""
    silence = StreamSilence()
    for load, runs in ((structs.replace(LOAD, waiting=1), True), (LOAD, False)):
        assert not any(silence.look(1, load, 1.0, runs=runs) for _ in range(1000))
