"""The protocol between a gateway and another node's worker (a peer), over a WebSocket (RFC 6455).

One connection carries all requests of a gateway to a worker. A step costs one message for all of
them, and a single silence shows that the machine is gone. The connection begins with

    GET /peer/v1/workers/NUMBER        with a proof that the secret is known (`proof`)

on the peer's own port. The peer first sends `Ready`. The gateway continues only if it accepts the
proof in that message. Then commands (`backends.remote_worker`) travel in one direction and reports
in the other. The end of the connection cancels every request on it.

A message that is larger than a piece is sent in pieces. A prompt of 1 MB is a message of 5 MB. A
single frame of that size would block the event loop for 5 to 7 ms, because a WebSocket client masks
each byte. A piece takes a third of a millisecond, and other tasks run in between (one core, Zen 5,
2026-11-22).
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
"""Maximum size of a received frame, which is a piece or a whole message of that size with its
envelope."""

MOST_COMMAND_BYTES: Final = 64 << 20
"""Maximum size of a command. The default limit of a client's body, 8 MiB, allows four million token
ids, which take 32 MiB here."""

MOST_REPORT_BYTES: Final = 256 << 20
"""Maximum size of a report, which may contain the files of a tokenizer. Large vocabularies have
about 35 MiB."""

REPORT_S: Final = 0.1
"""Maximum seconds between two reports of a peer, and so the age of a load before its transfer. A
report takes about 30 us on either side, or 0.03% of a core for each pair of nodes. (Chosen, not
tuned.)"""

Received = TypeVar("Received")


class MessagePiece(WorkerMessage, frozen=True):
    """A part of a large message, in either direction. Pieces arrive in order."""

    data: bytes
    last: bool


class PeerChannel(Generic[Received]):
    """The messages at one end of a connection, for use on the event loop's thread."""

    def __init__(
        self,
        socket: ClientWebSocketResponse | WebSocketResponse,
        received: UnionType,
        most_bytes: int,
    ) -> None:
        """Use an open connection.

        Args:
            received: type of the messages from the other end.
            most_bytes: maximum size of such a message.
        """
        self._socket = socket
        self._codec = Codec[Received | MessagePiece](received | MessagePiece)
        self._most_bytes = most_bytes
        self._pieces: list[bytes] = []
        self._piece_bytes = 0
        self._sending_pieces = asyncio.Lock()

    async def send(self, message: WorkerMessage) -> None:
        """Send a message, and wait while the other end reads slowly. Any number of tasks may send.

        Raises:
            ConnectionError: the connection has ended.
        """
        data = self._codec.encode(message)
        if len(data) <= PIECE_BYTES:
            await self._socket.send_bytes(data)
            return
        # Small messages may pass between the pieces, but the pieces of two large messages must not
        # mix.
        async with self._sending_pieces:
            for begin in range(0, len(data), PIECE_BYTES):
                end = begin + PIECE_BYTES
                piece = MessagePiece(data[begin:end], last=end >= len(data))
                await self._socket.send_bytes(self._codec.encode(piece))
                await asyncio.sleep(0)

    def read(self, frame: bytes) -> Received | None:
        """Return the message that a frame completes, or None while pieces are missing.

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
            raise ValueError("a piece contains another piece")  # noqa: TRY004 - the sender's fault
        return message
