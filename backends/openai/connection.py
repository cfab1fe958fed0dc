"""An HTTP connection to an upstream, and the response that it receives.

httptools parses the responses. A connection is a protocol of the event loop, without a task or a
stream of its own, because aiohttp's client took a fifth of the time of a forwarded request.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final, Protocol, cast

import httptools
from multidict import CIMultiDictProxy

from draftgate.backends.connection_errors import ConnectionFailed
from draftgate.backends.openai.response_head import MOST_HEADS, Fields, Head, read_head
from draftgate.compressed import BodyDecoder, CompressionError

_ENCODINGS: Final = {b"gzip": "gzip", b"x-gzip": "gzip", b"deflate": "deflate"}
"""The codings that some upstreams use although `Accept-Encoding` does not allow them."""

_MOST_HEAD_BYTES: Final = 64 << 10
"""Maximum size of the head of a response in bytes, of which a gateway passes on most."""

_MOST_KNOWN_BYTES: Final = 8 << 10
"""Maximum size of a head that is kept, which bounds the memory of all of them."""

_LENGTH: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ?([0-9]{1,6})\r\n")

MOST_UNREAD_BYTES: Final = 128 << 10
"""Bytes of a body from which the upstream has to wait for the reader of the response."""


class ConnectionPool(Protocol):
    """The owner of connections."""

    def add(self, connection: Connection) -> None:
        """Take back a connection whose exchange has ended."""
        ...

    def remove(self, connection: Connection) -> None:
        """Forget a closed connection."""
        ...


_known: Final[dict[tuple[bytes, bytes], Head]] = {}
"""The heads of whole responses, by their bytes before and after the digits of the length.

