"""Signs of life for a client whose stream is silent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

KEEPALIVE_S: Final = 5.0
"""A stream to which nothing was written for so long is sent a comment: proxies cut silent ones. It
waits for its first token, or for another worker to go on with it."""

COMMENT: Final = b": waiting\n\n"


class Heartbeats:
    """Comments where a stream is silent.

    A timer, since most waits are short: to wait in a task of its own costs each stream 9 us (one
    core, Zen 4, 2026-11-21).
    """

    def __init__(
        self,
        send: Callable[[bytes], Awaitable[None]],
        written_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """Begin: the first comment is sent in `KEEPALIVE_S`.

        Args:
            send: writes complete events.
            written_bytes: how much was written to the stream; what has grown is not silent.
        """
        self._send = send
        self._written_bytes = written_bytes
        self._loop = asyncio.get_running_loop()
        self._sending: asyncio.Task[None] | None = None
        self._wait()

    async def sent(self) -> None:
        """Wait for a comment that is being sent."""
        if self._sending is not None:
            await self._sending

    def stop(self) -> None:
        """Send no more."""
        self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()

    def _wait(self) -> None:
        self._seen_bytes = self._written_bytes()
        self._timer = self._loop.call_later(KEEPALIVE_S, self._due)

    def _due(self) -> None:
        if self._written_bytes() > self._seen_bytes:
            self._wait()
        else:
            self._sending = self._loop.create_task(self._beat())

    async def _beat(self) -> None:
        # If the client is gone, aiohttp cancels the handler, which waits for the next event.
        with suppress(ConnectionResetError):
            await self._send(COMMENT)
            self._wait()
