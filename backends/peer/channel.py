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
from typing import Final, Generic, TypeVar

from draftgate.backends.framing import Frames, FrameTooLarge, framed
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

BROKEN: Final = "the connection broke"
CLOSED: Final = "it closed the connection"
INVALID: Final = "a message was invalid"
TOO_LARGE: Final = "a message was too large"

Received = TypeVar("Received")


class PeerChannel(asyncio.Protocol, Generic[Received]):
    """One end of a connection, for use on the event loop's thread.

    Attributes:
        heard: whether bytes have arrived since a watcher of silence has cleared it.
        writable: whether the other end reads as fast as this end sends.
        reason: why the connection has ended, or None while it is open.
    """

    def __init__(
        self,
        received: object,
        most_bytes: int,
        receive: Callable[[Received], None],
        lost: Callable[[], None],
        on_writable: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare an end.

        Args:
            received: type of the messages from the other end.
            most_bytes: maximum size of such a message.
            receive: receives each message, and must return immediately.
            lost: callback for the end of the connection, after `reason` is set.
            on_writable: callback for each time that the channel becomes `writable` again.
        """
        self._codec = Codec[Received](received)
        self._frames = Frames(most_bytes)
        self._receive = receive
        self._lost = lost
        self._on_writable = on_writable
        self._transport: asyncio.Transport | None = None
        self._http: asyncio.BaseProtocol | None = None  # the protocol before this one
        self.heard = False
        self.writable = True
        self.reason: str | None = None

    def take_over(self, transport: asyncio.Transport) -> None:
        """Use a connection that has changed from HTTP to this protocol."""
        self._transport, self._http = transport, transport.get_protocol()
        transport.pause_reading()  # uvloop chooses the way of reading when reading begins
        transport.set_protocol(self)
        transport.resume_reading()

    def send(self, *messages: WorkerMessage) -> None:
        """Send messages in one write. They are lost if the connection ends first."""
        if self.reason is None and self._transport is not None:
            encode = self._codec.encode
            self._transport.write(b"".join([framed(encode(message)) for message in messages]))

    def close(self) -> None:
        """Close the connection when everything has been sent. The call does not wait for it."""
        if self._transport is not None:
            self._transport.close()

    # --- the event loop calls these methods ----------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Pass on the messages that are complete."""
        self.heard = True
        try:
            for frame in self._frames.add(data):
                try:
                    message = self._codec.decode(frame)
                except ValueError:
                    self.fail(INVALID)
                    return
                self._receive(message)
        except FrameTooLarge:
            self.fail(TOO_LARGE)

    def pause_writing(self) -> None:
        """Tell the sender to wait."""
        self.writable = False

    def resume_writing(self) -> None:
        """Tell the sender to continue."""
        self.writable = True
        self._on_writable()

    def fail(self, reason: str) -> None:
        """End the connection from this side, for a reason."""
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the connection, also to aiohttp, which closes its side."""
        self._end(CLOSED if exc is None else BROKEN)
        if self._http is not None:
            self._http.connection_lost(exc)

    # -------------------------------------------------------------------------------------------

    def _end(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            self._lost()
