"""Frames of messages in a stream of bytes: the length in four bytes, and then the message."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Final

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
