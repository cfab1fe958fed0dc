"""Requests that the gateway reads itself, because aiohttp takes several times as long.

A direct request is one of the `POST` requests with most traffic, in the form in which nearly all
clients send it: HTTP/1.1, a body of known length that is not encoded, and no header that changes
how the connection is used. aiohttp reads all other requests, on the same connection and from their
first byte (`connections`). `Expected` decides which requests are direct.

The heads of one client are equal but for the length of the body. Each is therefore parsed once, and
then found by its bytes.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import httptools
from aiohttp import HttpVersion, HttpVersion11, web
from multidict import CIMultiDict, CIMultiDictProxy

_MOST_HEAD_BYTES: Final = 16 << 10
"""Maximum size of a head. The default of most servers is 8 or 16 KiB."""

MOST_BODY_BYTES: Final = 1 << 20
"""Maximum size of a body, which is kept in memory until it is complete."""

MOST_HEADS: Final = 256
"""Number of known heads. Clients whose headers differ each time only replace each other's."""

T = TypeVar("T")

HOST: Final = re.compile(r"(\[[0-9A-Za-z:.%~_-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]+)(:[0-9]*)?")
"""A host with an optional port (RFC 3986, section 3.2.2)."""

_LENGTH: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ?([0-9]{1,7})\r\n")
_TARGET: Final = re.compile(rb"POST (/[!-~]*) HTTP/1\.1\r\n")
_LONGEST_LINE: Final = 256

_UNUSUAL: Final = {
    "transfer-encoding": "transfer_encoding",
    "content-encoding": "content_encoding",
    "expect": "expect",
    "upgrade": "upgrade",
    "http2-settings": "upgrade",
    "trailer": "transfer_encoding",
    "te": "transfer_encoding",
    "origin": "browser",
    "access-control-request-method": "browser",
}
"""Headers that only aiohttp handles, with the reason that the metric shows."""

HANDOVERS: Final = (*dict.fromkeys(_UNUSUAL.values()), "connection", "head", "body", "slow")
"""The reasons why aiohttp reads a request of a direct endpoint."""

_REASONS: Final = {status.value: status.phrase for status in HTTPStatus}
_NO_BODY: Final = frozenset({204, 304})


Headers: TypeAlias = Mapping[str, str] | Sequence[tuple[str, str]]
"""The headers of a response."""


class Head:
    """The head of a request, which later requests may share.

    Attributes:
        path: the path without the query.
        target: the path with the query, as sent. The path does not end with a slash.
        known: what has been read in the headers or checked, by what has read or checked it.
    """

    __slots__ = ("headers", "known", "path", "target")

    def __init__(self, target: str, headers: CIMultiDictProxy[str]) -> None:
        self.path = target.partition("?")[0]
        self.target = target
        self.headers = headers
        self.known: dict[object, Any] = {}


class Expected:
    """The requests that are direct, and the heads that are known."""

    def __init__(self, paths: Iterable[str], most_body_bytes: int) -> None:
        """Expect requests for some paths.

        Args:
            most_body_bytes: the maximum size of a body for any request. Larger bodies are refused,
                which aiohttp does.
        """
        self._paths = frozenset(path.encode() for path in paths)
        self._most_body_bytes = min(most_body_bytes, MOST_BODY_BYTES)
        self._heads: dict[tuple[bytes, bytes], Head] = {}

    def begins(self, data: bytes) -> bool:
        """Return whether bytes begin with the request line of a direct endpoint."""
        found = _TARGET.match(data, 0, _LONGEST_LINE)
        return found is not None and found[1].partition(b"?")[0] in self._paths

    def head(self, data: bytes | bytearray) -> tuple[Head, int, int] | str | None:
        """Return the head with which data begins.

        Args:
            data: bytes for which `begins` returned True, perhaps with further bytes.

        Returns:
            The head, its size and the size of the body, or the reason why the request is not
            direct, or None if the head is incomplete.
        """
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            return None if len(data) < _MOST_HEAD_BYTES else "head"
        if end > _MOST_HEAD_BYTES:
            return "head"
        length = _LENGTH.search(data, 0, end)
        if length is None:
            parsed = _parsed(bytes(data[:end]))
            return parsed if isinstance(parsed, str) else "head"
        size = int(length[1])
        if size > self._most_body_bytes:
            return "body"
        # A known head has one length, at this place, so another length does not change the rest.
        known = bytes(data[: length.start(1)]), bytes(data[length.end(1) : end])
        head = self._heads.get(known)
        if head is None:
            parsed = _parsed(bytes(data[:end]))
            if isinstance(parsed, str):
                return parsed
            if len(self._heads) >= MOST_HEADS:
                del self._heads[next(iter(self._heads))]
            head = self._heads[known] = parsed
        return head, end, size


