"""The worker's thread: runs commands and steps, and reports deltas.

This thread makes all torch calls of a worker. The event loop only appends commands and receives a
single batch of deltas per step. Engines of one device take turns (`device_turns.py`). While the
thread waits for its turn, it runs commands, so that an urgent request counts immediately.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from draftgate.backends.core.pipeline import Pipeline
from draftgate.backends.engine.device_turns import EngineTurns
from draftgate.backends.engine.served import THREAD_NAME, ServedModel
from draftgate.backends.errors import BackendError
from draftgate.backends.kv_transfer.exchange import KvOperation, KvResult
from draftgate.backends.kv_transfer.turns import QueuedOperation, TransferTurns
from draftgate.backends.types import Delta, GenerationRequest, Pace
from draftgate.policies.turns import StepUrgency
from draftgate.policies.types import WorkerLoad

if TYPE_CHECKING:
    from draftgate.backends.engine.loaded import LoadedEngine

logger = logging.getLogger(__name__)

LOADING_ERRORS: Final = (BackendError, ValueError, ImportError)
"""Loading errors that need no traceback: a bad model or setting, or a missing package."""

SAVE_EVERY_S: Final = 600.0
"""Seconds after which a busy worker stores what it has learned, so that little is lost if it does
not stop cleanly. (Chosen. Writing takes milliseconds.)"""


class _Stopped(Exception):
    """The loop was stopped while it loads."""


class LoopEvents(Protocol):
    """Receives the reports of the worker's thread.

    The thread calls these methods, so they must return immediately.
    """

    def loading(self, share: float) -> None:
        """Report that loading has reached this share, 0 to 1."""
        ...

    def ready(self, served: ServedModel) -> None:
        """Report that the model is loaded and warm."""
        ...

    def stepped(self, batch: list[tuple[str, Delta]], load: WorkerLoad) -> None:
        """Report the deltas of a step and the load after the step. An idle worker has no deltas."""
        ...

    def adapter_failed(self, request_id: str, reason: str) -> None:
        """Report that a request has ended, because its adapter cannot be loaded."""
        ...

    def failed(self, error: BaseException) -> None:
        """Report that loading or a step failed. The thread ends after this call."""
        ...


class EngineLoop(threading.Thread):
    """Loads an engine and runs its steps until stopped.

    Any thread may call `submit`, `cancel`, `set_pace`, `exchange` and `stop`.

    The engine's thread calls `load` with a function that reports progress.
    """

    def __init__(
        self, load: Callable[[Callable[[float], None]], LoadedEngine], events: LoopEvents
    ) -> None:
        super().__init__(name=THREAD_NAME, daemon=True)
        self._load = load
        self._events = events
        self._commands: deque[Callable[[LoadedEngine], None]] = deque()
        self._transfers: deque[QueuedOperation] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._turns: EngineTurns | None = None  # from the end of loading on
        self._reported = False  # whether the load of the idle worker is reported
        self._saved_s = time.monotonic()

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request."""
        arrived_s = time.monotonic()

        def command(engine: LoadedEngine) -> None:
            if request.adapter and engine.adapters is not None:
                engine.adapters.submit(request, arrived_s)
            else:
                engine.worker.submit(request, arrived_s)
            if engine.recording is not None:
                engine.recording.begin(request)

        self._queue(command)

    def cancel(self, request_id: str) -> None:
        """End a request before the next step, unless the request has already ended."""

        def command(engine: LoadedEngine) -> None:
            engine.worker.cancel(request_id)
            if engine.adapters is not None:
                engine.adapters.cancel(request_id)
            if engine.recording is not None:
                engine.recording.cancel(request_id)

        self._queue(command)

    def set_pace(self, request_id: str, pace: Pace, tpot_s: float = 0.0) -> None:
        """Change a request's pace before the next step, unless the request has already ended."""

        def command(engine: LoadedEngine) -> None:
            engine.worker.set_pace(request_id, pace, tpot_s)
            if engine.adapters is not None:
                engine.adapters.set_pace(request_id, pace, tpot_s)

        self._queue(command)

    def exchange(self, operation: KvOperation, done: Callable[[KvResult], None]) -> None:
        """Queue an operation on the KV blocks, which runs when transfers have their turn.

        Args:
            operation: what to do.
            done: receives the result in the engine's thread, and must return immediately.
        """
        with self._wake:
            self._transfers.append((operation, done))
            self._wake.notify()

    def stop(self) -> None:
        """End the thread after the step in progress, or at the next progress of loading.

        Further calls have no effect.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._turns is not None:
            self._turns.leave()  # a step that hangs stops no other engine

    def run(self) -> None:
        """Load, then run steps until stopped. Report any error through `LoopEvents.failed`."""
        engine = None
        try:
            engine = self._load(self._report_loading)
            self._events.loading(1.0)
            self._events.stepped([], engine.load())
            self._events.ready(engine.served)
            self._run_steps(engine)
            engine.save_learned()
        except _Stopped:
            return
        except BaseException as error:
            # The messages of loading errors need no traceback.
            if engine is not None or not isinstance(error, LOADING_ERRORS):
                logger.exception("the engine failed")
            self._events.failed(error)
        finally:
            if self._turns is not None:
                self._turns.leave()
            if engine is not None:
                engine.close()

    def _save_if_due(self, engine: LoadedEngine) -> None:
        now_s = time.monotonic()
        if now_s - self._saved_s >= SAVE_EVERY_S:
            self._saved_s = now_s
            engine.save_learned()

    def _report_loading(self, share: float) -> None:
        """Report the progress of loading, or end loading if the loop was stopped."""
        if self._stopping:
            raise _Stopped
        self._events.loading(share)

    def _queue(self, command: Callable[[LoadedEngine], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run_steps(self, engine: LoadedEngine) -> None:
        worker = engine.worker

        def deliver(batch: list[tuple[str, Delta]]) -> None:
            self._events.stepped(batch, engine.load())
            self._save_if_due(engine)
            if engine.recording is not None:
                engine.recording.observe(batch)
            if engine.unused_memory is not None:
                engine.unused_memory.note_step()
                engine.unused_memory.release(time.monotonic())

        def urgency() -> StepUrgency | None:
            self._run_commands(engine)
            return worker.urgency(time.monotonic())

        def reject(request_id: str, reason: str) -> None:
            if engine.recording is not None:
                engine.recording.cancel(request_id)
            self._events.adapter_failed(request_id, reason)

        if engine.adapters is not None:
            engine.adapters.connect(self._run_later, reject)
        self._turns = engine.turns.join(urgency, self._wake_up)
        pipeline = Pipeline(
            worker, engine.executor, deliver, engine.executor.launcher, time.monotonic, self._turns
        )
        transfers = TransferTurns(engine.exchange, self._transfers, time.monotonic)
        while not self._stopping:
            self._run_commands(engine)
            if pipeline.step():
                transfers.take_busy()
                self._reported = False
            elif not transfers.take_idle():  # transfers keep the load
                if not self._reported:
                    self._events.stepped([], engine.load())
                self._reported = True
                self._sleep(_release_unused(engine))

    def _run_later(self, function: Callable[[], None]) -> None:
        """Run a function in this thread, between two steps."""
        self._queue(lambda _engine: function())

    def _run_commands(self, engine: LoadedEngine) -> None:
        """Run the queued commands."""
        while self._commands:
            self._commands.popleft()(engine)
            self._reported = False
        if engine.adapters is not None:
            engine.adapters.admit()

    def _wake_up(self) -> None:
        with self._wake:
            self._wake.notify()

    def _sleep(self, timeout_s: float | None) -> None:
        """Wait for a command, a transfer, a turn or the end, or for `timeout_s`."""
        turns = self._turns
        assert turns is not None

        def wanted() -> bool:
            return bool(self._commands or self._transfers or self._stopping or turns.held)

        with self._wake:
            self._wake.wait_for(wanted, timeout_s)


def _release_unused(engine: LoadedEngine) -> float | None:
    """Return unused memory of an idle worker, and the seconds until there may be more, or None."""
    memory, now_s = engine.unused_memory, time.monotonic()
    if memory is None:
        return None
    memory.release(now_s)
    return memory.due_in_s(now_s)
