"""Who is taken for lost: only who owes something, and after long enough."""

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
    """Look each second, for so long; return what the last look says."""
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
def test_patience_is_that_of_the_longest_steps(speed: WorkerSpeed, patience: float) -> None:
    """Twenty times the longer of a usual decode and a full prompt step; never less than 10 s."""
    assert patience_s(structs.replace(LOAD, speed=speed)) == pytest.approx(patience)


def test_a_worker_without_steps_is_hung_after_the_patience() -> None:
    """Not at it, and not before; the first look only learns where it stands."""
    silence = WorkerSilence()
    assert not looks(silence, LOAD, 1 + LEAST_PATIENCE_S)
    assert looks(silence, LOAD, 1)


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=30))
def test_who_makes_a_step_or_owes_none_is_never_hung(spells: list[tuple[int, bool]]) -> None:
    """However long it all takes, if each silence is shorter than the patience, or nobody waits."""
    silence = WorkerSilence()
    for steps, (seconds, owes) in enumerate(spells):
        load = structs.replace(LOAD, steps=steps)
        assert not looks(silence, load, seconds if owes else 100 * seconds, owes=owes)
        assert not looks(silence, structs.replace(load, steps=None), 100, owes=True)


def test_a_step_shows_that_it_lives() -> None:
    """Hung until its next step, whoever waits; then well at once."""
    silence = WorkerSilence()
    assert looks(silence, LOAD, 2 + LEAST_PATIENCE_S)
    assert looks(silence, LOAD, RETRY_S / 2, owes=False)
    assert not looks(silence, structs.replace(LOAD, steps=6), 1)


def test_who_has_nothing_to_show_by_is_tried_again() -> None:
    """After a while without a step it is taken for well, and found hung again if it is."""
    silence = WorkerSilence()
    assert looks(silence, LOAD, 2 + LEAST_PATIENCE_S)
    assert not looks(silence, LOAD, RETRY_S + 1, owes=False)
    assert looks(silence, LOAD, 1 + LEAST_PATIENCE_S)


def test_a_lost_stream_is_found_after_the_patience() -> None:
    """Of a stream that runs and says nothing; a delta begins it anew."""
    silence = StreamSilence()
    for deltas in (1, 2):
        found = [silence.look(deltas, LOAD, 1.0, runs=True) for _ in range(12)]
        assert found == [False] * 11 + [True]


def test_a_stream_that_may_wait_is_not_lost() -> None:
    """Where somebody waits on its worker it may be the one; nor where it is held back."""
    silence = StreamSilence()
    for load, runs in ((structs.replace(LOAD, waiting=1), True), (LOAD, False)):
        assert not any(silence.look(1, load, 1.0, runs=runs) for _ in range(1000))
