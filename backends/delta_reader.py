"""A reader of the deltas of one request, for tests and measurements of a backend."""

from __future__ import annotations

import asyncio
from typing import Self

from draftgate.backends.base import Backend
from draftgate.backends.streams import UnreadDeltas
from draftgate.backends.types import Delta, GenerationRequest


class GeneratedDeltas:
    """The deltas of a request, for a reader that may be slower than the worker.

    Attributes:
        unread: the deltas that the reader has not read.
    """

    def __init__(self, backend: Backend, request: GenerationRequest) -> None:
        self.unread = UnreadDeltas()
        self._backend = backend
        self._request = request
        self._unfinished = len(request.choices)
        self._failure: Exception | None = None
        self._news = asyncio.Event()
        backend.submit(request, self)

    def put(self, delta: Delta) -> None:
        """Keep a delta for the reader."""
        self.unread.put(delta)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Raise an error after the deltas before it."""
        self._failure = error
        self._news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        try:
            while self._unfinished and not self.unread:
                if self._failure is not None:
                    self._unfinished = 0
                    raise self._failure
                self._news.clear()
                await self._news.wait()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if not self._unfinished:
            raise StopAsyncIteration
        delta = self.unread.pop()
        self._unfinished -= delta.finish_reason is not None
        return delta

    async def aclose(self) -> None:
        """Cancel the request, unless all its deltas have been read."""
        if self._unfinished:
            self._unfinished = 0
            self._backend.cancel(self._request.request_id)


def generate(backend: Backend, request: GenerationRequest) -> GeneratedDeltas:
    """Submit a request, and return its deltas.

    The iterator ends after the last delta of each choice, and raises the error of a request that
    failed. Closing it early cancels the request.

    Raises:
        BackendFailed: the worker has failed.
    """
    return GeneratedDeltas(backend, request)
