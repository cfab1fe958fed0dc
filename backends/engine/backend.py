"""Implements the `Backend` protocol with an engine.

The backend passes requests and deltas between the event loop and the engine's thread. That thread
runs in this process (`loop.py`) or in a process of its own (`process.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from draftgate.backends.base import DeltaSink
from draftgate.backends.engine.loop import LOADING_ERRORS, EngineLoop, LoopEvents
from draftgate.backends.engine.process import EngineProcess
from draftgate.backends.engine.served import ServedModel
from draftgate.backends.errors import AdapterFailed, BackendFailed
from draftgate.backends.framing import Calls
from draftgate.backends.kv_transfer.exchange import KvOperation, KvResult
from draftgate.backends.kv_transfer.transfer import OperatedBlocks
from draftgate.backends.streams import DeltaSinks
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, GenerationRequest, ModelCard, Pace
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import WorkerLoad

if TYPE_CHECKING:
    from draftgate.backends.engine.loaded import LoadedEngine


class EngineHost(Protocol):
    """The thread or process of an engine.

    The host calls `loop.LoopEvents` from its own thread. Any thread may call the host's methods.
    """

    def start(self) -> None:
        """Load the model and run steps. The backend calls this method once."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request before the next step, unless the request has already ended."""
        ...

    def set_pace(self, request_id: str, pace: Pace, tpot_s: float = 0.0) -> None:
        """Change a request's pace before the next step, unless the request has already ended."""
        ...

    def exchange(self, operation: KvOperation, done: Callable[[KvResult], None]) -> None:
        """Queue an operation on the KV blocks, and pass its result to `done` in any thread."""
        ...

    def stop(self) -> None:
        """End the host after the step in progress. Further calls have no effect."""
        ...

    def join(self, timeout: float) -> None:
        """Wait at most `timeout` seconds until the host has ended. Call `start` first."""
        ...


STOP_S: Final = 15.0
"""Maximum wait for the step in progress, in seconds. The value exceeds `STOP_S` of `process.py`."""


STOP_LOADING_S: Final = 2.0
"""Maximum wait for loading to stop, in seconds. A download or a compiler may take minutes, and
nothing is lost when the process ends in the middle."""


