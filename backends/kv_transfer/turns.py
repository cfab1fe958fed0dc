"""The turns between a worker's steps in which its thread transfers KV blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from draftgate.backends.kv_transfer.exchange import CountBlocks, KvExchange, KvOperation, KvResult

SERVING_SHARE: Final = 0.03
"""Share of its time that a busy worker spends on transfers. They may lengthen a step by at most 3%,
which is below the noise of steps. (Chosen as the acceptable loss, not tuned, 2026-11-23.)"""

URGENT_SHARE: Final = 0.5
"""Share of its time that a busy worker spends on urgent transfers, which empty a worker. Both
workers then compute half as fast, until the streams have moved. (Chosen, not tuned, 2026-11-23.)"""

TURN_S: Final = 4e-3
"""Time in seconds after which a turn ends, so that no delta waits for more than 5 ms. At steps of
40 ms, urgent transfers still copy 0.3 GB/s. (Chosen as the acceptable pause, 2026-11-23.)"""

QueuedOperation = tuple[KvOperation, Callable[[KvResult], None]]
"""An operation, and the receiver of its result."""


class TransferTurns:
    """Runs queued operations.

    While the worker is idle, operations follow each other without a pause. After each step of a
    busy worker, operations run for a share of the time of the step, and for at most `TURN_S`. An
    operation that takes longer shortens the next turns.
    """

    def __init__(
        self,
        exchange: KvExchange | None,
        queue: deque[QueuedOperation],
        clock: Callable[[], float],
    ) -> None:
        """Run the operations of a queue to which any thread may append.

        Args:
            exchange: runs the operations, or None if the worker has no KV blocks, so that no node
                queues any.
        """
        self._exchange = exchange
        self._queue = queue
        self._clock = clock
        self._last_s = clock()  # end of the last turn
        self._unspent_s = 0.0  # time of steps of which transfers have not had their share

    def take_idle(self) -> bool:
        """Run the operations of an idle worker for one turn, and return whether there were any."""
        ran, now_s = bool(self._queue), self._clock()
        until_s = now_s + TURN_S
        while self._queue and now_s < until_s:
            now_s = self._run(now_s)
        self._unspent_s, self._last_s = 0.0, now_s
        return ran

    def take_busy(self) -> None:
        """Run the operations for which a busy worker has time after its step."""
        now_s = self._clock()
        self._unspent_s = min(self._unspent_s, 0.0) + now_s - self._last_s
        until_s = now_s + TURN_S
        while self._queue and self._unspent_s > 0.0 and now_s < until_s:
            share, begun_s = _share(self._queue[0][0]), now_s
            now_s = self._run(begun_s)
            self._unspent_s -= (now_s - begun_s) / share
        self._last_s = now_s

    def _run(self, begun_s: float) -> float:
        assert self._exchange is not None
        operation, done = self._queue.popleft()
        done(self._exchange.run(operation, begun_s))
        return self._clock()


def _share(operation: KvOperation) -> float:
    urgent = not isinstance(operation, CountBlocks) and operation.urgent
    return URGENT_SHARE if urgent else SERVING_SHARE
