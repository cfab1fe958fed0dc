"""Capacity: whether a worker can take another request."""

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
    """Return the load of a worker with 16 sequences and memory for 1,600 tokens."""
    given = {"max_sequences": 16, "step_tokens": 512, "kv_blocks_free": 100, "kv_blocks_total": 100}
    values = {"running": 0, "waiting": 0, "price": 0.0, "acceptance": 0.5, "proposers": ()}
    return WorkerLoad(**{**values, **given, **fields})


ONE = CapacityNeed(1, 100, 200)


def test_empty_worker_takes_any_request() -> None:
    """An empty worker accepts a request that has more choices or prompt tokens than fit."""
    assert has_capacity(WorkerUsage(load()), CapacityNeed(40, 100_000, 200_000))


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (WorkerUsage(load(), 15), True),
        (WorkerUsage(load(), 16), True),  # one more sequence waits on the worker
        (WorkerUsage(load(), 17), False),
        (WorkerUsage(load(max_sequences=15), 15), False),
        (
            # Paused sequences take no capacity.
            WorkerUsage(load(running=15, paused=2), 17, 17),
            True,
        ),
        (WorkerUsage(load(running=17, paused=2_000), 2_017, 2_017), False),
        (WorkerUsage(load(), 3, 0, STEPS_AHEAD * 512 - 1), True),
        (WorkerUsage(load(), 3, 0, STEPS_AHEAD * 512), False),
        (WorkerUsage(load(kv_blocks_free=6), 3), False),
        (WorkerUsage(load(kv_blocks_free=7), 3), True),
        # Preempted sequences and moves get their memory first.
        (WorkerUsage(load(kv_blocks_free=17, head_tokens=160), 3), True),
        (WorkerUsage(load(kv_blocks_free=17, head_tokens=176), 3), False),
        (WorkerUsage(load(kv_blocks_free=17), 3, arriving_tokens=160), True),
        (WorkerUsage(load(kv_blocks_free=17), 3, arriving_tokens=176), False),
        (WorkerUsage(load(max_sequences=0), 10_000), True),
        # Sequences of other gateways take capacity.
        (WorkerUsage(load(running=15, others=5), 11), True),
        (WorkerUsage(load(running=17, others=5), 12), False),
        # Other gateways leave half of the capacity.
        (WorkerUsage(load(running=40, others=33), 8), True),
        (WorkerUsage(load(running=42, others=33), 9), False),
        (WorkerUsage(load(max_sequences=0, running=500, others=490), 10), True),
        (WorkerUsage(load(kv_blocks_free=0, kv_blocks_total=0), 3), True),
    ],
)
def test_sequences_steps_and_memory_limit_requests(usage: WorkerUsage, expected: bool) -> None:
    """Sequences, steps and memory limit the requests of a worker unless a limit is unknown."""
    assert has_capacity(usage, ONE) is expected


def test_paused_and_finished_sequences_take_no_capacity() -> None:
    """A worker counts only the started sequences that it still computes."""
    assert not has_capacity(WorkerUsage(load(running=17), 17, started=17), ONE)
    assert has_capacity(WorkerUsage(load(running=9), 17, started=17), ONE)
    assert has_capacity(WorkerUsage(load(running=16, paused=1), 17, started=17), ONE)
    assert not has_capacity(WorkerUsage(load(running=9), 30, started=17), ONE)


def test_tpot_target_lowers_the_sequence_limit() -> None:
    """A target of 12 ms allows 10 sequences when 8 sequences take 10 ms and each further
    one 1 ms."""
    speed = WorkerSpeed(tpot_s=0.010, sequence_s=0.001)
    usage = WorkerUsage(load(running=8, speed=speed), 8, tpot_s=0.012)
    assert sequence_limit(usage) == 10
    assert has_capacity(usage, ONE)
    assert not has_capacity(WorkerUsage(load(running=8, speed=speed), 10, tpot_s=0.012), ONE)


def test_unattainable_tpot_target_is_ignored() -> None:
    """A target that a lone sequence would miss does not exclude other sequences."""
    speed = WorkerSpeed(tpot_s=0.010, sequence_s=0.001)
    assert sequence_limit(WorkerUsage(load(running=8, speed=speed), 8, tpot_s=0.002)) == 16


@given(st.integers(1, 64), st.floats(0.001, 0.1), st.floats(0.0, 0.01), st.floats(0.001, 1.0))
def test_sequence_limit_is_between_one_and_the_capacity(
    running: int, tpot_s: float, sequence_s: float, target_s: float
) -> None:
    """A looser target never lowers the limit."""
    speed = WorkerSpeed(tpot_s=tpot_s, sequence_s=sequence_s)
    usage = WorkerUsage(load(running=running, speed=speed), running)
    limit = sequence_limit(usage, target_s)
    assert 1 <= limit <= 16
    alone_s = tpot_s - sequence_s * (running - 1)
    if alone_s <= target_s:
        assert limit <= sequence_limit(usage, target_s * 2)


def test_requests_of_other_gateways_take_capacity() -> None:
    """A worker's own counts apply if they exceed the counts of the gateway."""
    usage = WorkerUsage(load(running=10, waiting=6), 8, started=8, others=8, gateways=2)
    assert not has_capacity(usage, CapacityNeed(2, 10, 20))
    assert has_capacity(replace(usage, load=load(running=9, waiting=6), others=7), ONE)
    ahead = load(running=2, prompt_tokens=STEPS_AHEAD * 512)
    assert has_capacity(WorkerUsage(ahead, 2), ONE)
    assert not has_capacity(WorkerUsage(ahead, 1, others=1, gateways=2), ONE)


@given(
    st.integers(0, 200), st.integers(0, 200), st.integers(0, 300), st.integers(1, 64),
    st.integers(2, 8), st.integers(1, 40),
)  # fmt: skip
def test_other_gateways_leave_each_gateway_its_share(
    running: int, waiting: int, own: int, limit: int, gateways: int, sequences: int
) -> None:
    """A gateway below its share has capacity. A gateway without requests may send any request."""
    others = max(0, running + waiting - own)
    usage = WorkerUsage(
        load(max_sequences=limit, running=running, waiting=waiting), own, own, 0, None, others
    )
    usage = replace(usage, gateways=gateways)
    need = CapacityNeed(sequences, 100, 200)
    if own == 0 or own + sequences <= limit // gateways:
        assert has_capacity(usage, need)
    if others and own > limit // 2 + limit // 16 and own + others >= 2 * limit:
        assert not has_capacity(usage, need)


def test_tpot_target_lowers_the_shares_of_all_gateways() -> None:
    """A target lowers the sequence limit, and other gateways receive at most their share."""
    speed = WorkerSpeed(tpot_s=0.02, sequence_s=0.001)
    report = load(max_sequences=64, running=40, speed=speed)
    usage = WorkerUsage(report, 1, 1, 0, 0.02, 39, gateways=4)
    assert sequence_limit(usage, 0.02) == 40
    assert has_capacity(usage, CapacityNeed(1, 10, 20, 0.02))
