"""The time that transfers of KV blocks take from the steps of a worker."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.kv_transfer.exchange import BlockCount, CountBlocks
from draftgate.backends.kv_transfer.turns import (
    MOST_SHARE,
    SERVING_SHARE,
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
    exchange: TimedExchange, operations: int
) -> tuple[TransferTurns, list[BlockCount], deque[QueuedOperation]]:
    results: list[BlockCount] = []
    names = ((b"",) * n for n in range(operations))
    queue = deque((CountBlocks(hashes), results.append) for hashes in names)
    return TransferTurns(exchange, queue, lambda: exchange.now_s), results, queue


@given(
    operation_s=st.floats(1e-5, 5e-3),
    steps=st.lists(st.floats(1e-3, 0.1), min_size=1, max_size=200),
)
def test_busy_worker_spends_at_most_its_share_on_transfers(
    operation_s: float, steps: list[float]
) -> None:
    """One transfer takes at most 3% of the time of the steps, and the first operation."""
    exchange = TimedExchange(operation_s)
    turns, results, queue = turns_of(exchange, 2)
    for step_s in steps:
        exchange.now_s += step_s
        if turns.take(idle=False):
            queue.append((CountBlocks(()), results.append))
    assert results
    assert exchange.spent_s <= operation_s + SERVING_SHARE * sum(steps) + 1e-9


@given(operations=st.integers(1, 60), operation_s=st.floats(1e-5, 5e-3))
def test_several_transfers_share_a_larger_part_of_the_time(
    operations: int, operation_s: float
) -> None:
    """The share of a busy worker grows with the number of waiting operations, up to its limit."""
    exchange = TimedExchange(operation_s)
    turns, _, _ = turns_of(exchange, operations + 1)
    assert turns.take(idle=False)
    share = min(SERVING_SHARE * operations, MOST_SHARE)
    exchange.now_s += operation_s / share * 0.999
    assert not turns.take(idle=False)
    exchange.now_s += operation_s / share * 0.002
    assert turns.take(idle=False)


def test_long_serving_earns_no_burst() -> None:
    """A busy worker runs at most one operation between two steps, however long none was queued."""
    exchange = TimedExchange(1e-3)
    turns, results, _ = turns_of(exchange, 10)
    exchange.now_s += 3600.0
    assert turns.take(idle=False)
    assert not turns.take(idle=False)
    assert len(results) == 1


def test_idle_worker_transfers_without_a_pause() -> None:
    """An idle worker runs all operations in order, and then has nothing to do."""
    exchange = TimedExchange(1e-3)
    turns, results, _ = turns_of(exchange, 5)
    while turns.take(idle=True):
        pass
    assert [result.blocks for result in results] == [0, 1, 2, 3, 4]
    assert exchange.now_s == pytest.approx(100.005)
