"""What waits to be sent to a peer: the deltas of all its requests, for one message per step."""

from __future__ import annotations

import asyncio
from typing import Final

from draftgate.backends.types import Delta

MOST_DELTAS: Final = 1024
"""Beyond so many nobody adds any: what comes then waits where it is made, merged by request. A
batch of 256 sequences fills it in four steps."""


class Outbox:
    """Use on the event loop's thread."""

    def __init__(self) -> None:
        """Begin empty."""
        self._deltas: list[tuple[int, Delta]] = []
        self._broken: list[tuple[int, str]] = []
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def put(self, number: int, delta: Delta) -> None:
        """Add a delta; waits for room."""
        while len(self._deltas) >= MOST_DELTAS:
            self._room.clear()
            await self._room.wait()
        self._deltas.append((number, delta))
        self._news.set()

    def put_broken(self, number: int, reason: str) -> None:
        """Add that a request ended with an error, behind its deltas."""
        self._broken.append((number, reason))
        self._news.set()

    def wake(self) -> None:
        """Let whoever waits for news go on without any."""
        self._news.set()

    async def news(self) -> None:
        """Wait for something to send, or to be woken."""
        await self._news.wait()

    def take(self) -> tuple[list[tuple[int, Delta]], list[tuple[int, str]]]:
        """Return what waits: deltas, and what broke behind them."""
        taken = self._deltas, self._broken
        self._deltas, self._broken = [], []
        self._news.clear()
        self._room.set()
        return taken
