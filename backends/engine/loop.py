"""The worker's thread: takes commands, runs steps and reports deltas.

All torch calls of a worker happen in this thread. The event loop only appends commands and receives
one batch of deltas per step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from draftgate.backends.core.pipeline import Pipeline
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.engine.served import ServedModel
from draftgate.backends.errors import BackendError
from draftgate.backends.types import Delta, GenerationRequest, Pace
from draftgate.policies.types import WorkerLoad

if TYPE_CHECKING:
    from draftgate.backends.engine.load import LoadedEngine

logger = logging.getLogger(__name__)

LOADING_ERRORS: Final = (BackendError, ValueError, ImportError)
"""Errors of loading that need no traceback: a bad model or setting, or a missing package."""


class LoopEvents(Protocol):
    """Receives the thread's reports. Methods run in the worker's thread and must return at once."""

    def loading(self, share: float) -> None:
        """Loading has reached this share, 0 to 1."""
        ...

    def ready(self, served: ServedModel) -> None:
        """The model is loaded and warm."""
        ...

    def stepped(self, batch: list[tuple[str, Delta]], load: WorkerLoad) -> None:
        """A step is complete, with the load after it; the batch is empty if the worker is idle."""
        ...

    def failed(self, error: BaseException) -> None:
        """Loading or a step failed; the thread ends."""
        ...


class EngineLoop(threading.Thread):
    """Loads an engine and runs its steps until stopped."""

    def __init__(
        self, load: Callable[[Callable[[float], None]], LoadedEngine], events: LoopEvents
    ) -> None:
        """Store the arguments. `load` runs in the thread; its argument reports progress."""
        super().__init__(name="draftgate-engine", daemon=True)
        self._load = load
        self._events = events
        self._commands: deque[Callable[[WorkerCore], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Any thread."""
        came_s = time.monotonic()
        self._command(lambda worker: worker.submit(request, came_s))

    def cancel(self, request_id: str) -> None:
        """End a request before the next step; no-op if it has ended. Any thread."""
        self._command(lambda worker: worker.cancel(request_id))

    def set_pace(self, request_id: str, pace: Pace) -> None:
        """Change a request's pace before the next step; no-op if it has ended. Any thread."""
        self._command(lambda worker: worker.set_pace(request_id, pace))

    def stop(self) -> None:
        """Let the thread end after the step in progress. Any thread; idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def run(self) -> None:
        """Load, then run steps until stopped. Errors are reported, never raised."""
        engine = None
        try:
            engine = self._load(self._events.loading)
            self._events.loading(1.0)
            self._events.stepped([], engine.worker.load())
            self._events.ready(engine.served)
            self._run_steps(engine)
            engine.save_costs()
        except BaseException as error:
            # These errors of loading explain themselves: a traceback would add nothing.
            if engine is not None or not isinstance(error, LOADING_ERRORS):
                logger.exception("the engine failed")
            self._events.failed(error)

    def _command(self, command: Callable[[WorkerCore], None]) -> None:
        """Queue a command for the thread."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run_steps(self, engine: LoadedEngine) -> None:
        worker = engine.worker

        def deliver(batch: list[tuple[str, Delta]]) -> None:
            self._events.stepped(batch, worker.load())

        pipeline = Pipeline(
            worker, engine.executor, deliver, engine.executor.launcher, time.monotonic
        )
        while not self._stopping:
            self._obey(worker)
            if not pipeline.step():
                self._events.stepped([], worker.load())
                self._sleep()

    def _obey(self, worker: WorkerCore) -> None:
        """Run the commands queued since the last step."""
        while self._commands:
            self._commands.popleft()(worker)

    def _sleep(self) -> None:
        with self._wake:
            while not self._commands and not self._stopping:
                self._wake.wait()
