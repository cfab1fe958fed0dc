"""Connections to an upstream, which requests share, and whose unnoticed ends cost no request.

A server may close an idle connection at the moment at which the next request is sent on it. Such a
request has reached no server. No setting avoids this: servers keep idle connections for 1 s to
minutes, without saying so, and networks forget them.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Collection, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

from aiohappyeyeballs import start_connection
from yarl import URL

from draftgate import __version__
from draftgate.backends.connection_errors import ConnectionFailed
from draftgate.backends.openai.connection import Connection, Response
from draftgate.backends.worker_config import CONNECT_TIMEOUT_S

IDLE_CONNECTION_S: Final = 4.0
"""Seconds for which an idle connection is reused. vLLM and SGLang (uvicorn) close idle connections
after 5 s, so that few requests meet a closed connection."""

STALE_S: Final = 5.0
"""Seconds within which a closed connection shows itself. The server's kernel answers the first
segment of a request with a reset. A connection that breaks later had an upstream that worked on the
request, so it counts as a failure."""

DEAD_S: Final = 30
"""Seconds after which a connection breaks on which the other machine acknowledges nothing, because
it is gone or a network has forgotten the connection. Without the limit, Linux waits 15 minutes for
sent data, and forever for a response."""

ADDRESSES_S: Final = 10.0
"""Seconds for which the addresses of a name are used again."""

ATTEMPT_DELAY_S: Final = 0.25
"""Seconds after which the next address of a name is tried, too (RFC 8305, section 8)."""

_REQUEST_TIMEOUT: Final = 408
_WITHOUT_BODY: Final = frozenset({"GET", "HEAD", "DELETE", "OPTIONS"})
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class _Abandoned(ConnectionFailed):
    """The gateway no longer waits for the response."""


class Connections:
    """The connections to one upstream."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """Open no connection yet.

        Args:
            url: the address of the upstream, without a final slash.
            headers: headers of every request.
            connect_timeout_s: maximum time to find the address of the upstream and to open a
                connection with TLS, in seconds. A response may take any time.
        """
        self._connect_timeout_s = connect_timeout_s
        address = URL(url, encoded=True)
        self._host, self._port = address.raw_host or "", address.port or 0
        self._is_tls = address.scheme == "https"
        self._path = address.raw_path.rstrip("/")
        self._head = _lines(
            {
                "Host": address.host_port_subcomponent or "",
                "User-Agent": f"draftgate/{__version__}",
                **headers,
            }.items()
        )
        self._addresses: list[Any] = []
        self._resolved_s = -ADDRESSES_S
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._connecting: set[asyncio.Timeout] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    def close(self, reason: str = "this node stops") -> None:
        """Close all connections, and fail their exchanges."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connecting in self._connecting:
            connecting.reschedule(0.0)
        for connection in tuple(self._open):
            connection.abort(ConnectionFailed(reason))

    @property
    def received_bytes(self) -> int:
        """Number of bytes that open connections have received, apart from the shortest responses.

        The number changes while any response arrives.
        """
        return sum(connection.received_bytes for connection in self._open)

    def abandon_waiting(self, reason: str) -> None:
        """Close the connections of requests of whose responses nothing has arrived."""
        for connection in tuple(self._open):
            if connection.waits:
                connection.abort(_Abandoned(reason))

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] = _NO_HEADERS,
        request_id: str = "",
    ) -> Response:
        """Send a request, and return the response after its head.

        A request that meets a closed connection is sent once more, on a new connection. This is
        safe for every method, because no byte of a response has arrived.

        Args:
            path: path and query, already encoded.
            headers: further headers, with names in the usual case.
            request_id: the value of `x-request-id`, or empty for none.

        Raises:
            OSError: the upstream did not respond.
            ValueError: a header has a line break.
        """
        fields, has_content = tuple(headers.items()), body != b""
        head = _request_head(method, self._path + path, self._head, fields, has_content=has_content)
        if request_id:
            if not request_id.isprintable():
                raise ValueError("the id of the request has a line break")
            head += b"x-request-id: %b\r\n" % request_id.encode()
        if body or method not in _WITHOUT_BODY:
            head += b"Content-Length: %d\r\n" % len(body)
        request = b"%b\r\n%b" % (head, body)
        has_body = method != "HEAD"
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        idle = self._take_idle(begin_s - IDLE_CONNECTION_S)
        if idle is not None:
            try:
                response = await idle.send(request, has_body=has_body)
            except OSError as error:
                if self._closed or not _is_stale(error, loop.time() - begin_s):
                    raise
            except asyncio.CancelledError:
                idle.abort()
                raise
            else:
                # Some servers announce the end of an idle connection with this status.
                if response.status != _REQUEST_TIMEOUT:
                    return response
                response.close()
        connection = await self._connect()
        try:
            return await connection.send(request, has_body=has_body)
        except asyncio.CancelledError:
            connection.abort()
            raise

    def add(self, connection: Connection) -> None:
        """Take back a connection whose exchange has ended."""
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(IDLE_CONNECTION_S, self._close_idle)

    def remove(self, connection: Connection) -> None:
        """Forget a closed connection."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _take_idle(self, earliest_s: float) -> Connection | None:
        """Return the connection that has been idle for the shortest time, if one can be reused.

        Args:
            earliest_s: the earliest time from which the connection may have been idle.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_since_s >= earliest_s:
                return connection
            connection.abort()
        return None

    def _close_idle(self) -> None:
        """Close the connections that have been idle for too long."""
        loop = asyncio.get_running_loop()
        # The sums are those of the timer. Rounded differently, the sweep would repeat at once.
        now_s = loop.time()
        for connection in [o for o in self._idle if o.idle_since_s + IDLE_CONNECTION_S <= now_s]:
            self._idle.remove(connection)
            connection.abort()
        self._sweep = None
        if self._idle:
            next_s = self._idle[0].idle_since_s + IDLE_CONNECTION_S
            self._sweep = loop.call_at(next_s, self._close_idle)

    async def _connect(self) -> Connection:
        """Open a connection.

        Raises:
            OSError: the name cannot be resolved, no address responds, or TLS fails.
        """
        tls = {"ssl": _tls_context(), "server_hostname": self._host} if self._is_tls else {}
        async with asyncio.timeout(self._connect_timeout_s) as limit:
            self._connecting.add(limit)
            try:
                await self._resolve()
                connection = await self._open_connection(tls)
            finally:
                self._connecting.discard(limit)
        self._open.add(connection)
        if self._closed:
            connection.abort()
            raise ConnectionFailed("this node stops")
        return connection

    async def _resolve(self) -> None:
        """Find the addresses of the upstream, unless they are known."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._resolved_s >= ADDRESSES_S:
            self._addresses = await loop.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
            )
            self._resolved_s = loop.time()

    async def _open_connection(self, tls: Mapping[str, Any]) -> Connection:
        connected = await start_connection(
            self._addresses,
            happy_eyeballs_delay=ATTEMPT_DELAY_S,
            interleave=1,
            socket_factory=_open_socket,
        )
        try:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(
                lambda: Connection(self), sock=connected, **tls
            )
        except BaseException:
            connected.close()
            raise
        return connection


@lru_cache(maxsize=256)
def _request_head(
    method: str, path: str, own: str, headers: tuple[tuple[str, str], ...], *, has_content: bool
) -> bytes:
    """Return the first lines of a request, which most requests of a client share.

    Args:
        own: the lines that all requests to the upstream have.
    """
    head = f"{method} {path} HTTP/1.1\r\n{own}{_lines(headers)}"
    names = dict(headers)
    if "Accept" not in names:
        head += "Accept: */*\r\n"
    if has_content and "Content-Type" not in names:
        head += "Content-Type: application/json\r\n"
    return head.encode("utf-8", "surrogateescape")


def _lines(headers: Collection[tuple[str, str]]) -> str:
    """Return headers as lines of a request.

    Raises:
        ValueError: a header has a line break.
    """
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("a header of the request has a line break")
    return lines


def _is_stale(error: OSError, seconds: float) -> bool:
    """Return whether a reused connection failed because the server had already closed it."""
    if isinstance(error, _Abandoned):
        return False
    if isinstance(error, ConnectionFailed) and error.has_begun:
        return False  # a part of a head has arrived
    return seconds < STALE_S or error.errno == errno.ETIMEDOUT


@lru_cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()


def _open_socket(address: Any) -> socket.socket:
    """Return a socket whose connection breaks `DEAD_S` after the other machine went silent."""
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": DEAD_S // 2,
        "TCP_KEEPINTVL": DEAD_S // 6,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": DEAD_S * 1000,
    }
    for name, value in options.items():
        if hasattr(socket, name):  # not on every system
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return opened
