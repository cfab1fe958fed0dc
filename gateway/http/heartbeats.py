"""Signs of life for a client that waits for the first event of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

KEEPALIVE_S: Final = 5.0
"""A stream that waits for its first token sends a comment this often: proxies cut silent ones."""

COMMENT: Final = b": waiting\n\n"


class Heartbeats:
    """Comments beside a wait.

    A timer, since most waits are short: to wait in a task of its own costs each stream 9 us (one
    core, Zen 4, 2026-11-21).
    """

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Begin: the first comment is sent in `KEEPALIVE_S`."""
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(KEEPALIVE_S, self._due)
        self._sending: asyncio.Task[None] | None = None

    async def sent(self) -> None:
        """Wait for a comment that is being sent."""
        if self._sending is not None:
            await self._sending

    def stop(self) -> None:
        """Send no more."""
        self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()

    def _due(self) -> None:
        self._sending = self._loop.create_task(self._beat())

    async def _beat(self) -> None:
        # If the client is gone, aiohttp cancels the handler, which waits for the first event.
        with suppress(ConnectionResetError):
            await self._send(COMMENT)
            self._timer = self._loop.call_later(KEEPALIVE_S, self._due)
