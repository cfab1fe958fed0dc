"""An HTTP connection to an upstream, and the response that it receives.

httptools parses the responses. A connection is a protocol of the event loop, without a task or a
stream of its own, because aiohttp's client took a fifth of the time of a forwarded request.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Any, Final, Protocol, cast

import httptools
from multidict import CIMultiDict

from draftgate.backends.connection_errors import ConnectionFailed

MOST_HEAD_BYTES: Final = 64 << 10
"""Maximum size of the head of a response in bytes, of which a gateway passes on most."""

MOST_UNREAD_BYTES: Final = 128 << 10
"""Bytes of a body from which the upstream has to wait for the reader of the response."""


class Pool(Protocol):
    """The owner of connections."""

    def add(self, connection: Connection) -> None:
        """Take back a connection whose exchange has ended."""
        ...

    def remove(self, connection: Connection) -> None:
        """Forget a closed connection."""
        ...


class Response:
    """A response of which the head has arrived.

    Attributes:
        status: the status.
        headers: the headers, without regard to upper and lower case.
        is_complete: whether the last byte of the body has arrived.
    """

    __slots__ = (
        "_blocks", "_connection", "_decoder", "_error", "_reader", "_unread_bytes", "headers",
        "is_complete", "status",
    )  # fmt: skip

    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.is_complete = False
        self._connection = connection
        self._blocks: list[bytes] = []
        self._unread_bytes = 0
        self._decoder: Any = None  # of a compressed body
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    @property
    def content_type(self) -> str:
        """The type of the body in lower case, without parameters."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    async def read_any(self) -> bytes:
        """Return the bytes that have arrived, or wait for some. The end of the body is empty.

        Raises:
            OSError: the connection broke within the body.
        """
        while not self._blocks:
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
        if not self.is_complete:  # otherwise the connection may have another exchange
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

    def close(self) -> None:
        """Close the connection, unless the body has arrived and the connection is free again."""
        if not self.is_complete:
            self._connection.abort()

    def begin(self, status: int) -> None:
        """Record the end of the head."""
        self.status = status
        coding = self.headers.get("Content-Encoding", "identity").strip().lower()
        if coding in {"gzip", "x-gzip", "deflate"}:  # against the request's Accept-Encoding
            self._decoder = zlib.decompressobj(32 + zlib.MAX_WBITS)
        elif coding != "identity":
            raise ConnectionFailed("its response cannot be read (unknown Content-Encoding)")

    def add(self, block: bytes) -> bool:
        """Add bytes of the body, and return whether the upstream has to wait for the reader.

        Raises:
            zlib.error: the body is not compressed as its header says.
        """
        if self._decoder is not None:
            block = self._decoder.decompress(block)
        if block:
            self._blocks.append(block)
            self._unread_bytes += len(block)
            self._wake()
        return self._unread_bytes > MOST_UNREAD_BYTES

    def end(self, error: Exception | None = None) -> None:
        """Record the end of the body, or why it ends early."""
        self.is_complete, self._error = error is None, error
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Connection(asyncio.Protocol):
    """A connection, which is idle or has one exchange at a time.

    httptools calls the `on_` methods.

    Attributes:
        idle_since_s: the time from which it is idle, by the event loop's clock.
    """

    _transport: asyncio.Transport

    def __init__(self, pool: Pool) -> None:
        self.idle_since_s = 0.0
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._response: Response | None = None  # until its body has arrived
        self._head: asyncio.Future[Response] | None = None  # until its head has arrived
        self._head_bytes = 0
        self._has_body = True
        self._is_interim = self._exceeds = self._paused = False

    async def exchange(self, request: bytes, *, has_body: bool) -> Response:
        """Send a request, and return the response after its head.

        Args:
            has_body: False for `HEAD`, whose response has the header of a body but no body.

        Raises:
            OSError: the connection broke, or the response is not HTTP.
        """
        if self._transport.is_closing():
            raise ConnectionFailed("it closed the connection")
        self._response, self._head_bytes, self._has_body = Response(self), 0, has_body
        self._head = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._head
        except BaseException:
            self.abort()
            raise

    @property
    def is_open(self) -> bool:
        """Whether the next request can be sent."""
        return not self._transport.is_closing()

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
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__ or error
            self.abort(cause if isinstance(cause, ConnectionFailed) else _unreadable(cause))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.abort(_unreadable(error))
        if self._head is not None and self._head_bytes > MOST_HEAD_BYTES:
            self.abort(ConnectionFailed("its response cannot be read (its head is too large)"))
        if self._exceeds:  # bytes that no request asked for
            self.abort()

    def eof_received(self) -> None:
        """End a body that only the end of the connection ends."""
        response = self._response
        if self._head is None and response is not None:
            headers = response.headers
            if "Content-Length" not in headers and "Transfer-Encoding" not in headers:
                self._response = None
                response.end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the exchange, and leave the pool."""
        self._pool.remove(self)
        if self._head is None:
            self._fail(ConnectionFailed("the body is incomplete"))
        else:
            known = exc if isinstance(exc, OSError) else None
            self._fail(known or ConnectionFailed("it closed the connection"))

    def on_message_begin(self) -> None:
        """Note bytes of a response without a request."""
        self._exceeds = self._response is None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header. Trailers, which follow the body, are ignored."""
        if self._head is not None and self._response is not None:
            text = value.decode("utf-8", "surrogateescape")
            self._response.headers.add(name.decode("latin-1"), text)

    def on_headers_complete(self) -> None:
        """Return the response to the sender of the request."""
        head, response, status = self._head, self._response, self._parser.get_status_code()
        if head is None or response is None:
            return
        self._is_interim = 100 <= status < 200
        if self._is_interim:
            response.headers.clear()
            return
        response.begin(status)
        self._head = None
        if not head.done():
            head.set_result(response)
        if not self._has_body:
            self._response = None
            response.end()
            self._transport.abort()

    def on_body(self, body: bytes) -> None:
        """Add bytes of the body."""
        if self._response is not None and self._response.add(body) and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """End the response, and give the connection back."""
        response = self._response
        if self._is_interim or response is None:
            return
        self._response = None
        response.end()
        # A server that responds before it has read the request does not read its rest.
        unsent = self._transport.get_write_buffer_size()
        if unsent or not self._parser.should_keep_alive() or self._transport.is_closing():
            self._transport.abort()
            return
        self.resume()
        self._pool.add(self)

    def _fail(self, error: Exception) -> None:
        head, response = self._head, self._response
        self._head = self._response = None
        if head is not None:
            if not head.done():
                if isinstance(error, ConnectionFailed):
                    error.has_begun = self._head_bytes > 0
                head.set_exception(error)
        elif response is not None:
            response.end(error)


def _unreadable(error: BaseException) -> ConnectionFailed:
    return ConnectionFailed(f"its response cannot be read ({type(error).__name__})")