The heads of an upstream are mostly equal but for this length. The parser has accepted each of them
once, so it would accept them with any other length in the same place."""


def _split(data: bytes) -> tuple[tuple[bytes, bytes], bytes] | None:
    """Return the key of the head and the body if data is a whole response with status 200."""
    end = data.find(b"\r\n\r\n") + 4
    length = _LENGTH.search(data, 0, end)
    if not 4 <= end <= _MOST_KNOWN_BYTES or length is None or int(length[1]) != len(data) - end:
        return None
    if not data.startswith(b"HTTP/1.1 200 "):
        return None
    return (data[: length.start(1)], data[length.end(1) : end]), data[end:]


class Response:
    """A response of which the first bytes of the body have arrived.

    Attributes:
        status: the status, or 0 before the head has arrived.
        head: the head, once it has arrived.
        is_complete: whether the last byte of the body has arrived and is decoded.
    """

    __slots__ = (
        "_blocks", "_connection", "_decoder", "_error", "_has_arrived", "_reader", "_unread_bytes",
        "head", "is_complete", "status",
    )  # fmt: skip

    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.head: Head
        self.is_complete = self._has_arrived = False
        self._connection = connection
        self._blocks: list[bytes] = []
        self._unread_bytes = 0
        self._decoder: BodyDecoder | None = None  # of a compressed body
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """The headers for a client of the gateway (`Head`)."""
        return self.head.headers

    @property
    def body(self) -> bytes | None:
        """The whole body, or None unless all of it has arrived before it was read."""
        return b"".join(self._blocks) if self.is_complete else None

    async def read_any(self) -> bytes:
        """Return the bytes that have arrived, or wait for some. The end of the body is empty.

        Raises:
            OSError: the connection broke within the body.
        """
        while not self._blocks:
            if self._decoder is not None and self._decoder.pending:
                if block := self._decoded(self._decoder):
                    self._blocks.append(block)
                self._end_decoded(self._decoder)
                continue
            if self._error is not None:
                raise self._error
            if self.is_complete:
                return b""
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        blocks, self._blocks = self._blocks, []
        self._unread_bytes = 0
        if not self._has_arrived:  # otherwise the connection may have another exchange
            self._connection.resume()
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    async def read(self, most_bytes: int) -> bytes:
        """Return the whole body.

        Raises:
            OSError: the connection broke within the body.
            ValueError: the body exceeds `most_bytes`.
        """
        body = bytearray()
        while block := await self.read_any():
            body += block
            if len(body) > most_bytes:
                raise ValueError(f"the body exceeds {most_bytes} bytes")
        return bytes(body)

    async def wait_for_body(self, most_bytes: int) -> bytes:
        """Return the whole body, which can be read again.

        Raises:
            OSError, ValueError: as in `read`.
        """
        body = await self.read(most_bytes)
        if body:
            self._blocks.insert(0, body)
        return body

    def close(self) -> None:
        """Close the connection, unless the body has arrived and the connection is free again."""
        if not self._has_arrived:
            self._connection.abort()

    def take(self, head: Head, body: bytes) -> None:
        """Take the whole of a successful response."""
        self.status, self.head, self.is_complete = 200, head, True
        self._has_arrived = True
        if body:
            self._blocks.append(body)

    def begin(self, status: int, fields: Fields) -> None:
        """Read the head."""
        self.head = head = read_head(fields)
        coding = head.coding
        if encoding := _ENCODINGS.get(coding):
            self._decoder = BodyDecoder(encoding, lenient=True)
        elif coding != b"identity":
            raise ConnectionFailed("its response cannot be read (unknown Content-Encoding)")
        self.status = status

    def add(self, block: bytes) -> bool:
        """Add bytes of the body, and return whether the upstream has to wait for the reader.

        Raises:
            ConnectionFailed: the body is not compressed as its header says.
        """
        if self._decoder is not None:
            self._decoder.add(block)
            block = self._decoded(self._decoder)
        if block:
            self._blocks.append(block)
            self._unread_bytes += len(block)
            if self._reader is not None:
                self._wake(self._reader)
        return self._unread_bytes > MOST_UNREAD_BYTES

    def end(self, error: Exception | None = None) -> None:
        """Record the end of the body, or why it ends early."""
        self._has_arrived, self._error = error is None, error
        if self._decoder is None:
            self.is_complete = self._has_arrived
        else:
            self._end_decoded(self._decoder)
        if self._reader is not None:
            self._wake(self._reader)

    def _decoded(self, decoder: BodyDecoder) -> bytes:
        """Decode received bytes until the reader has to take some."""
        found, size = list[bytes](), self._unread_bytes
        try:
            while decoder.pending and size <= MOST_UNREAD_BYTES:
                found.append(decoder.decode(MOST_UNREAD_BYTES))
                size += len(found[-1])
        except CompressionError:
            raise ConnectionFailed("its response cannot be read (compression)") from None
        return b"".join(found)

    def _end_decoded(self, decoder: BodyDecoder) -> None:
        """Note the end of a body that has arrived, once all of it is decoded."""
        if self._has_arrived and not decoder.pending and self._error is None:
            try:
                decoder.finish()
            except CompressionError:
                self._error = ConnectionFailed("the compressed body is incomplete")
            else:
                self.is_complete = True

    def _wake(self, reader: asyncio.Future[None]) -> None:
        self._reader = None
        if not reader.done():
            reader.set_result(None)


class Connection(asyncio.Protocol):
    """A connection, which is idle or has one exchange at a time.

    httptools calls the `on_` methods.

    Attributes:
        idle_since_s: the time from which it is idle, by the event loop's clock.
    """

    _transport: asyncio.Transport

    def __init__(self, pool: ConnectionPool) -> None:
        self.idle_since_s = 0.0
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._response: Response | None = None  # until its body has arrived
        self._waiter: asyncio.Future[Response] | None = None  # until the sender gets the response
        self._fields: list[tuple[bytes, bytes]] = []  # of the head
        self._head_bytes = 0
        self._whole: tuple[bytes, bytes] | None = None  # the key of a head with a whole response
        self._has_body = True
        self._is_short = self._is_interim = self._exceeds = self._paused = False

    def send(self, request: bytes, *, has_body: bool) -> asyncio.Future[Response]:
        """Send a request, and return the future of its response.

        The future has the response once the first bytes of its body have arrived, or the whole of a
        short body. The sender aborts the connection if it does not wait for the future.

        Args:
            has_body: False for `HEAD`, whose response has the header of a body but no body.

        Raises:
            OSError: the connection is closed. The future raises it if the connection breaks before
                the head of the response has arrived, or if the response is not HTTP.
        """
        transport = self._transport
        if transport.is_closing():
            raise ConnectionFailed("it closed the connection")
        self._response, self._head_bytes, self._has_body = Response(self), 0, has_body
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        transport.write(request)
        return waiter

    @property
    def is_open(self) -> bool:
        """Whether the next request can be sent."""
        return not self._transport.is_closing()

    @property
    def waits(self) -> bool:
        """Whether a request was sent, and the sender has not got its response."""
        return self._waiter is not None

    @property
    def received_bytes(self) -> int:
        """Number of bytes of the present response so far."""
        return self._head_bytes

    def resume(self) -> None:
        """Read on, if the upstream has waited for the reader."""
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def abort(self, error: Exception | None = None) -> None:
        """Close the connection at once, and fail its exchange."""
        self._fail(error or ConnectionFailed("it closed the connection"))
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has another base class

    def data_received(self, data: bytes) -> None:
        """Parse bytes."""
        response = self._response
        if response is not None and not self._head_bytes and self._has_body:
            found = _split(data)
            if found is not None:
                self._whole, body = found
                head = _known.get(self._whole)
                if head is not None:
                    response.take(head, body)
                    self._response = self._whole = None
                    self._answer(response)
                    self._release()
                    return
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__ or error
            self.abort(cause if isinstance(cause, ConnectionFailed) else _unreadable(cause))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.abort(_unreadable(error))
        if response is not None and not response.status and self._head_bytes > _MOST_HEAD_BYTES:
            self.abort(ConnectionFailed("its response cannot be read (its head is too large)"))
        if self._exceeds:  # bytes that no request asked for
            self.abort()

    def eof_received(self) -> None:
        """End a body that only the end of the connection ends."""
        response = self._response
        if response is not None and response.status and response.head.ends_with_connection:
            self._end(response)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the exchange, and leave the pool."""
        self._pool.remove(self)
        if self._response is not None and self._response.status:
            self._fail(ConnectionFailed("the body is incomplete"))
        else:
            known = exc if isinstance(exc, OSError) else None
            self._fail(known or ConnectionFailed("it closed the connection"))

    def on_message_begin(self) -> None:
        """Note bytes of a response without a request."""
        self._exceeds = self._response is None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Trailers, which follow the body, are ignored."""
        if self._response is not None and not self._response.status:
            self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """Read the head of the response."""
        response, status = self._response, self._parser.get_status_code()
        fields, self._fields = self._fields, []
        self._is_interim = 100 <= status < 200
        if response is None or self._is_interim:
            return
        response.begin(status, tuple(fields))
        length = response.head.length
        self._is_short = length is not None and length <= MOST_UNREAD_BYTES
        if not self._has_body:
            self._end(response)
            self._transport.abort()

    def on_body(self, body: bytes) -> None:
        """Add bytes of the body."""
        response = self._response
        if response is None:
            return
        must_wait = response.add(body)
        if self._waiter is not None and (must_wait or not self._is_short):
            self._answer(response)
        if must_wait and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """End the response, and give the connection back."""
        response, whole = self._response, self._whole
        if self._is_interim or response is None:
            return
        self._end(response)
        if not self._parser.should_keep_alive():
            self._transport.abort()
            return
        if whole is not None and response.head.coding == b"identity":
            if len(_known) >= MOST_HEADS:
                del _known[next(iter(_known))]
            _known[whole] = response.head
        self._release()

    def _release(self) -> None:
        """Give the connection back after a response, or close it."""
        # A server that responds before it has read the request does not read its rest.
        transport = self._transport
        if transport.get_write_buffer_size() or transport.is_closing():
            transport.abort()
            return
        if self._paused:
            self.resume()
        self._pool.add(self)

    def _answer(self, response: Response) -> None:
        """Give the response to the sender of the request."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(response)

    def _end(self, response: Response, error: Exception | None = None) -> None:
        self._response = self._whole = None
        response.end(error)
        self._answer(response)

    def _fail(self, error: Exception) -> None:
        response, waiter = self._response, self._waiter
        if response is None:
            return
        if response.status:
            self._end(response, error)
            return
        self._response = self._waiter = None
        if waiter is not None and not waiter.done():
            if isinstance(error, ConnectionFailed):
                error.has_begun = self._head_bytes > 0
            waiter.set_exception(error)


def _unreadable(error: BaseException) -> ConnectionFailed:
    return ConnectionFailed(f"its response cannot be read ({type(error).__name__})")
