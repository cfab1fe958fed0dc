"""The engine behind the `Backend` protocol: where the event loop and the worker's thread meet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from backends.base import WorkerConfig
from backends.engine.load import LoadedEngine, load_engine
from backends.engine.loop import EngineLoop
from backends.errors import BackendError, BackendFailed
from backends.streams import DeltaStreams
from backends.tokenizer import Tokenizer
from backends.types import Delta, GenerationRequest, ModelCard
from policies.types import WorkerLoad


class EngineBackend:
    """Runs a checkpoint in this process; satisfies `backends.base.Backend`."""

    def __init__(self, config: WorkerConfig) -> None:
        """Prepare; nothing is loaded before `start`."""
        self._config = config
        self._streams = DeltaStreams(on_abandon=self._abandon)
        self._loop = EngineLoop(lambda progress: load_engine(config, progress), self)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._loaded: asyncio.Future[LoadedEngine] | None = None
        self._engine: LoadedEngine | None = None
        self._failure: str | None = None

    @property
    def card(self) -> ModelCard:
        """What is served."""
        return self._started().card

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._started().worker.tokenizer

    @property
    def failure(self) -> str | None:
        """Why the engine is broken, or None."""
        return self._failure

    @property
    def progress(self) -> float:
        """The share of loading that is done."""
        return self._loop.progress

    async def start(self) -> None:
        """Load and warm up in the worker's thread."""
        self._event_loop = asyncio.get_running_loop()
        self._loaded = self._event_loop.create_future()
        self._loop.start()
        self._engine = await self._loaded

    async def stop(self) -> None:
        """Stop after the step in progress; open streams end with an error."""
        self._failure = self._failure or "the worker was stopped"
        self._loop.stop()
        if self._loop.ident is not None:
            await asyncio.to_thread(self._loop.join)
        self._streams.fail(self._failure)

    def check(self, request: GenerationRequest) -> None:
        """Raise `RequestRejected` if the request can never run here."""
        self._started().worker.check(request)

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Queue the request and return its deltas."""
        self.check(request)
        if self._failure is not None:
            raise BackendFailed(self._failure)
        stream = self._streams.open(request)
        self._loop.submit(request)
        return stream

    def load(self) -> WorkerLoad:
        """Return the load after the latest step."""
        return self._loop.load_snapshot

    # --- called in the worker's thread ---------------------------------------------------------

    def ready(self, engine: LoadedEngine) -> None:
        """Hand the loaded engine to `start`."""
        self._on_event_loop(self._settle, engine)

    def deltas(self, batch: list[tuple[str, Delta]]) -> None:
        """Hand a step's deltas over in one call."""
        self._on_event_loop(self._streams.deliver, batch)

    def failed(self, error: BaseException) -> None:
        """End every stream, or `start`, with the error."""
        self._on_event_loop(self._fail, error)

    # -------------------------------------------------------------------------------------------

    def _on_event_loop(self, callback: object, argument: object) -> None:
        assert self._event_loop is not None
        try:
            self._event_loop.call_soon_threadsafe(callback, argument)  # type: ignore[arg-type]
        except RuntimeError:
            # The event loop is closed: the process is on its way out and nobody listens.
            self._loop.stop()

    def _settle(self, engine: LoadedEngine) -> None:
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(engine)

    def _fail(self, error: BaseException) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        if self._loaded is not None and not self._loaded.done():
            known = isinstance(error, BackendError | ValueError)
            self._loaded.set_exception(error if known else BackendFailed(self._failure))
        self._streams.fail(self._failure)

    def _abandon(self, request_id: str) -> None:
        self._loop.cancel(request_id)

    def _started(self) -> LoadedEngine:
        if self._engine is None:
            raise RuntimeError("the backend was not started")
        return self._engine
