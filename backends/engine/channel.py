"""A channel for messages between a gateway's process and an engine process.

Messages (`backends.remote_worker`) travel in frames (`backends.framing`). Either side ends the
conversation when it closes its end.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from threading import Lock
from typing import Final, Generic, TypeVar

from draftgate.backends.framing import Codec, FrameReader
from draftgate.backends.remote_worker import Command, Report, WorkerMessage

MOST_BYTES: Final = 1 << 30
"""Maximum size of a message, and of its blocks. Both ends belong to one node, so this limit only
detects errors."""

Received = TypeVar("Received", Command, Report)


class SocketChannel(Generic[Received]):
    """Sends and receives messages over a socket.

    Any thread may send, but only one thread may receive.

    The channel owns the socket. `received` is the type of the messages from the other end.
    """

    def __init__(self, end: socket.socket, received: object) -> None:
        self._end = end
        self._codec: Codec[Received] = Codec(received)
        self._sending = Lock()

    def send(self, message: WorkerMessage) -> None:
        """Send a message. The call blocks while the other end reads slowly.

        Raises:
            OSError: the other end is closed.
        """
        with self._sending:
            data, blocks = self._codec.frame(message)
            self._end.sendall(data)
            if blocks:
                self._end.sendall(blocks)

    def __iter__(self) -> Iterator[Received]:
        """Yield the received messages until the other end is closed."""
        frames = FrameReader(MOST_BYTES, MOST_BYTES)
        with suppress(ConnectionResetError):  # the other end closed without reading everything
            while num_bytes := self._end.recv_into(frames.buffer()):
                frames.advance(num_bytes)
                while (frame := frames.next()) is not None:
                    yield self._codec.decode(*frame)

    def hang_up(self) -> None:
        """Shut down both directions, which ends the iteration at both ends."""
        with suppress(OSError):  # the socket is already shut down
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Call this method in the thread that receives."""
        self.hang_up()
        self._end.close()
