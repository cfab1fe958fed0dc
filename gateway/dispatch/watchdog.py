"""The watchdog: who waits for a worker that makes no progress is waked, and goes on elsewhere.

It looks once a second, as long as there is something to look at, at the workers which somebody
reads; `policies.resilience.liveness` decides what is lost. A stream whose reader does not wait for
the next delta is let be: it has some to read, or its client does not take what it was sent. So is
one that is paused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any, Final

from draftgate.backends.errors import WorkerStalled
from draftgate.backends.types import Pace
from draftgate.gateway.dispatch.run import Run
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.telemetry.logs import log
from draftgate.policies.resilience.liveness import StreamSilence, WorkerSilence
from draftgate.policies.types import WorkerLoad

LOOK_S: Final = 1.0
"""Between two looks, and what each counts for. Well below the patience, and a look at a worker and
its streams costs about as much as a delta of each."""


class Reading:
    """Somebody reads what a worker says of one prompt.

    Attributes:
        deltas: that have come.
        decodes: whether a choice has its first token from this worker.
        reader: the task that waits for the next delta, while it does.
    """

    __slots__ = ("_run", "_silence", "_stalled", "decodes", "deltas", "reader")

    def __init__(self, run: Run) -> None:
        """Begin before anything came."""
        self._run = run
        self.deltas = 0
        self.decodes = False
        self.reader: asyncio.Task[Any] | None = None
        self._stalled: str | None = None
        self._silence = StreamSilence()

    def waits(self) -> None:
        """Note that this task waits for the next delta; whoever gets that clears `reader`."""
        self.reader = asyncio.current_task()

    @property
    def is_owed(self) -> bool:
        """Whether the worker has to go on for it."""
        return self.reader is not None and self._run.pace is not Pace.PAUSED

    def look(self, load: WorkerLoad) -> None:
        """Wake the reader if its stream is lost, though the worker goes on."""
        runs = self.is_owed and self.decodes and self._run.pace is Pace.FULL
        if self._silence.look(self.deltas, load, LOOK_S, runs=runs):
            self.wake("nothing more came of a stream that it runs")

    def wake(self, reason: str) -> None:
        """Let whoever waits have `WorkerStalled`."""
        reader = self.reader
        if reader is not None:
            self._stalled, self.reader = reason, None
            reader.cancel()

    def stalled(self) -> WorkerStalled | None:
        """Return what a reader that was cancelled ends with; None if it was not waked from here.

        As `asyncio.timeout` does: a cancel that came from elsewhere at the same time wins.
        """
        task = asyncio.current_task()
        if self._stalled is None or task is None or task.uncancel() > 0:
            return None
        return WorkerStalled(self._stalled)


class _Watched:
    """A worker, and who reads it."""

    def __init__(self, worker: FleetWorker) -> None:
        self.worker = worker
        self.readings: dict[Reading, None] = {}
        self._silence = WorkerSilence()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to look at."""
        return not self.readings and not self.worker.hung

    def look(self) -> None:
        if self.worker.backend.failure is not None:  # its streams hear it from itself
            self.worker.hung, self._silence = False, WorkerSilence()
            return
        load, readings = self.worker.backend.load(), tuple(self.readings)
        owes = any(reading.is_owed for reading in readings)
        self._note(self._silence.look(load, LOOK_S, owes=owes))
        for reading in readings:
            if self.worker.hung and reading.is_owed:
                reading.wake("it comes to no further step")
            else:
                reading.look(load)

    def _note(self, hung: bool) -> None:
        """Note whether the worker is hung; what is new is logged."""
        if hung and not self.worker.hung:
            log(logging.ERROR, "worker is hung", worker=self.worker.worker_id)
        elif self.worker.hung and not hung:
            log(logging.INFO, "worker is tried again", worker=self.worker.worker_id)
        self.worker.hung = hung


class Watchdog:
    """Looks at the streams of a node. Use on the event loop's thread."""

    def __init__(self) -> None:
        """Begin with nothing to look at."""
        self._watched: dict[FleetWorker, _Watched] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watching(self, worker: FleetWorker, run: Run) -> Iterator[Reading]:
        """Watch a stream of a worker while the context lasts.

        Raises:
            WorkerStalled: instead of a cancel, if the reader was waked from here.
        """
        watched = self._watched.get(worker)
        if watched is None:
            watched = self._watched[worker] = _Watched(worker)
        reading = Reading(run)
        watched.readings[reading] = None
        self._go_on()
        try:
            yield reading
        except asyncio.CancelledError:
            stalled = reading.stalled()
            if stalled is None:
                raise
            raise stalled from None
        finally:
            del watched.readings[reading]

    def _look(self) -> None:
        self._timer = None
        try:
            for worker, watched in tuple(self._watched.items()):
                watched.look()
                if watched.is_over:
                    del self._watched[worker]
        finally:
            self._go_on()

    def _go_on(self) -> None:
        if self._watched and self._timer is None:
            loop = asyncio.get_running_loop()
            # In a context of its own: what it logs concerns no request.
            self._timer = loop.call_later(LOOK_S, self._look, context=Context())
