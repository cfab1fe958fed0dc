"""The stream of KV blocks between two nodes, beside the connection for requests (`channel`).

The connection begins with an HTTP request (`upgrade`) to

    /peer/v1/workers/NUMBER/blocks?format=DIGEST

Afterwards, both nodes send frames (`kv_transfer.framing`). Blocks are read into their final buffer,
and written from where they were copied. Deltas never wait for blocks, because the blocks have their
own connection.

The connecting node sends calls, and the other node answers each of them, in any order. The end of
the connection ends all calls.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from draftgate.backends.kv_transfer.format import KvFormat
from draftgate.backends.kv_transfer.framing import LENGTHS, NO_BYTES, FrameCodec
from draftgate.backends.kv_transfer.transfer import CHUNK_BYTES, TransferOutcome
from draftgate.backends.remote_worker import KvCall, KvReply, WorkerMessage

BLOCKS_PATH: Final = "/blocks"
"""Suffix of a worker's path (`channel.WORKER_PATH`)."""

MOST_MESSAGE_BYTES: Final = 16 << 20
"""Maximum size of a message without its blocks: the hashes of 15 million tokens."""

Received = TypeVar("Received")


class FetchBlocks(WorkerMessage, frozen=True):
    """Message to the other node to pull blocks into its worker, directly from a third node.

    Attributes:
        source: URL of the third node's worker.
        hashes: hash chain of the prefix.
        first: number of leading blocks that the worker holds already.
        most_s: time after which the transfer ends, in seconds, or None for no limit.
        urgent: as for `KvSource.pull_blocks`.
    """

    id: int
    source: str
    hashes: tuple[bytes, ...]
    first: int
    most_s: float | None
    urgent: bool = False


class FetchedBlocks(WorkerMessage, frozen=True):
    """Message from the other node after `FetchBlocks`.

    Attributes:
        outcome: the outcome of the transfer, or None if the node cannot reach the source.
    """

    id: int
    outcome: TransferOutcome | None


class CancelKvCall(WorkerMessage, frozen=True):
    """Message to the other node to end a call, whose answer is no longer needed."""

    id: int


class KvCallFailed(WorkerMessage, frozen=True):
    """Message from the other node that a call failed, with the reason."""

    id: int
    reason: str


BlockCommand = KvCall | FetchBlocks | CancelKvCall
BlockReport = KvReply | FetchedBlocks | KvCallFailed


def format_digest(form: KvFormat) -> str:
    """Return a digest of a format. Both ends of a stream must have the same format."""
    return hashlib.blake2b(msgspec.msgpack.encode(form), digest_size=16).hexdigest()


class BlockStream(asyncio.BufferedProtocol, Generic[Received]):
    """One end of a stream, for use on the event loop's thread."""

    def __init__(
        self,
        received: object,
        form: KvFormat,
        receive: Callable[[Received], None],
        lost: Callable[[], None],
    ) -> None:
        """Prepare a stream.

        Args:
            received: type of the messages from the other end.
            form: format of the blocks.
            receive: receives each message, and must return immediately.
            lost: callback for the end of the connection.
        """
        self._codec: FrameCodec[Received] = FrameCodec(received)
        self._most_block_bytes = max(CHUNK_BYTES, form.block_bytes)
        self._receive = receive
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._http: asyncio.BaseProtocol | None = None  # the protocol before this one
        self._writable = asyncio.Event()
        self._writable.set()
        self._message, self._block_bytes = bytearray(), 0
        self._expect(LENGTHS.size, self._read_lengths)

    def take_over(self, transport: asyncio.Transport) -> None:
        """Use a connection that has changed from HTTP to this protocol."""
        self._transport, self._http = transport, transport.get_protocol()
        transport.pause_reading()  # uvloop chooses the way of reading when reading begins
        transport.set_protocol(self)
        transport.set_write_buffer_limits(CHUNK_BYTES)
        transport.resume_reading()

    async def send(self, message: WorkerMessage) -> None:
        """Send a message, after waiting while the other end reads slowly.

        Raises:
            ConnectionError: the connection has ended.
        """
        await self._writable.wait()
        self.send_now(message)

    def send_now(self, message: WorkerMessage) -> None:
        """Send a small message.

        Raises:
            ConnectionError: the connection has ended.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the stream of blocks has ended")
        data, blocks = self._codec.encode(message)
        self._transport.write(data)
        if blocks:
            self._transport.write(blocks)

    def pause_reading(self) -> None:
        """Stop reading, so that the other end waits."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again after `pause_reading`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        """Close the connection without waiting for messages that were not sent."""
        if self._transport is not None:
            self._transport.abort()

    # --- the event loop calls these methods ----------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the part of the present buffer that is not filled."""
        return self._buffer[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Continue with the next part of the frame when the buffer is full."""
        self._filled += nbytes
        if self._filled < len(self._buffer):
            return
        try:
            self._then()
        except ValueError:  # not a frame of this protocol
            self.close()

    def pause_writing(self) -> None:
        """Let senders wait."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let senders continue."""
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the connection, also to aiohttp, which closes its side."""
        self._writable.set()  # senders notice the end
        self._lost()
        if self._http is not None:
            self._http.connection_lost(exc)

    # -------------------------------------------------------------------------------------------

    def _expect(self, num_bytes: int, then: Callable[[], None]) -> bytearray:
        """Read the next bytes into a new buffer before calling `then`."""
        found = bytearray(num_bytes)
        self._buffer, self._filled, self._then = memoryview(found), 0, then
        return found

    def _read_lengths(self) -> None:
        message_bytes, self._block_bytes = LENGTHS.unpack(self._buffer)
        if not 0 < message_bytes <= MOST_MESSAGE_BYTES:
            raise ValueError(f"a message has {message_bytes} bytes")
        if self._block_bytes > self._most_block_bytes:
            raise ValueError(f"a chunk has {self._block_bytes} bytes")
        self._message = self._expect(message_bytes, self._read_message)

    def _read_message(self) -> None:
        if self._block_bytes:
            self._expect(self._block_bytes, self._read_blocks)
        else:
            self._finish_frame(NO_BYTES)

    def _read_blocks(self) -> None:
        self._finish_frame(self._buffer)

    def _finish_frame(self, blocks: memoryview) -> None:
        message = self._codec.decode(self._message, blocks)
        self._expect(LENGTHS.size, self._read_lengths)
        self._receive(message)
