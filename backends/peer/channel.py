"""The protocol between a gateway and another node's worker (a peer), over one connection.

The connection carries all requests of a gateway to a worker. A step costs one message for all of
them, and a single silence shows that the machine is gone. The connection begins with an HTTP
request (`upgrade`) to

    /peer/v1/workers/NUMBER

on the peer's own port. After the response 101, both nodes send frames (`backends.framing`) of
messages (`backends.remote_worker`): the gateway commands, and the peer reports. The gateway begins
with `Alive`, which shows that it has read the response, and the peer answers with `Ready`. The end
of the connection cancels every request on it.

Both ends handle a message in the callback that reads it, without a task or a future. A round trip
of two messages takes 25 us of CPU time at both ends, and would take 40 us over a WebSocket, whose
client masks each byte (AMD EPYC, 2026-11-23).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from draftgate.backends.framing import FrameChannel, Received, framed
from draftgate.backends.remote_worker import Codec, WorkerMessage

PREFIX: Final = "/peer/"
"""Prefix of all paths that are for other nodes only."""

WORKER_PATH: Final = PREFIX + "v1/workers/"

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

ALIVE_S: Final = 5.0
"""Seconds between two `Alive` of a gateway. (Chosen, not tuned, 2026-11-23.)"""


class PeerChannel(FrameChannel[Received]):
    """One end of a connection, for use on the event loop's thread."""

    def __init__(
        self,
        received: object,
        most_bytes: int,
        receive: Callable[[Received], None],
        lost: Callable[[], None],
        on_writable: Callable[[], None] = lambda: None,
        most_block_bytes: int = 0,
    ) -> None:
        """Prepare an end, with further arguments of `FrameChannel`.

        Args:
            received: type of the messages from the other end.
            on_writable: callback for each time that the channel becomes `writable` again.
            most_block_bytes: maximum size of the blocks after a message, in either direction.
        """
        self._codec = Codec[Received](received)
        super().__init__(self._codec.decode, receive, lost, most_bytes, most_block_bytes)
        self._on_writable = on_writable
        self._most_block_bytes = most_block_bytes
        self._http: asyncio.BaseProtocol | None = None  # the protocol before this one
        self._space = asyncio.Event()
        self._space.set()

    @property
    def writable(self) -> bool:
        """Whether the other end reads as fast as this end sends."""
        return self._space.is_set()

    def take_over(self, transport: asyncio.Transport) -> None:
        """Use a connection that has changed from HTTP to this protocol."""
        self._transport, self._http = transport, transport.get_protocol()
        transport.pause_reading()  # uvloop chooses the way of reading when reading begins
        transport.set_protocol(self)
        if self._most_block_bytes:
            transport.set_write_buffer_limits(self._most_block_bytes)
        transport.resume_reading()

    def send(self, *messages: WorkerMessage) -> None:
        """Send messages without blocks in one write. They are lost if the connection ends first."""
        encode = self._codec.encode
        self.write(b"".join([framed(encode(message)) for message in messages]))

    async def send_blocks(self, message: WorkerMessage) -> None:
        """Send a message with its blocks, after waiting while the other end reads slowly."""
        await self._space.wait()
        data, blocks = self._codec.frame(message)
        self.write(data)
        if blocks:
            self.write(blocks)

    # --- the event loop calls these methods ----------------------------------------------------

    def pause_writing(self) -> None:
        """Tell the sender to wait."""
        self._space.clear()

    def resume_writing(self) -> None:
        """Tell the sender to continue."""
        self._space.set()
        self._on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the connection, also to aiohttp, which closes its side."""
        self._space.set()  # senders notice the end
        super().connection_lost(exc)
        if self._http is not None:
            self._http.connection_lost(exc)