class EngineBackend(OperatedBlocks):
    """Implements `Backend` and `KvEndpoint` of `backends.base` for a local checkpoint."""

    recovers = False

    def __init__(self, config: WorkerConfig) -> None:
        self._sinks = DeltaSinks(self._end)
        self._host = _host(config, self)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._loaded: asyncio.Future[ServedModel] | None = None
        self._served: ServedModel | None = None
        self._operations = Calls[KvResult]()
        self._failure: str | None = None
        self._progress = 0.0
        self._load = WorkerLoad(0, 0, 0, 0, 0.0, 0.0, ())

    @property
    def card(self) -> ModelCard:
        """The card of the served model."""
        return self._started().card

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._started().admission.tokenizer

    @property
    def failure(self) -> str | None:
        """The reason for the engine's failure, or None."""
        return self._failure

    @property
    def progress(self) -> float:
        """Progress of loading, 0 to 1."""
        return self._progress

    async def start(self) -> None:
        """Load and warm up the engine, and return when the engine is ready."""
        self._event_loop = asyncio.get_running_loop()
        self._loaded = self._event_loop.create_future()
        self._host.start()
        self._served = await self._loaded

    async def stop(self) -> None:
        """Stop after the step in progress, and end open streams with an error.

        A step that never ends, e.g. on a device that hangs, lasts until the process exits. So does
        loading that does not stop in time.
        """
        self._failure = self._failure or "the worker was stopped"
        self._host.stop()
        if self._loaded is not None:
            loading = self._served is None
            await asyncio.to_thread(self._host.join, STOP_LOADING_S if loading else STOP_S)
            if not self._loaded.done():
                self._loaded.set_exception(BackendFailed(self._failure))
        self._end_open(self._failure)

    def check(self, request: GenerationRequest) -> None:
        """Raise `RequestRejected` if this engine can never run the request."""
        self._started().admission.check(request)

    def submit(self, request: GenerationRequest, sink: DeltaSink) -> None:
        """Queue the request, and put its deltas into the sink."""
        self._started()
        if self._failure is not None:
            raise BackendFailed(self._failure)
        self._sinks.open(request, sink)
        self._host.submit(request)

    def cancel(self, request_id: str) -> None:
        """Cancel a request, if it runs."""
        self._sinks.cancel(request_id)

    def set_pace(self, request_id: str, pace: Pace, tpot_s: float = 0.0) -> None:
        """Change the pace of a request."""
        self._host.set_pace(request_id, pace, tpot_s)

    def load(self) -> WorkerLoad:
        """Return the load after the latest step."""
        return self._load

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block, or 0 if the engine exchanges none."""
        form = self.card.kv_format
        return 0 if form is None else form.block_bytes

    def operate(self, operation: KvOperation) -> asyncio.Future[KvResult]:
        """Queue an operation on the KV blocks for the host's thread, and return its result.

        Raises:
            BackendFailed: the engine failed.
        """
        if self._failure is not None:
            raise BackendFailed(self._failure)
        number, result = self._operations.open()
        settle = partial(self._operations.settle, number)
        self._host.exchange(operation, partial(self._on_event_loop, settle))
        return result

    # --- the host's thread calls these methods -------------------------------------------------

    def loading(self, share: float) -> None:
        """Store the progress of loading, 0 to 1."""
        self._progress = share

    def ready(self, served: ServedModel) -> None:
        """Complete `start` with the served model."""
        self._on_event_loop(self._settle, served)

    def stepped(self, batch: list[tuple[str, Delta]], load: WorkerLoad) -> None:
        """Store the load, and deliver the deltas of a step in one call."""
        self._load = load
        if batch:
            self._on_event_loop(self._sinks.deliver, batch)

    def adapter_failed(self, request_id: str, reason: str) -> None:
        """End the stream of a request whose adapter cannot be loaded."""
        self._on_event_loop(partial(self._sinks.fail, reason, AdapterFailed), request_id)

    def failed(self, error: BaseException) -> None:
        """End all streams with the error, or let `start` raise it during loading."""
        self._on_event_loop(self._fail, error)

    # -------------------------------------------------------------------------------------------

    def _on_event_loop(self, callback: object, argument: object) -> None:
        assert self._event_loop is not None
        try:
            self._event_loop.call_soon_threadsafe(callback, argument)  # type: ignore[arg-type]
        except RuntimeError:
            # The process is exiting and has closed its event loop, so reports have no receiver.
            self._host.stop()

    def _settle(self, served: ServedModel) -> None:
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(served)

    def _fail(self, error: BaseException) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        if self._loaded is not None and not self._loaded.done():
            known = isinstance(error, LOADING_ERRORS)
            self._loaded.set_exception(error if known else BackendFailed(self._failure))
        self._end_open(self._failure)

    def _end_open(self, failure: str) -> None:
        """End all streams and transfers with an error."""
        self._sinks.fail(failure)
        self._operations.fail(BackendFailed(failure))

    def _end(self, request_id: str, cancelled: bool) -> None:
        if cancelled:
            self._host.cancel(request_id)

    def _started(self) -> ServedModel:
        if self._served is None:
            raise RuntimeError("the backend has not been started")
        return self._served


def _host(config: WorkerConfig, events: LoopEvents) -> EngineHost:
    """Return the host of the engine.

    The function imports torch only if the engine runs in this process.
    """
    if config.own_process:
        return EngineProcess(config, events)

    def load(progress: Callable[[float], None]) -> LoadedEngine:
        # The engine's thread imports torch, which takes seconds, while the gateway starts.
        from draftgate.backends.engine.load import load_engine

        return load_engine(config, progress)

    return EngineLoop(load, events)
