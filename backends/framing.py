"""Frames of messages in a stream of bytes, and the calls that they carry.

    length of the message    (4 bytes, big-endian; the highest bit is set if blocks follow)
    length of the blocks     (4 bytes, big-endian; only if blocks follow)
    message                  (msgpack)
    blocks                   (bytes of KV blocks)

The processes of a node and the nodes of a pool use the same frames. Blocks are read into their
final buffer, and written from where they were copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from struct import Struct
from typing import Any, Final, Generic, TypeVar, cast

import msgspec

from draftgate.backends.token_ids import TokenIds, from_bytes, to_bytes

_BROKEN: Final = "the connection broke"
CLOSED: Final = "it closed the connection"
INVALID: Final = "a message was invalid"
TOO_LARGE: Final = "a message was too large"

NO_BYTES: Final = memoryview(b"")

Received = TypeVar("Received")
Reply = TypeVar("Reply")

_LENGTH: Final = Struct("!I")
_LENGTHS: Final = Struct("!II")
_HAS_BLOCKS: Final = 1 << 31

_BUFFER_BYTES: Final = 64 << 10
"""Size of the buffer of a connection between two long messages. (Chosen, not tuned, 2026-11-29.)"""


class FrameTooLarge(ValueError):
    """A frame exceeds the limit of its receiver."""


def framed(message: bytes, block_bytes: int = 0) -> bytes:
    """Return a message with its head in front. Its blocks, if any, must follow."""
    if block_bytes:
        return _LENGTHS.pack(len(message) | _HAS_BLOCKS, block_bytes) + message
    return _LENGTH.pack(len(message)) + message


class FrameReader:
    """The frames in a stream of bytes, however the network splits it."""

    def __init__(self, most_bytes: int, most_block_bytes: int = 0) -> None:
        """Start between two frames.

        Args:
            most_bytes: maximum size of a message.
            most_block_bytes: maximum size of the blocks after a message.
        """
        self._most_bytes = most_bytes
        self._most_block_bytes = most_block_bytes
        self._data = memoryview(bytearray(_BUFFER_BYTES))
        self._begin = self._end = 0  # of the bytes in `_data` that belong to no read frame
        self._message = b""
        self._blocks = NO_BYTES  # those of `_message`, until all have arrived
        self._missing = 0  # bytes of `_blocks` that have not arrived

    def buffer(self) -> memoryview:
        """Return where the next bytes of the stream belong, after `next` has returned None."""
        return self._blocks[-self._missing :] if self._missing else self._data[self._end :]

    def advance(self, num_bytes: int) -> None:
        """Add the bytes that were stored in `buffer`."""
        if self._missing:
            self._missing -= num_bytes
        else:
            self._end += num_bytes

    def next(self) -> tuple[bytes, memoryview] | None:
        """Return the next message with its blocks, or None until more bytes arrive.

        Raises:
            FrameTooLarge: a message or its blocks are too large. They are not received.
        """
        if self._blocks:
            return None if self._missing else self._take_blocks()
        data, begin, block_bytes = self._data, self._begin, 0
        start = begin + _LENGTH.size
        if self._end < start:
            self._make_room()
            return None
        (length,) = _LENGTH.unpack_from(data, begin)
        if length >= _HAS_BLOCKS and self._most_block_bytes:
            length -= _HAS_BLOCKS
            start = begin + _LENGTHS.size
            if self._end < start:
                self._make_room()
                return None
            _, block_bytes = _LENGTHS.unpack_from(data, begin)
        if length > self._most_bytes or block_bytes > self._most_block_bytes:
            raise FrameTooLarge(f"a message has {length} bytes, and its blocks {block_bytes}")
        end = start + length
        if self._end < end:
            self._make_room()
            return None
        self._begin = end
        message = bytes(data[start:end])
        if not block_bytes:
            return message, NO_BYTES
        self._message, self._blocks = message, memoryview(bytearray(block_bytes))
        arrived = min(self._end - end, block_bytes)
        self._blocks[:arrived] = data[end : end + arrived]
        self._begin, self._missing = end + arrived, block_bytes - arrived
        return None if self._missing else self._take_blocks()

    def _take_blocks(self) -> tuple[bytes, memoryview]:
        blocks, self._blocks = self._blocks, NO_BYTES
        return self._message, blocks

    def _make_room(self) -> None:
        """Move the beginning of a frame to the front of the buffer, and double a full buffer."""
        rest, size = self._data[self._begin : self._end], len(self._data)
        if rest and not self._begin and self._end < size:
            return  # more of a long message, for which there is room
        if not rest:
            size = _BUFFER_BYTES
        elif len(rest) > size // 2:
            size *= 2
        data = self._data if size == len(self._data) else memoryview(bytearray(size))
        data[: len(rest)] = bytes(rest)
        self._data, self._begin, self._end = data, 0, len(rest)


class Codec(Generic[Received]):
    """Encodes any message, and decodes messages of one kind, with token ids as bytes.

    `received` is the type of the messages to decode, such as a struct or a union of structs.
    """

    def __init__(self, received: object) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=to_bytes)
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(
            received, dec_hook=_ids_from_bytes
        )

    def encode(self, message: object) -> bytes:
        """Return a message as bytes."""
        return self._encoder.encode(message)

    def frame(self, message: Any) -> tuple[bytes, memoryview]:
        """Return the head of a frame with its message, and its blocks, which are not copied.

        Args:
            message: a message with `blocks` and `with_blocks`, as in `backends.remote_worker`.
        """
        blocks: memoryview = message.blocks
        if blocks:
            message = message.with_blocks(NO_BYTES)
        return framed(self.encode(message), len(blocks)), blocks

    def decode(self, data: bytes, blocks: memoryview = NO_BYTES) -> Received:
        """Return the message that these bytes encode, with the blocks of its frame.

        Raises:
            ValueError: the bytes encode no message.
        """
        try:
            message: Any = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"the data is not a message of this protocol: {error}") from None
        found: Received = message.with_blocks(blocks) if blocks else message
        return found


def _ids_from_bytes(_: type, data: Any) -> TokenIds:
    # msgspec turns a TypeError or ValueError raised here into a DecodeError.
    return from_bytes(data)


class FrameChannel(asyncio.BufferedProtocol, Generic[Received]):
    """One end of a connection with frames, for use on the event loop's thread.

    Attributes:
        heard: whether bytes have arrived since a watcher of silence has cleared it.
        reason: why the connection has ended, or None while it is open.
    """

    def __init__(
        self,
        received: object,
        most_bytes: int,
        receive: Callable[[Received], None],
        lost: Callable[[], None],
        on_writable: Callable[[], None] = lambda: None,
        most_block_bytes: int = 0,
    ) -> None:
        """Prepare an end.

        Args:
            received: type of the messages from the other end.
            most_bytes: maximum size of such a message.
            receive: receives each message, and must return immediately.
            lost: callback for the end of the connection, after `reason` is set.
            on_writable: callback for each time that the channel becomes `writable` again.
            most_block_bytes: maximum size of the blocks after a message, in either direction.
        """
        self._codec = Codec[Received](received)
        self._reader = FrameReader(most_bytes, most_block_bytes)
        self._receive = receive
        self._lost = lost
        self._on_writable = on_writable
        self._most_block_bytes = most_block_bytes
        self._transport: asyncio.Transport | None = None
        self._http: asyncio.BaseProtocol | None = None  # the protocol before this one
        self._space = asyncio.Event()
        self._space.set()
        self._paused = False
        self.heard = False
        self.reason: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def writable(self) -> bool:
        """Whether the other end reads as fast as this end sends."""
        return self._space.is_set()

    def take_over(self, transport: asyncio.Transport) -> None:
        """Use a connection that has changed from HTTP to frames."""
        self._transport, self._http = transport, transport.get_protocol()
        transport.pause_reading()  # uvloop chooses the way of reading when reading begins
        transport.set_protocol(self)
        if self._most_block_bytes:
            transport.set_write_buffer_limits(self._most_block_bytes)
        transport.resume_reading()

    def send(self, *messages: object) -> None:
        """Send messages without blocks in one write. They are lost if the connection ends first."""
        encode = self._codec.encode
        self._write(b"".join([framed(encode(message)) for message in messages]))

    async def send_blocks(self, message: object) -> None:
        """Send a message with its blocks, after waiting while the other end reads slowly."""
        await self._space.wait()
        data, blocks = self._codec.frame(message)
        self._write(data)
        if blocks:
            self._write(blocks)

    def close(self) -> None:
        """Close the connection when everything has been sent. The call does not wait for it."""
        if self._transport is not None:
            self._transport.close()

    def fail(self, reason: str) -> None:
        """End the connection from this side, for a reason."""
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    def pause_receiving(self) -> None:
        """Receive no further messages, so that the other end waits."""
        self._paused = True
        if self.is_open:
            cast(asyncio.Transport, self._transport).pause_reading()

    def resume_receiving(self) -> None:
        """Receive messages again after `pause_receiving`."""
        self._paused = False
        self._pass_on()
        if self.is_open and not self._paused:
            cast(asyncio.Transport, self._transport).resume_reading()

    # --- the event loop calls these methods ----------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where to store the next bytes."""
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on the messages that are complete."""
        self.heard = True
        self._reader.advance(nbytes)
        self._pass_on()

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
        self._end(CLOSED if exc is None else _BROKEN)
        if self._http is not None:
            self._http.connection_lost(exc)

    # -------------------------------------------------------------------------------------------

    def _write(self, data: bytes | memoryview) -> None:
        if self.reason is None and self._transport is not None:
            self._transport.write(data)

    def _pass_on(self) -> None:
        try:
            while self.reason is None and not self._paused:
                frame = self._reader.next()
                if frame is None:
                    return
                try:
                    message = self._codec.decode(*frame)
                except ValueError:
                    self.fail(INVALID)
                    return
                self._receive(message)
        except FrameTooLarge:
            self.fail(TOO_LARGE)

    def _end(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            self._lost()


class Calls(Generic[Reply]):
    """The calls that wait for their replies, by number, for use on the event loop's thread."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}

    def open(self) -> tuple[int, asyncio.Future[Reply]]:
        """Return the number of a new call, and its reply."""
        number = next(self._numbers)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        return number, reply

    def settle(self, number: int, reply: Reply) -> None:
        """Record the reply to a call if its caller still waits."""
        call = self._waiting.pop(number, None)
        if call is not None and not call.done():
            call.set_result(reply)

    def drop(self, number: int) -> None:
        """Forget a call, if it still waits."""
        self._waiting.pop(number, None)

    def fail(self, error: Exception) -> None:
        """End all calls with an error."""
        calls, self._waiting = self._waiting, {}
        for call in calls.values():
            if not call.done():
                call.set_exception(error)
