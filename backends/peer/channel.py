"""The protocol between a gateway and another node's worker (a peer), over a WebSocket (RFC 6455).

One connection carries all requests of a gateway to a worker: a step costs one message for all of
them, and one silence shows that the machine is gone. It begins with

    GET /peer/v1/workers/NUMBER        with a proof that the secret is known (`proof`)

on the peer's own port. The peer first sends `Ready`; the gateway continues only if it accepts the
proof in it. Then commands (`backends.remote_worker`) travel one way and reports the other. The end
of the connection cancels every request on it.

A message that is larger than a piece is sent in pieces. A prompt of 1 MB is a message of 5 MB. As
one frame it would hold the event loop for 5 to 7 ms, since a WebSocket client masks each byte. A
piece takes a third of a millisecond, and other tasks run in between (one core, Zen 5, 2026-11-22).
"""

from __future__ import annotations

import asyncio
from types import UnionType
from typing import Final, Generic, TypeVar

from aiohttp import ClientWebSocketResponse
from aiohttp.web import WebSocketResponse

from draftgate.backends.remote_worker import Codec, WorkerMessage

PREFIX: Final = "/peer/"
"""Prefix of all paths that are for other nodes only."""

WORKER_PATH: Final = PREFIX + "v1/workers/"

PIECE_BYTES: Final = 256 << 10

MOST_FRAME_BYTES: Final = 2 * PIECE_BYTES
"""Bound of a received frame: a piece or a whole message of that size, with its envelope."""

MOST_COMMAND_BYTES: Final = 64 << 20
"""The default limit of a client's body, 8 MiB, allows four million token ids: 32 MiB here."""

MOST_REPORT_BYTES: Final = 256 << 20
"""The files of a tokenizer are one report; those of large vocabularies have some 35 MiB."""

REPORT_S: Final = 0.1
"""Longest time between two reports of a peer, and so the age of a load plus its transfer. A report
takes some 30 us on either side: 0.03% of a core for each pair of nodes. (Chosen.)"""

Received = TypeVar("Received")


class MessagePiece(WorkerMessage, frozen=True):
    """A part of a large message, in either direction. Pieces arrive in order."""

    data: bytes
    last: bool


class PeerChannel(Generic[Received]):
    """Messages over one end of a connection. Use it on the event loop's thread."""

    def __init__(
        self,
        socket: ClientWebSocketResponse | WebSocketResponse,
        received: UnionType,
        most_bytes: int,
    ) -> None:
        """Use an open connection.

        Args:
            received: type of the messages from the other end.
            most_bytes: size limit of such a message.
        """
        self._socket = socket
        self._codec = Codec[Received | MessagePiece](received | MessagePiece)
        self._most_bytes = most_bytes
        self._pieces: list[bytes] = []
        self._piece_bytes = 0
        self._sending_pieces = asyncio.Lock()

    async def send(self, message: WorkerMessage) -> None:
        """Send a message; waits while the other end reads slowly. Any number of tasks may send.

        Raises:
            ConnectionError: the connection has ended.
        """
        data = self._codec.encode(message)
        if len(data) <= PIECE_BYTES:
            await self._socket.send_bytes(data)
            return
        # Small messages may pass between the pieces; those of two large messages must not mix.
        async with self._sending_pieces:
            for begin in range(0, len(data), PIECE_BYTES):
                end = begin + PIECE_BYTES
                piece = MessagePiece(data[begin:end], last=end >= len(data))
                await self._socket.send_bytes(self._codec.encode(piece))
                await asyncio.sleep(0)

    def read(self, frame: bytes) -> Received | None:
        """Return the message that a frame completes; None while pieces are missing.

        Raises:
            ValueError: the frame holds no message, or the message is too large.
        """
        message = self._codec.decode(frame)
        if not isinstance(message, MessagePiece):
            return message
        self._pieces.append(message.data)
        self._piece_bytes += len(message.data)
        if self._piece_bytes > self._most_bytes:
            raise ValueError(f"a message exceeds {self._most_bytes} bytes")
        if not message.last:
            return None
        whole, self._pieces, self._piece_bytes = b"".join(self._pieces), [], 0
        message = self._codec.decode(whole)
        if isinstance(message, MessagePiece):
            raise ValueError("a piece within a piece")  # noqa: TRY004 - the sender's fault
        return message
