"""Either end of a connection between nodes: messages of any size, a large one in pieces.

A prompt of a megabyte is a message of five. As one frame it would hold the event loop up for 5 to
7 ms, as the client's end of a WebSocket has to mask each byte (one core, Zen 5, 2026-11-22); as
pieces each takes a third of a millisecond, and others have their turn between them.
"""

from __future__ import annotations

import asyncio
from types import UnionType
from typing import Final, Generic, TypeVar

import msgspec
from aiohttp import ClientWebSocketResponse
from aiohttp.web import WebSocketResponse

from draftgate.backends.peer.messages import Piece
from draftgate.backends.wire import Codec

PIECE_BYTES: Final = 256 << 10

MOST_FRAME_BYTES: Final = 2 * PIECE_BYTES
"""Of what comes: a piece, or a whole message that is no longer, with what is around it."""

Received = TypeVar("Received")


class Channel(Generic[Received]):
    """Messages over a connection. Use on the event loop's thread."""

    def __init__(
        self,
        socket: ClientWebSocketResponse | WebSocketResponse,
        received: UnionType,
        most_bytes: int,
    ) -> None:
        """Take a connection.

        Args:
            received: what the other end sends.
            most_bytes: of a message of the other end's.
        """
        self._socket = socket
        self._codec = Codec[Received | Piece](received | Piece)
        self._most_bytes = most_bytes
        self._pieces: list[bytes] = []
        self._piece_bytes = 0
        self._sending_pieces = asyncio.Lock()

    async def send(self, message: msgspec.Struct) -> None:
        """Send a message; waits while the other end reads slowly. Any number of tasks may.

        Raises:
            ConnectionError: the connection has ended.
        """
        data = self._codec.encode(message)
        if len(data) <= PIECE_BYTES:
            await self._socket.send_bytes(data)
            return
        async with self._sending_pieces:
            for begin in range(0, len(data), PIECE_BYTES):
                end = begin + PIECE_BYTES
                piece = Piece(data[begin:end], last=end >= len(data))
                await self._socket.send_bytes(self._codec.encode(piece))
                await asyncio.sleep(0)

    def read(self, frame: bytes) -> Received | None:
        """Return the message that came with a frame; None if its rest is to come.

        Raises:
            ValueError: there is none in it, or one that is too large.
        """
        message = self._codec.decode(frame)
        if not isinstance(message, Piece):
            return message
        self._pieces.append(message.data)
        self._piece_bytes += len(message.data)
        if self._piece_bytes > self._most_bytes:
            raise ValueError(f"a message exceeds {self._most_bytes} bytes")
        if not message.last:
            return None
        whole, self._pieces, self._piece_bytes = b"".join(self._pieces), [], 0
        return self._read_whole(whole)

    def _read_whole(self, data: bytes) -> Received:
        message = self._codec.decode(data)
        if isinstance(message, Piece):
            raise ValueError("a piece of a piece")  # noqa: TRY004 - it is the sender's fault
        return message
