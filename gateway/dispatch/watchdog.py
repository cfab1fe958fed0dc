"""The watchdog, which detects workers and streams without progress and ends the wait for them.

The watchdog checks all workers with open streams once a second, and `policies.resilience.liveness`
decides which are lost. It ignores paused streams.
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import Context
from typing import Final, Protocol

from draftgate.backends.errors import WorkerStalled
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.logs import log
from draftgate.policies.resilience.liveness import (
    UNREACHABLE_PATIENCE_S,
    StreamSilence,
    WorkerSilence,
)

CHECK_INTERVAL_S: Final = 1.0
"""Interval of the checks.

The interval is well below the time after which a worker counts as lost. A check of a worker costs
about as much as one delta of each of its streams."""


class WatchedStream(Protocol):
    """A stream of a worker (`hold.Hold`, `upstreams.kept_stream.KeptStream`).

    Attributes:
        num_deltas: number of deltas so far.
    """

    num_deltas: int

    @property
    def patience_s(self) -> float | None:
        """Silence that counts as a loss, in seconds, or None if it follows from the worker."""
        ...

    @property
    def is_owed(self) -> bool:
        """Whether the worker owes a delta."""
        ...

    @property
    def runs(self) -> bool:
        """Whether the worker owes a delta of each step."""
        ...

    def fail(self, error: Exception) -> None:
        """End the stream with an error."""
        ...


class _Watched:
    """A worker and its streams."""

    def __init__(self, worker: FleetWorker) -> None:
        self.worker = worker
        self.streams: dict[WatchedStream, StreamSilence | None] = {}  # None before a check
        self._silence = WorkerSilence()

    @property
    def is_over(self) -> bool:
        """Whether the watchdog can stop checking the worker."""
        return not self.streams and not self.worker.hung

    def check(self) -> None:
        load, streams = self.worker.backend.load(), tuple(self.streams.items())
        unreachable = self.worker.backend.failure is not None
        if unreachable:
            self.worker.hung, self._silence = False, WorkerSilence()
            # An upstream whose probes fail may keep its connections open. The streams of other
            # workers get the error of the worker.
            streams = tuple(pair for pair in streams if pair[0].patience_s is not None)
        else:
            owes = any(stream.is_owed for stream, _ in streams)
            self._set_hung(self._silence.check(load, CHECK_INTERVAL_S, owes=owes))
        for stream, before in streams:
            if self.worker.hung and stream.is_owed:
                stream.fail(WorkerStalled("the worker completes no further step"))
                continue
            most_s = stream.patience_s
            if unreachable and most_s is not None:
                most_s = min(most_s, UNREACHABLE_PATIENCE_S)
            silence = self.streams[stream] = before or StreamSilence()
            deltas, runs = stream.num_deltas, stream.runs
            if silence.check(deltas, load, CHECK_INTERVAL_S, runs=runs, most_s=most_s):
                silent = "the worker sent no more deltas for a running stream"
                stream.fail(WorkerStalled(silent))

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

    def watch(self, stream: WatchedStream, worker: FleetWorker) -> None:
        """Watch a stream of a worker until `unwatch`."""
        watched = self._watched.get(worker)
        if watched is None:
            watched = self._watched[worker] = _Watched(worker)
        watched.streams[stream] = None
        if self._timer is None:
            self._schedule()

    def unwatch(self, stream: WatchedStream, worker: FleetWorker) -> None:
        """Stop watching a stream of a worker."""
        del self._watched[worker].streams[stream]

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
