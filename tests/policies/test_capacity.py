"""Room: what is bound to a worker, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.capacity import (
    STEPS_AHEAD,
    CapacityNeed,
    WorkerUsage,
    has_capacity,
    sequence_limit,
)
from draftgate.policies.types import WorkerLoad, WorkerSpeed


def load(**fields: object) -> WorkerLoad:
    """A worker of 16 seats with memory for 1,600 tokens."""
    given = {"max_sequences": 16, "step_tokens": 512, "kv_blocks_free": 100, "kv_blocks_total": 100}
    values = {"running": 0, "waiting": 0, "price": 0.0, "acceptance": 0.5, "proposers": ()}
    return WorkerLoad(**{**values, **given, **fields})


ONE = CapacityNeed(1, 100, 200)


def test_an_empty_worker_takes_whatever_can_run_at_all() -> None:
    """More choices than seats and more prompt than a step takes have to go somewhere."""
    assert has_capacity(WorkerUsage(load()), CapacityNeed(40, 100_000, 200_000))


@pytest.mark.parametrize(
    ("at", "room"),
    [
        (WorkerUsage(load(), 15), True),
        (WorkerUsage(load(), 16), True),  # one more waits there for the seat that is free next
        (WorkerUsage(load(), 17), False),
        (WorkerUsage(load(max_sequences=15), 15), False),
        (WorkerUsage(load(running=15, paused=2), 17, 17), True),  # who reads slowly keeps no seat
        (WorkerUsage(load(running=17, paused=2_000), 2_017, 2_017), False),
        (WorkerUsage(load(), 3, 0, STEPS_AHEAD * 512 - 1), True),
        (WorkerUsage(load(), 3, 0, STEPS_AHEAD * 512), False),
        (WorkerUsage(load(kv_blocks_free=6), 3), False),
        (WorkerUsage(load(kv_blocks_free=7), 3), True),
        (WorkerUsage(load(max_sequences=0), 10_000), True),
        (WorkerUsage(load(running=15, others=5), 11), True),  # what others sent takes seats
        (WorkerUsage(load(running=17, others=5), 12), False),
        (WorkerUsage(load(running=40, others=33), 8), True),  # but leaves half of them
        (WorkerUsage(load(running=42, others=33), 9), False),
        (WorkerUsage(load(max_sequences=0, running=500, others=490), 10), True),
        (WorkerUsage(load(kv_blocks_free=0, kv_blocks_total=0), 3), True),
    ],
)
def test_seats_steps_and_memory_bound_what_is_sent(at: WorkerUsage, room: bool) -> None:
    """A worker gets no more than seats, prompts of its next steps and free memory allow; what it
    does not tell bounds nothing."""
    assert has_capacity(at, ONE) is room


def test_who_only_reads_or_stands_still_takes_no_seat() -> None:
    """Of started sequences those count that the worker still works on."""
    assert not has_capacity(WorkerUsage(load(running=17), 17, started=17), ONE)
    assert has_capacity(WorkerUsage(load(running=9), 17, started=17), ONE)
    assert has_capacity(WorkerUsage(load(running=16, paused=1), 17, started=17), ONE)
    assert not has_capacity(WorkerUsage(load(running=9), 30, started=17), ONE)


def test_promised_times_per_token_take_seats() -> None:
    """With 10 ms a token at 8 sequences and 1 ms for each further, 12 ms hold for 10."""
    speed = WorkerSpeed(tpot_s=0.010, sequence_s=0.001)
    at = WorkerUsage(load(running=8, speed=speed), 8, tpot_s=0.012)
    assert sequence_limit(at) == 10
    assert has_capacity(at, ONE)
    assert not has_capacity(WorkerUsage(load(running=8, speed=speed), 10, tpot_s=0.012), ONE)


def test_what_nobody_could_promise_binds_nobody() -> None:
    """A target that a lone sequence would miss keeps no others out."""
    speed = WorkerSpeed(tpot_s=0.010, sequence_s=0.001)
    assert sequence_limit(WorkerUsage(load(running=8, speed=speed), 8, tpot_s=0.002)) == 16


@given(st.integers(1, 64), st.floats(0.001, 0.1), st.floats(0.0, 0.01), st.floats(0.001, 1.0))
def test_usable_seats_are_from_one_to_all(
    running: int, tpot_s: float, sequence_s: float, target_s: float
) -> None:
    """Whatever is promised and measured, there is a seat, and no more than there are; a looser
    promise never takes more of them."""
    speed = WorkerSpeed(tpot_s=tpot_s, sequence_s=sequence_s)
    at = WorkerUsage(load(running=running, speed=speed), running)
    seats = sequence_limit(at, target_s)
    assert 1 <= seats <= 16
    alone_s = tpot_s - sequence_s * (running - 1)
    if alone_s <= target_s:
        assert seats <= sequence_limit(at, target_s * 2)


def test_what_others_sent_takes_seats_and_turns() -> None:
    """Of a worker that several gateways use: its own figures count where they are more."""
    at = WorkerUsage(load(running=10, waiting=6), 8, started=8, others=8, gateways=2)
    assert not has_capacity(at, CapacityNeed(2, 10, 20))
    assert has_capacity(replace(at, load=load(running=9, waiting=6), others=7), ONE)
    ahead = load(running=2, prompt_tokens=STEPS_AHEAD * 512)
    assert has_capacity(WorkerUsage(ahead, 2), ONE)
    assert not has_capacity(WorkerUsage(ahead, 1, others=1, gateways=2), ONE)


@given(
    st.integers(0, 200), st.integers(0, 200), st.integers(0, 300), st.integers(1, 64),
    st.integers(2, 8), st.integers(1, 40),
)  # fmt: skip
def test_others_leave_a_gateway_its_share(
    running: int, waiting: int, own: int, seats: int, gateways: int, sequences: int
) -> None:
    """However much others send, who has less than its share of the seats there has room, and who
    has nothing there may send one request, however large."""
    others = max(0, running + waiting - own)
    at = WorkerUsage(
        load(max_sequences=seats, running=running, waiting=waiting), own, own, 0, None, others
    )
    at = replace(at, gateways=gateways)
    need = CapacityNeed(sequences, 100, 200)
    if own == 0 or own + sequences <= seats // gateways:
        assert has_capacity(at, need)
    if others and own > seats // 2 + seats // 16 and own + others >= 2 * seats:
        assert not has_capacity(at, need)


def test_a_promised_time_leaves_a_gateway_its_share_of_what_is_left() -> None:
    """Fewer seats keep a promise; others have no more of these than their part."""
    speed = WorkerSpeed(tpot_s=0.02, sequence_s=0.001)
    there = load(max_sequences=64, running=40, speed=speed)
    at = WorkerUsage(there, 1, 1, 0, 0.02, 39, gateways=4)
    assert sequence_limit(at, 0.02) == 40
    assert has_capacity(at, CapacityNeed(1, 10, 20, 0.02))
