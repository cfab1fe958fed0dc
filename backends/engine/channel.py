"""A channel for messages between a gateway's process and an engine process.

Messages (`backends.remote_worker`) travel in frames (`backends.kv_transfer.framing`). Either side
ends the conversation when it closes its end.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from threading import Lock
from typing import Generic, TypeVar

from draftgate.backends.kv_transfer.framing import LENGTHS, FrameCodec
from draftgate.backends.remote_worker import Command, Report, WorkerMessage

Received = TypeVar("Received", Command, Report)


class SocketChannel(Generic[Received]):
    """Sends and receives messages over a socket.

    Any thread may send, but only one thread may receive.

    The channel owns the socket. `received` is the type of the messages from the other end.
    """

    def __init__(self, end: socket.socket, received: object) -> None:
        self._end = end
        self._file = end.makefile("rb")
        self._codec: FrameCodec[Received] = FrameCodec(received)
        self._sending = Lock()

    def send(self, message: WorkerMessage) -> None:
        """Send a message. The call blocks while the other end reads slowly.

        Raises:
            OSError: the other end is closed.
        """
        with self._sending:
            data, blocks = self._codec.encode(message)
            self._end.sendall(data)
            if blocks:
                self._end.sendall(blocks)

    def __iter__(self) -> Iterator[Received]:
        """Yield the received messages until the other end is closed."""
        try:
            while len(head := self._file.read(LENGTHS.size)) == LENGTHS.size:
                message_bytes, block_bytes = LENGTHS.unpack(head)
                data, blocks = self._file.read(message_bytes), bytearray(block_bytes)
                if block_bytes and self._file.readinto(blocks) < block_bytes:
                    return
                yield self._codec.decode(data, memoryview(blocks))
        except (ConnectionResetError, ValueError):
            return  # the connection ended within a message

    def hang_up(self) -> None:
        """Shut down both directions, which ends the iteration at both ends."""
        with suppress(OSError):  # the socket is already shut down
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Call this method in the thread that receives."""
        self.hang_up()
        self._file.close()
        self._end.close()
