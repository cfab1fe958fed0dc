"""A backend that is imported when it starts: the node listens while torch is being loaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from backends.base import Backend, WorkerConfig
from backends.errors import BackendFailed
from backends.registry import backend_factory
from backends.tokenizer import Tokenizer
from backends.types import Delta, GenerationRequest, ModelCard
from policies.types import WorkerLoad


class LateBackend:
    """Implements `Backend` by the one of that name, once `start` has imported and built it."""

    def __init__(self, name: str, config: WorkerConfig) -> None:
        """Remember what to build."""
        self._name = name
        self._config = config
        self._inner: Backend | None = None

    @property
    def progress(self) -> float:
        """What the backend says; nothing is done before it is there."""
        return self._inner.progress if self._inner is not None else 0.0

    async def start(self) -> None:
        """Import in a thread, build, and start.

        Raises:
            ImportError: what the backend needs is not installed.
            CheckpointError, ValueError: the model cannot be loaded, or a setting does not fit it.
        """
        factory = await asyncio.to_thread(backend_factory, self._name)
        self._inner = factory(self._config)
        await self._inner.start()

    async def stop(self) -> None:
        """Stop it if it was built."""
        if self._inner is not None:
            await self._inner.stop()

    @property
    def card(self) -> ModelCard:
        """What is served."""
        return self._built().card

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._built().tokenizer

    @property
    def failure(self) -> str | None:
        """Why the backend is broken, or None."""
        return None if self._inner is None else self._inner.failure

    def check(self, request: GenerationRequest) -> None:
        """See `Backend`."""
        self._built().check(request)

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """See `Backend`."""
        return self._built().generate(request)

    def load(self) -> WorkerLoad:
        """See `Backend`."""
        return self._built().load()

    def _built(self) -> Backend:
        if self._inner is None:
            raise BackendFailed("the backend has not started")
        return self._inner
