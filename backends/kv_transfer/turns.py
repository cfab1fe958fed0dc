"""The turns of a worker's thread that transfer KV blocks, between its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from draftgate.backends.kv_transfer.exchange import KvExchange, KvOperation, KvResult

SERVING_SHARE: Final = 0.03
"""Share of the time that a transfer may take from the steps of a busy worker. A move may lengthen a
step by at most 3%, which is below the noise of steps. (Chosen as the acceptable loss, not tuned,
2026-11-23.)"""

MOST_SHARE: Final = 0.25
"""Share of the time that all transfers together may take. Several transfers run at once while a
worker drains, and should then end soon. (Chosen, not tuned, 2026-11-23.)"""

QueuedOperation = tuple[KvOperation, Callable[[KvResult], None]]
"""An operation, and the receiver of its result."""


class TransferTurns:
    """Runs queued operations, one at a time.

    While the worker is idle, operations follow each other without a pause. Between the steps of a
    busy worker, each operation must first be earned: after an operation of 0.3 ms, the next one
    waits for 10 ms. With four waiting operations it waits for a fourth of this time.
    """

    def __init__(
        self,
        exchange: KvExchange,
        queue: deque[QueuedOperation],
        clock: Callable[[], float],
    ) -> None:
        """Run the operations of a queue to which any thread may append."""
        self._exchange = exchange
        self._queue = queue
        self._clock = clock
        self._next_s = 0.0  # earliest time of the next operation of a busy worker

    def take(self, *, idle: bool) -> bool:
        """Run the next operation if it may run now, and return whether it did."""
        if not self._queue:
            return False
        begun_s = self._clock()
        if not idle and begun_s < self._next_s:
            return False
        operation, done = self._queue.popleft()
        done(self._exchange.run(operation, begun_s))
        ended_s = self._clock()
        share = min(SERVING_SHARE * max(len(self._queue), 1), MOST_SHARE)
        self._next_s = ended_s + (ended_s - begun_s) / share
        return True
