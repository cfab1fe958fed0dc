"""The time that transfers of KV blocks take from the steps of a worker."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.kv_transfer.exchange import BlockCount, ExportBlocks
from draftgate.backends.kv_transfer.turns import (
    SERVING_SHARE,
    TURN_S,
    URGENT_SHARE,
    QueuedOperation,
    TransferTurns,
)


class TimedExchange:
    """An exchange whose operations take a given time of a manual clock."""

    def __init__(self, operation_s: float) -> None:
        self.now_s = 100.0
        self.spent_s = 0.0
        self._operation_s = operation_s

    def run(self, operation, now_s):
        assert now_s == self.now_s
        self.now_s += self._operation_s
        self.spent_s += self._operation_s
        return BlockCount(len(operation.hashes))


def turns_of(
    exchange: TimedExchange, operations: int, *, urgent: bool = False
) -> tuple[TransferTurns, list[BlockCount], deque[QueuedOperation]]:
    results: list[BlockCount] = []
    names = ((b"",) * n for n in range(operations))
    queue = deque((ExportBlocks(hashes, urgent), results.append) for hashes in names)
    return TransferTurns(exchange, queue, lambda: exchange.now_s), results, queue


@given(
    operation_s=st.floats(1e-5, 5e-3),
    steps=st.lists(st.floats(1e-3, TURN_S / URGENT_SHARE), min_size=1, max_size=200),
    urgent=st.booleans(),
)
def test_busy_worker_spends_its_share_on_transfers(
    operation_s: float, steps: list[float], *, urgent: bool
) -> None:
    """Transfers take 3% of the time of the steps, or half of it if they are urgent, to within one
    operation."""
    exchange = TimedExchange(operation_s)
    turns, _, queue = turns_of(exchange, 1, urgent=urgent)
    share = URGENT_SHARE if urgent else SERVING_SHARE
    for step_s in steps:
        exchange.now_s += step_s
        queue.extend([(ExportBlocks((), urgent), lambda _: None)] * (int(step_s / operation_s) + 1))
        turns.take_busy()
    earned_s = share * sum(steps)
    assert earned_s - 1e-9 <= exchange.spent_s <= earned_s + operation_s + 1e-9


@given(
    operation_s=st.floats(1e-5, 1e-3),
    steps=st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=20),
    urgent=st.booleans(),
)
def test_turn_of_a_busy_worker_is_short(
    operation_s: float, steps: list[float], *, urgent: bool
) -> None:
    """A turn ends with the operation during which its time limit passes, however long the step
    was."""
    exchange = TimedExchange(operation_s)
    turns, _, queue = turns_of(exchange, 0)
    for step_s in steps:
        exchange.now_s += step_s
        queue.extend([(ExportBlocks((), urgent), lambda _: None)] * 500)
        begun_s = exchange.now_s
        turns.take_busy()
        assert exchange.now_s - begun_s <= TURN_S + operation_s + 1e-9


def test_long_serving_earns_no_burst() -> None:
    """Time without a queued operation does not count."""
    exchange = TimedExchange(1e-3)
    turns, results, queue = turns_of(exchange, 0)
    exchange.now_s += 3600.0
    turns.take_busy()
    queue.extend([(ExportBlocks(()), results.append)] * 10)
    exchange.now_s += 0.01
    turns.take_busy()
    assert len(results) == 1


def test_idle_worker_transfers_without_a_pause() -> None:
    """An idle worker runs all operations in order, and then has nothing to do."""
    exchange = TimedExchange(1e-3)
    turns, results, _ = turns_of(exchange, 5)
    while turns.take_idle():
        pass
    assert exchange.now_s == pytest.approx(100.005)
    assert [result.blocks for result in results] == [0, 1, 2, 3, 4]