class _Lines:
    """What a parser finds in a head."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[str, str]] = []
        self.complete = False

    def on_url(self, url: bytes) -> None:
        """Take the target, or a part of it."""
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self.headers.append((name.decode("ascii"), value.strip(b" \t").decode()))

    def on_headers_complete(self) -> None:
        """Note that the head is valid."""
        self.complete = True


def _parsed(data: bytes) -> Head | str:
    """Return a head, or the reason why its request is not direct."""
    lines = _Lines()
    parser = httptools.HttpRequestParser(lines)
    try:
        parser.feed_data(data)
    except (httptools.HttpParserError, UnicodeDecodeError):
        return "head"
    except httptools.HttpParserUpgrade:
        return "upgrade"
    if not lines.complete or not lines.url.isascii():
        return "head"
    headers = CIMultiDict(lines.headers)
    for name, reason in _UNUSUAL.items():
        if name in headers:
            return reason
    if any(value.lower() != "keep-alive" for value in headers.getall("Connection", ())):
        return "connection"
    if any(len(headers.getall(name, ())) != 1 for name in ("Host", "Content-Length")):
        return "head"
    if not HOST.fullmatch(headers["Host"]):
        return "head"
    return Head(lines.url.decode(), CIMultiDictProxy(headers))


class Carrier(Protocol):
    """The connection of a direct request.

    Attributes:
        direct: what its direct requests need.
        keeps_alive: whether the response allows further requests.
    """

    direct: Direct
    keeps_alive: bool
    transport: asyncio.Transport | None

    @property
    def ssl_context(self) -> ssl.SSLContext | None:
        """The TLS of the connection, or None."""
        ...

    @property
    def peername(self) -> str | tuple[Any, ...] | None:
        """The address of the client."""
        ...

    @property
    def writing_paused(self) -> bool:
        """Whether the client reads slowly."""
        ...

    async def drained(self) -> None:
        """Wait until the client has read most of what has been written.

        Raises:
            ConnectionResetError: the client has disconnected.
        """
        ...


class DirectRequest(dict[Any, Any]):
    """A complete request, with those attributes of aiohttp's requests that handlers use.

    The items are those of `web.RequestKey`.

    Attributes:
        body: the body.
        begun: whether the response has begun.
    """

    __slots__ = ("app", "begun", "body", "head", "headers", "path", "protocol", "transport")

    method = "POST"
    version: HttpVersion = HttpVersion11

    def __init__(self, connection: Carrier, head: Head, body: bytes) -> None:
        self.app = connection.direct.app
        self.protocol = connection
        self.transport = connection.transport
        self.head = head
        self.headers = head.headers
        self.path = head.path
        self.body = body
        self.begun = False

    @property
    def scheme(self) -> str:
        """The scheme of the connection."""
        return "http" if self.protocol.ssl_context is None else "https"

    @property
    def remote(self) -> str | None:
        """The address of the client."""
        peer = self.protocol.peername
        return peer[0] if isinstance(peer, tuple) else peer


class DirectResponse:
    """A response to a direct request, with those methods of aiohttp's responses that are used.

    The headers are sent with the first bytes.

    Attributes:
        keep_alive: False if the connection ends with the response, else None.
    """

    __slots__ = ("_ended", "_head", "_request", "headers", "keep_alive", "status")

    def __init__(self, request: DirectRequest, status: int, headers: Headers) -> None:
        self._request = request
        self.status = status
        self.headers = CIMultiDict(headers)
        self.keep_alive: bool | None = None
        self._head = b""
        self._ended = False

    def force_close(self) -> None:
        """End the connection with the response."""
        self.keep_alive = False

    async def prepare(self) -> DirectResponse:
        """Begin a response whose length is not known."""
        self.headers["Transfer-Encoding"] = "chunked"
        waiting = self._request.protocol.direct.finish_headers(self._request, self)
        if waiting is not None:
            await waiting
        self._begin()
        return self

    async def send(self, body: bytes) -> DirectResponse:
        """Send a whole response, and return it.

        Raises:
            ConnectionResetError: the client has disconnected.
        """
        if self.status in _NO_BODY:
            body = b""
        else:
            self.headers["Content-Length"] = str(len(body))
        waiting = self._request.protocol.direct.finish_headers(self._request, self)
        if waiting is not None:
            await waiting
        self._begin()
        self._write(self._head + body)
        return self

    async def write(self, data: bytes) -> None:
        """Send a part of the body, and wait while the client reads slowly.

        Raises:
            ConnectionResetError: the client has disconnected.
        """
        head, self._head = self._head, b""
        self._write(b"%b%x\r\n%b\r\n" % (head, len(data), data))
        if self._request.protocol.writing_paused:
            await self.drain()

    async def write_eof(self, data: bytes = b"") -> None:
        """Send the last part of the body. A second call has no effect."""
        if self._ended:
            return
        self._ended = True
        head, self._head = self._head, b""
        last = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        self._write(b"%b%b0\r\n\r\n" % (head, last))

    async def drain(self) -> None:
        """Wait while the client reads slowly.

        Raises:
            ConnectionResetError: the client has disconnected.
        """
        await self._request.protocol.drained()

    def _begin(self) -> None:
        """Use the headers, which are complete."""
        request = self._request
        self._head = response_head(self.status, self.headers)
        request.begun = True
        request.protocol.keeps_alive = self.keep_alive is not False

    def _write(self, data: bytes) -> None:
        transport = self._request.protocol.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has disconnected")
        transport.write(data)


class Direct(NamedTuple):
    """What connections need for direct requests.

    Attributes:
        serve: responds to a request, and always returns.
        finish_headers: completes the headers of a response, and returns what has to be awaited
            for the rest, or None.
        hand_over: counts a request of a direct endpoint that aiohttp reads, with the reason.
    """

    app: web.Application
    expected: Expected
    serve: Callable[[DirectRequest], Coroutine[Any, Any, None]]
    finish_headers: Callable[[DirectRequest, DirectResponse], Awaitable[None] | None]
    hand_over: Callable[[str], None]


Request: TypeAlias = web.Request | DirectRequest
Response: TypeAlias = web.StreamResponse | DirectResponse


def of_headers(request: Request, read: Callable[[Mapping[str, str]], T]) -> T:
    """Return what a function reads in the headers of a request, once for equal heads.

    Args:
        read: a pure function.
    """
    if not isinstance(request, DirectRequest):
        return read(request.headers)
    known = request.head.known
    try:
        found: T = known[read]
    except KeyError:
        found = known[read] = read(request.headers)
    return found


def response_head(status: int, headers: CIMultiDict[str]) -> bytes:
    """Return the head of a response.

    Raises:
        ValueError: a header contains the end of a line.
    """
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, '')}", *map(": ".join, headers.items())]
    if "Date" not in headers:
        lines.append(f"Date: {_date(int(time.time()))}")
    text = "\r\n".join((*lines, "\r\n"))
    if not text.count("\n") == text.count("\r") == len(lines) + 1:
        raise ValueError("a header of the response contains the end of a line")
    return text.encode()


@lru_cache(maxsize=1)
def _date(now_s: int) -> str:
    return formatdate(now_s, usegmt=True)
