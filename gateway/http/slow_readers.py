"""Back-pressure from clients that read more slowly than their tokens are generated.

Unread output waits in the send queue of the socket, in the buffer of the connection, and as tokens
in the backend's stream. The backend merges its waiting tokens into one delta. The queue and the
buffer are small, and the gateway does not read the backend's stream while they are full. The
gateway regularly checks the readers of such streams, and slows down or pauses their sequences
(`policies/pacing`).
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import socket
import termios
from collections.abc import Callable
from typing import Any, Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from draftgate.gateway.dispatch.run import Run
from draftgate.gateway.telemetry.logs import log
from draftgate.policies.pacing import ReaderView, pace
from draftgate.policies.types import Pace

BUFFER_BYTES: Final = 16 << 10
"""Buffer of a stream's connection, for about 70 chunks of one token."""

SEND_QUEUE_BYTES: Final = 32 << 10
"""Send queue of a stream's socket, which Linux doubles for its own bookkeeping. The queue allows
320 kB/s, or a thousand tokens per second, at a round-trip time of 100 ms."""

CHUNK_BYTES: Final = 230
"""Approximate size of a chunk with one token, which converts waiting tokens to bytes."""

CHECK_INTERVAL_S: Final = 0.25
"""Interval of the checks, in which a worker generates a few dozen tokens."""

CHECKS_AT_ONCE: Final = 200
"""Readers checked in one callback of the event loop. Each check takes about 5 microseconds."""


class SlowReaders:
    """The slow readers of a node.

    Use the object only on the thread of the event loop.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        """Start without readers.

        Args:
            now_s: the clock, in seconds.
        """
        self._now_s = now_s
        self._readers: dict[Reader, None] = {}  # an ordered set
        self._checking = False

    def __len__(self) -> int:
        """Return the number of slow readers."""
        return len(self._readers)

    def add(self, reader: Reader) -> None:
        """Check a reader from now on, until it has caught up."""
        self._readers[reader] = None
        if not self._checking:
            self._checking = True
            asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check_next, ())

    def discard(self, reader: Reader) -> None:
        """Stop checking a reader."""
        self._readers.pop(reader, None)

    def _check_next(self, left: tuple[Reader, ...]) -> None:
        """Check some remaining readers of this round, or begin a round."""
        now_s = self._now_s()
        turn = left or tuple(self._readers)
        for reader in turn[:CHECKS_AT_ONCE]:
            if reader in self._readers and _caught_up(reader, now_s):
                del self._readers[reader]
        loop, rest = asyncio.get_running_loop(), turn[CHECKS_AT_ONCE:]
        if rest:
            loop.call_soon(self._check_next, rest)
        elif self._readers:
            loop.call_later(CHECK_INTERVAL_S, self._check_next, ())
        else:
            self._checking = False


class Reader:
    """The client that reads a stream.

    Attributes:
        run: the run whose output the client reads, or None before the request runs.
        written_bytes: bytes written to the connection.
    """

    def __init__(self, request: web.Request, slow: SlowReaders) -> None:
        self.run: Run | None = None
        self.written_bytes = 0
        self._transport: Any = request.transport
        self._slow = slow
        self._pace = Pace.FULL
        self._read_bytes = 0  # at the last check
        self._made_bytes = 0.0
        self._checked_s: float | None = None
        self._moved_s = 0.0  # when the reader last read something

    async def drained(self, writer: AbstractStreamWriter) -> None:
        """Wait until the buffers have space again, and check the reader meanwhile.

        Raises:
            ConnectionResetError: the client has disconnected.
        """
        self._slow.add(self)
        await writer.drain()

    def left(self) -> None:
        """Stop checking the reader, because its stream has ended."""
        self._slow.discard(self)

    def adjust(self, now_s: float) -> bool:
        """Set the pace of the reader's sequences, and return whether it has caught up."""
        if self.run is None:
            return True
        unsent = self.unsent_bytes
        view = self._view(now_s, unsent, self.run.unread_tokens)
        chosen = pace(view, self._pace)
        if chosen is not self._pace:
            self._pace = chosen
            self.run.set_pace(chosen)
        return chosen is Pace.FULL and not view.waiting_tokens and unsent <= BUFFER_BYTES

    @property
    def unsent_bytes(self) -> int:
        """Bytes in the connection's buffer and in the kernel's send queue."""
        if self._transport is None:
            return 0
        return int(self._transport.get_write_buffer_size()) + _queued_bytes(self._transport)

    def limit_buffers(self) -> None:
        """Limit the buffers of the connection, so that little is sent ahead of the reader."""
        if self._transport is None:
            return
        self._transport.set_write_buffer_limits(high=BUFFER_BYTES)
        connection = self._transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_QUEUE_BYTES)

    def _view(self, now_s: float, unsent: int, waiting_tokens: int) -> ReaderView:
        """Return the reader's rates since the last check, and begin the next interval."""
        read = self.written_bytes - unsent
        made = self.written_bytes + waiting_tokens * CHUNK_BYTES
        since_s = None if self._checked_s is None else max(now_s - self._checked_s, 1e-6)
        if since_s is None or read > self._read_bytes or not unsent:
            self._moved_s = now_s
        view = ReaderView(
            unsent,
            now_s - self._moved_s,
            waiting_tokens,
            0.0 if since_s is None else max(read - self._read_bytes, 0) / since_s,
            0.0 if since_s is None else max(made - self._made_bytes, 0.0) / since_s,
            CHUNK_BYTES,
        )
        self._checked_s, self._read_bytes, self._made_bytes = now_s, read, made
        return view


def _caught_up(reader: Reader, now_s: float) -> bool:
    try:
        return reader.adjust(now_s)
    except Exception as error:  # noqa: BLE001 - the other readers must still be checked
        log(logging.ERROR, "a slow reader cannot be checked", error=error)
        return True


def _queued_bytes(transport: Any) -> int:
    """Return the unacknowledged bytes in the kernel's send queue, or 0 if unknown."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.fileno() < 0:
        return 0
    count = array.array("i", [0])
    try:
        fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, count)
    except OSError:
        return 0
    return count[0]
