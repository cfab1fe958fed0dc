"""Connections to an upstream, which requests share, and whose unnoticed ends cost no request.

A server may close an idle connection at the moment at which the next request is sent on it. Such a
request has reached no server. No setting avoids this: servers keep idle connections for 1 s to
minutes, without saying so, and networks forget them.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Mapping
from io import BytesIO
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
from yarl import URL

CONNECT_S: Final = 5.0
"""Timeout of a connection in seconds, which takes a round trip or two. The response may take any
time."""

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

LARGE_BYTES: Final = 64 << 10

_REQUEST_TIMEOUT: Final = 408


class Connections:
    """The connections to one upstream."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """Open no connection yet.

        Args:
            url: the address of the upstream, without a final slash.
            headers: headers of every request.
        """
        self._url = url
        self._shared = _session(headers, keepalive_timeout=IDLE_CONNECTION_S)
        self._fresh = _session(headers, force_close=True)

    async def close(self) -> None:
        """Close all connections."""
        await self._shared.close()
        await self._fresh.close()

    async def request(
        self, method: str, path: str, body: bytes = b"", **options: Any
    ) -> aiohttp.ClientResponse:
        """Send a request, and return the response after its head.

        A request that meets a closed connection is sent once more, on a new connection. This is
        safe for every method, because no byte of a response has arrived.

        Args:
            path: path and query, already encoded.
            options: further options of `aiohttp.ClientSession.request`.

        Raises:
            aiohttp.ClientError, OSError: the upstream did not respond.
        """
        use = SimpleNamespace(reused=False)
        loop = asyncio.get_running_loop()
        begin_s = loop.time()

        async def send(session: aiohttp.ClientSession) -> aiohttp.ClientResponse:
            url = URL(self._url + path, encoded=True)
            return await session.request(
                *(method, url),
                data=_payload(body),  # built for each attempt, because sending consumes it
                allow_redirects=False,
                trace_request_ctx=use,
                **options,
            )

        try:
            response = await send(self._shared)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError) as error:
            if not (use.reused and _is_stale(error, loop.time() - begin_s)):
                raise
        else:
            # Some servers announce the end of an idle connection with this status.
            if not (use.reused and response.status == _REQUEST_TIMEOUT):
                return response
            response.close()
        return await send(self._fresh)


def _is_stale(error: Exception, seconds: float) -> bool:
    """Return whether a reused connection failed because the server had already closed it."""
    if isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str):
        return False  # a part of a head has arrived
    return seconds < STALE_S or (isinstance(error, OSError) and error.errno == errno.ETIMEDOUT)


def _session(headers: Mapping[str, str], **connector: Any) -> aiohttp.ClientSession:
    tracing = aiohttp.TraceConfig()
    tracing.on_connection_reuseconn.append(_note_reuse)
    return aiohttp.ClientSession(
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        connector=aiohttp.TCPConnector(limit=0, socket_factory=_open_socket, **connector),
        cookie_jar=aiohttp.DummyCookieJar(),
        trace_configs=[tracing],
    )


async def _note_reuse(_: aiohttp.ClientSession, trace: SimpleNamespace, __: object) -> None:
    trace.trace_request_ctx.reused = True


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


def _payload(body: bytes) -> bytes | BytesIO | None:
    """Return a body that aiohttp sends in pieces if it is large."""
    return BytesIO(body) if len(body) > LARGE_BYTES else body or None
