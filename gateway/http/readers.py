"""Clients that read more slowly than their tokens come: back-pressure from socket to worker.

What a client has not read waits in three places: in the kernel's queue of its socket, in the
connection's buffer, and, as tokens, in the backend's stream, where it is merged to one chunk. The
first two are kept small; while they are full the stream is not read. Streams that had to wait are
looked at now and then, and their sequences go on at the pace of their readers (`policies/pacing`).
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import socket
import termios
from collections.abc import Callable
from typing import Any, Final, Protocol

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from draftgate.gateway.telemetry.logs import log
from draftgate.policies.pacing import ReaderView, pace
from draftgate.policies.types import Pace

BUFFER_BYTES: Final = 16 << 10
"""Of a stream's connection: some 70 chunks of a token each."""

SEND_QUEUE_BYTES: Final = 32 << 10
"""Of a stream's socket (Linux doubles it, for its own book-keeping): at a round trip of 100 ms it
lets 320 kB/s pass, a thousand tokens a second."""

CHUNK_BYTES: Final = 230
"""Of a token's own chunk, about: what waits as tokens is counted as the bytes it would be."""

LOOK_S: Final = 0.25
"""Between two looks at a slow reader. What is generated meanwhile is a few dozen tokens."""

LOOKS_AT_ONCE: Final = 200
"""Slow readers that are looked at before others have their turn: each takes some 5 microseconds."""


class Paced(Protocol):
    """What is read slowly."""

    @property
    def unread_tokens(self) -> int:
        """Tokens that were generated and nobody has read."""
        ...

    def set_pace(self, pace: Pace) -> None:
        """Go on like this."""
        ...


class SlowReaders:
    """The readers of a node that had to be waited for. On the event loop's thread."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        """Begin with none; `now_s` is the clock."""
        self._now_s = now_s
        self._readers: dict[Reader, None] = {}  # in the order in which they came
        self._looking = False

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._readers)

    def add(self, reader: Reader) -> None:
        """Look at a reader from now on, until it has caught up."""
        self._readers[reader] = None
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_later(LOOK_S, self._look, ())

    def discard(self, reader: Reader) -> None:
        """Forget a reader: its stream has ended."""
        self._readers.pop(reader, None)

    def _look(self, left: tuple[Reader, ...]) -> None:
        """Look at some readers, then at the others, then wait."""
        now_s = self._now_s()
        turn = left or tuple(self._readers)
        for reader in turn[:LOOKS_AT_ONCE]:
            if reader in self._readers and _caught_up(reader, now_s):
                del self._readers[reader]
        loop, rest = asyncio.get_running_loop(), turn[LOOKS_AT_ONCE:]
        if rest:
            loop.call_soon(self._look, rest)
        elif self._readers:
            loop.call_later(LOOK_S, self._look, ())
        else:
            self._looking = False


class Reader:
    """The client at the other end of one stream.

    Attributes:
        paced: what it reads; None while nothing comes.
        written_bytes: what was written to its connection.
    """

    def __init__(self, request: web.Request, slow: SlowReaders) -> None:
        """Begin before anything is written to it."""
        self.paced: Paced | None = None
        self._transport: Any = request.transport
        self._slow = slow
        self._pace = Pace.FULL
        self.written_bytes = 0
        self._read_bytes = 0  # as of the last look
        self._made_bytes = 0.0
        self._looked_s: float | None = None
        self._moved_s = 0.0  # when it last took something

    async def drained(self, writer: AbstractStreamWriter) -> None:
        """Wait until the client has made room for more, and look at it meanwhile.

        Raises:
            ConnectionResetError: it is gone.
        """
        self._slow.add(self)
        await writer.drain()

    def left(self) -> None:
        """Stop looking at it: its stream has ended."""
        self._slow.discard(self)

    def adjust(self, now_s: float) -> bool:
        """Set the pace of its sequences; return whether it has caught up."""
        if self.paced is None:
            return True
        unsent = self.unsent_bytes
        view = self._view(now_s, unsent, self.paced.unread_tokens)
        chosen = pace(view, self._pace)
        if chosen is not self._pace:
            self._pace = chosen
            self.paced.set_pace(chosen)
        return chosen is Pace.FULL and not view.waiting_tokens and unsent <= BUFFER_BYTES

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait in the connection's buffer and in the kernel."""
        if self._transport is None:
            return 0
        return int(self._transport.get_write_buffer_size()) + _queued_bytes(self._transport)

    def _view(self, now_s: float, unsent: int, waiting_tokens: int) -> ReaderView:
        """Return what is known of it, and remember that for the next look."""
        read = self.written_bytes - unsent
        made = self.written_bytes + waiting_tokens * CHUNK_BYTES
        since_s = None if self._looked_s is None else max(now_s - self._looked_s, 1e-6)
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
        self._looked_s, self._read_bytes, self._made_bytes = now_s, read, made
        return view

    def limit_buffers(self) -> None:
        """Keep the buffers of its connection small, so that little is sent ahead of it."""
        if self._transport is None:
            return
        self._transport.set_write_buffer_limits(high=BUFFER_BYTES)
        connection = self._transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_QUEUE_BYTES)


def _caught_up(reader: Reader, now_s: float) -> bool:
    """Look at a reader; one at which that fails is left alone, and the others are looked at."""
    try:
        return reader.adjust(now_s)
    except Exception as error:  # noqa: BLE001 - nobody else's back-pressure may end with it
        log(logging.ERROR, "a slow reader cannot be looked at", error=error)
        return True


def _queued_bytes(transport: Any) -> int:
    """Return what the kernel has not sent, or the other side not acknowledged; 0 if it hides it."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.fileno() < 0:
        return 0
    count = array.array("i", [0])
    try:
        fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, count)
    except OSError:
        return 0
    return count[0]
