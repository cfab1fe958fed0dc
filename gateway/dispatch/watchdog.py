"""The watchdog, which detects workers and streams without progress and ends the wait for them.

The watchdog checks all workers with open streams once a second, and `policies.resilience.liveness`
decides which are lost. It ignores paused streams. It also ignores a stream whose reader does not
wait for the next delta, because that reader still has deltas to process or its client is slow.
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import Context
from typing import Final

from draftgate.backends.errors import BackendFailed, WorkerStalled
from draftgate.backends.types import Pace
from draftgate.gateway.dispatch.run import Run
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.logs import log
from draftgate.policies.resilience.liveness import StreamSilence, WorkerSilence
from draftgate.policies.types import WorkerLoad

CHECK_INTERVAL_S: Final = 1.0
"""Interval of the checks.

The interval is well below the time after which a worker counts as lost. A check of a worker costs
about as much as one delta of each of its streams."""


class Reading:
    """The state of reading one prompt's deltas from a worker, the base of `hold.Hold`.

    Attributes:
        waiting: whether the reader waits for the next delta.
        num_deltas: number of deltas so far.
        decodes: whether a choice has its first token from this worker.
    """

    worker: FleetWorker
    run: Run
    waiting = decodes = False
    num_deltas = 0
    _reader: asyncio.Task[object] | None = None
    _interruption: BackendFailed | None = None
    _silence: StreamSilence | None = None

    def begin(self) -> None:
        """Start before the first delta. The current task reads the deltas."""
        self.waiting = self.decodes = False
        self.num_deltas = 0
        self._reader = asyncio.current_task()
        self._interruption = self._silence = None

    @property
    def is_owed(self) -> bool:
        """Whether the worker owes a delta."""
        return self.waiting and self.run.pace is not Pace.PAUSED

    def check(self, load: WorkerLoad) -> None:
        """Interrupt the reader if its stream is lost although the worker makes progress."""
        runs = self.is_owed and self.decodes and self.run.pace is Pace.FULL
        if self._silence is None:
            self._silence = StreamSilence()
        if self._silence.check(self.num_deltas, load, CHECK_INTERVAL_S, runs=runs):
            silent = "the worker sent no more deltas for a running stream"
            self.interrupt(WorkerStalled(silent))

    def interrupt(self, error: BackendFailed) -> None:
        """Make the reader raise an error, if it waits."""
        if self.waiting and self._reader is not None:
            self._interruption, self.waiting = error, False
            self._reader.cancel()

    def interruption(self) -> BackendFailed | None:
        """Return the error for a reader that `interrupt` has cancelled, or None.

        A simultaneous cancellation from elsewhere takes precedence, as in `asyncio.timeout`.
        """
        task = asyncio.current_task()
        if self._interruption is None or task is None or task.uncancel() > 0:
            return None
        return self._interruption


class _Watched:
    """A worker and its readers."""

    def __init__(self, worker: FleetWorker) -> None:
        self.worker = worker
        self.readings: dict[Reading, None] = {}
        self._silence = WorkerSilence()

    @property
    def is_over(self) -> bool:
        """Whether the watchdog can stop checking the worker."""
        return not self.readings and not self.worker.hung

    def check(self) -> None:
        if self.worker.backend.failure is not None:  # the streams of the worker get its error
            self.worker.hung, self._silence = False, WorkerSilence()
            return
        load, readings = self.worker.backend.load(), tuple(self.readings)
        owes = any(reading.is_owed for reading in readings)
        self._set_hung(self._silence.check(load, CHECK_INTERVAL_S, owes=owes))
        for reading in readings:
            if self.worker.hung and reading.is_owed:
                reading.interrupt(WorkerStalled("the worker completes no further step"))
            else:
                reading.check(load)

    def _set_hung(self, hung: bool) -> None:
        """Set whether the worker hangs, and log changes."""
        if hung and not self.worker.hung:
            log(logging.ERROR, "worker hangs", worker=self.worker.worker_id)
        elif self.worker.hung and not hung:
            log(logging.INFO, "worker makes progress again", worker=self.worker.worker_id)
        self.worker.hung = hung


class Watchdog:
    """The watchdog of a node's streams.

    Use the object only on the thread of the event loop.
    """

    def __init__(self) -> None:
        self._watched: dict[FleetWorker, _Watched] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, reading: Reading) -> None:
        """Watch a stream of a worker, which the current task reads, until `unwatch`."""
        reading.begin()
        worker = reading.worker
        watched = self._watched.get(worker)
        if watched is None:
            watched = self._watched[worker] = _Watched(worker)
        watched.readings[reading] = None
        if self._timer is None:
            self._schedule()

    def unwatch(self, reading: Reading) -> None:
        """Stop watching a stream."""
        del self._watched[reading.worker].readings[reading]

    def _check_all(self) -> None:
        self._timer = None
        try:
            for worker, watched in tuple(self._watched.items()):
                watched.check()
                if watched.is_over:
                    del self._watched[worker]
        finally:
            self._schedule()

    def _schedule(self) -> None:
        if self._watched and self._timer is None:
            loop = asyncio.get_running_loop()
            # An empty context keeps request ids out of the log lines.
            self._timer = loop.call_later(CHECK_INTERVAL_S, self._check_all, context=Context())
