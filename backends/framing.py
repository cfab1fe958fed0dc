"""Frames of messages in a stream of bytes: the length in four bytes, and then the message.

The processes of a node and the nodes of a pool use the same connections (`FrameChannel`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Final, Generic, TypeVar, cast

_BROKEN: Final = "the connection broke"
CLOSED: Final = "it closed the connection"
INVALID: Final = "a message was invalid"
TOO_LARGE: Final = "a message was too large"

Received = TypeVar("Received")

_LENGTH: Final = Struct("!I")


class FrameTooLarge(ValueError):
    """A frame exceeds the limit of its receiver."""


def framed(message: bytes) -> bytes:
    """Return a message with its length in front."""
    return _LENGTH.pack(len(message)) + message


class Frames:
    """The messages in a stream of bytes, however the network splits it."""

    def __init__(self, most_bytes: int) -> None:
        """Start between two frames.

        Args:
            most_bytes: maximum size of a message.
        """
        self._most_bytes = most_bytes
        self._received = bytearray()

    def add(self, data: bytes) -> Iterator[bytes]:
        """Add bytes and yield the messages that are complete.

        Raises:
            FrameTooLarge: a message is too large. It is not received.
        """
        received = self._received
        received += data
        begin, head = 0, _LENGTH.size
        while len(received) - begin >= head:
            (length,) = _LENGTH.unpack_from(received, begin)
            if length > self._most_bytes:
                raise FrameTooLarge(f"a message has {length} bytes")
            end = begin + head + length
            if len(received) < end:
                break
            with memoryview(received) as view:
                message = bytes(view[begin + head : end])
            yield message
            begin = end
        del received[:begin]


class FrameChannel(asyncio.Protocol, Generic[Received]):
    """One end of a connection with frames, for use on the event loop's thread.

    Attributes:
        heard: whether bytes have arrived since a watcher of silence has cleared it.
        reason: why the connection has ended, or None while it is open.
    """

    def __init__(
        self,
        decode: Callable[[bytes], Received],
        most_bytes: int,
        receive: Callable[[Received], None],
        lost: Callable[[], None],
    ) -> None:
        """Prepare an end.

        Args:
            decode: decodes a message from the other end, or raises ValueError.
            most_bytes: maximum size of such a message.
            receive: receives each message, and must return immediately.
            lost: callback for the end of the connection, after `reason` is set.
        """
        self._decode = decode
        self._frames = Frames(most_bytes)
        self._receive = receive
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self.heard = False
        self.reason: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def write(self, frames: bytes) -> None:
        """Send frames. They are lost if the connection ends first."""
        if self.reason is None and self._transport is not None:
            self._transport.write(frames)

    def close(self) -> None:
        """Close the connection when everything has been sent. The call does not wait for it."""
        if self._transport is not None:
            self._transport.close()

    def fail(self, reason: str) -> None:
        """End the connection from this side, for a reason."""
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    # --- the event loop calls these methods ----------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Pass on the messages that are complete."""
        self.heard = True
        try:
            for frame in self._frames.add(data):
                try:
                    message = self._decode(frame)
                except ValueError:
                    self.fail(INVALID)
                    return
                self._receive(message)
        except FrameTooLarge:
            self.fail(TOO_LARGE)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the connection."""
        self._end(CLOSED if exc is None else _BROKEN)

    # -------------------------------------------------------------------------------------------

    def _end(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            self._lost()
