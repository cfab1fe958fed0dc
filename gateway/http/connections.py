"""Connections of clients: aiohttp's, with direct requests, and with errors in OpenAI's format.

A connection that waits for a request looks at the first bytes. It answers a direct request itself
(`direct`), and gives all others to aiohttp, with the bytes that it has kept. Bytes that arrive
during a direct request are kept until its response is complete.

aiohttp rejects bytes that are not HTTP before a request exists. Its own response is plain text and
names the versions of Python and aiohttp.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from aiohttp import HttpVersion10, HttpVersion11, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from draftgate.gateway.errors import (
    GatewayError,
    HeadersTooLarge,
    InvalidHttp,
    InvalidRequest,
    RequestTimeout,
    UnsupportedTransferEncoding,
    as_gateway_error,
)
from draftgate.gateway.http.context import (
    ANTHROPIC_ID_HEADER,
    BODY,
    REQUEST_ID,
    REQUEST_ID_HEADER,
    error_format,
    is_anthropic,
    new_id,
    request_id_of,
)
from draftgate.gateway.http.direct import HOST, Direct, DirectRequest, Response
from draftgate.gateway.http.eager_task import EagerTask
from draftgate.gateway.http.sending import convert_http_error, error_response
from draftgate.gateway.logs import log
from draftgate.gateway.telemetry.audit import AuditLog

LONGEST_HEADER_BYTES: Final = (32 << 10) + 256
"""Maximum bytes of the request line, and of a header with its name. Proxies that authenticate users
add long headers, so values of 32 KiB pass."""


KEPT_S: Final = 1.0
"""Time for the rest of a direct request, in seconds. aiohttp then reads the request, and has the
limits for slow clients."""

MOST_KEPT_BYTES: Final = 64 << 10
"""Bytes of further requests that are kept during a direct request, before reading pauses."""

LAST_RESPONSE_S: Final = 1.0
"""Time for a client to read the response to incomplete headers, in seconds. A close at once would
reset the connection while the client still sends, and the client would lose the response."""


class Connection(web.RequestHandler):
    """A connection of a client.

    Attributes:
        direct: what its direct requests need.
        keeps_alive: whether the response to the current direct request allows further requests.
    """

    __slots__ = ("_audit", "_begun", "_kept", "_request", "_rest", "direct", "keeps_alive")

    def __init__(self, *args: Any, audit: AuditLog | None, direct: Direct, **options: Any) -> None:
        super().__init__(*args, **options)
        self._audit = audit
        self.direct = direct
        # The first bytes of a direct request, or those of the requests after it.
        self._kept = bytearray()
        self._rest: asyncio.TimerHandle | None = None  # limits the time for the rest of a request
        self._request: EagerTask | None = None  # the direct request that runs

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start without bytes of a request."""
        self._begun = False
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Cancel the direct request, if one runs."""
        super().connection_lost(exc)
        if self._rest is not None:
            self._rest.cancel()
        if self._request is not None:
            self._request.cancel()

    def data_received(self, data: bytes) -> None:
        """Begin a direct request, or pass the bytes to aiohttp.

        aiohttp also calls this method without data, to parse bytes that it has kept.
        """
        if self._request is not None:
            self._keep(data)
        elif self._rest is not None:
            self._kept += data
            self._read(self._kept)
        elif data and self._waits() and self.direct.expected.begins(data):
            self._read(data)
        else:
            self._pass(data)

    def _waits(self) -> bool:
        """Return whether a request may begin now."""
        if self._messages or self._begun or self._upgraded or self._close or self._force_close:
            return False
        if self._waiter is None:
            return not self._request_count  # the loop of aiohttp begins soon
        return not self._waiter.done()

    def _pass(self, data: bytes) -> None:
        """Let aiohttp parse bytes, and note whether they begin an incomplete head."""
        waits = self._waiter is not None or not self._request_count
        super().data_received(data)
        self._begun = waits and bool(data) and not self._messages
        self._fail_body()

    def _fail_body(self) -> None:
        """Fail the body of a request if the rest of it is not valid HTTP.

        Otherwise aiohttp would only reject what follows, and the handler would wait for the body.
        """
        error = getattr(self._messages[-1][0], "exc", None) if self._messages else None
        if error is None:
            return
        before = self._messages[-2][1] if len(self._messages) > 1 else None
        request = self._current_request
        if before is None and request is not None:
            before = request.content
        if before is not None and not before.is_eof():
            before.set_exception(web.RequestPayloadError(str(error)))

    def _read(self, data: bytes | bytearray) -> None:
        """Begin a direct request if it is complete."""
        found = self.direct.expected.head(data)
        if isinstance(found, str):
            self._hand_over(data, found)
            return
        if found is not None:
            head, begin, size = found
            end = begin + size
            if len(data) >= end:
                body, rest = bytes(data[begin:end]), data[end:]
                self._kept = bytearray()
                if self._rest is not None:
                    self._stop_waiting()
                if rest:
                    self._keep(rest)
                self.keeps_alive = True
                self._request_in_progress = True  # aiohttp's shutdown waits for the request
                serving = self._serve(DirectRequest(self, head, body))
                self._request = EagerTask(serving, self._loop)
                self._request.start()
                return
        if self._rest is None:
            self._kept = bytearray(data)
            self._begun = True
            self._rest = self._loop.call_later(KEPT_S, self._read_slowly)

    def _read_slowly(self) -> None:
        self._hand_over(self._kept, "slow")

    def _hand_over(self, data: bytes | bytearray, reason: str) -> None:
        """Let aiohttp read a request of a direct endpoint from its first byte."""
        self.direct.hand_over(reason)
        self._kept = bytearray()
        self._stop_waiting()
        self._pass(bytes(data))

    def _stop_waiting(self) -> None:
        """End the wait for the rest of a request."""
        self._begun = False
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    async def _serve(self, request: DirectRequest) -> None:
        """Respond to a request, and continue with the bytes that have arrived meanwhile."""
        try:
            await self.direct.serve(request)
        except Exception as error:  # noqa: BLE001 - nothing else would report it
            self.keeps_alive = False
            log(logging.ERROR, "internal error", error=error)
        finally:
            self._request_in_progress = False
            if self._handler_waiter is not None and not self._handler_waiter.done():
                self._handler_waiter.set_result(None)
            if self._kept and self.keeps_alive:
                self._loop.call_soon(self._continue)  # requests must not begin in each other
            else:
                self._continue()

    def _continue(self) -> None:
        """Wait for the next request, or begin it."""
        self._request = None
        if self.transport is None:
            return
        if self._close or self._force_close or not self.keeps_alive:
            self.force_close()
            return
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if self._keepalive_handle is None:
            at = self._next_keepalive_close_time
            self._keepalive_handle = self._loop.call_at(at, self._process_keepalive)
        if self._kept:
            data, self._kept = bytes(self._kept), bytearray()
            self._resume_transport_reading()
            self.data_received(data)

    def _keep(self, data: bytes | bytearray) -> None:
        """Keep bytes of further requests."""
        self._kept += data
        if len(self._kept) > MOST_KEPT_BYTES:
            self._pause_transport_reading()

    async def drained(self) -> None:
        """Wait until the client has read most of what has been written.

        Raises:
            ConnectionResetError: the client has disconnected.
        """
        await self._drain_helper()

    def close_if_idle(self) -> bool:
        """Close the connection unless a part of a request has arrived, and return if it was idle.

        A peer's connection counts as idle but stays open, because it has no further requests.
        """
        if self._upgraded or self.transport is None:
            return True
        waits = self._waiter is not None and not self._waiter.done() and not self._begun
        if not waits or self._request is not None or not _end_unless_unread(self.transport):
            return False
        self.force_close()
        return True

    def _process_keepalive(self) -> None:
        """Close an idle connection, after a response if a request has begun."""
        if self._rest is not None:
            self._read_slowly()
        if self._request is not None:
            self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        late = self._loop.time() >= self._next_keepalive_close_time
        idle = self._waiter is not None and not self._waiter.done()
        if not (self._begun and late and idle) or self.transport is None:
            super()._process_keepalive()
            return
        self.close()  # ignores what the client sends from now on
        error = RequestTimeout(f"the headers did not arrive within {self._keepalive_timeout:g} s")
        request_id = new_id()
        self.transport.write(_response_bytes(error, request_id))
        self._record(request_id, error)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._loop.call_later(LAST_RESPONSE_S, self.force_close)

    def _record(self, request_id: str, error: GatewayError) -> None:
        """Record the refusal of a request that has no headers."""
        if self._audit is not None and self.transport is not None:
            client, *_ = self.transport.get_extra_info("peername") or ("",)
            self._audit.record(request_id, client, None, error.status, error.code)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the response to bytes that are not HTTP, or to an unexpected exception.

        Raises:
            ConnectionError: a response has begun, so aiohttp must close the connection.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun")
        if isinstance(exc, UnicodeEncodeError) and not request.headers.get("Expect", "").isascii():
            # aiohttp's own error for this header has the value, which it then cannot encode.
            error = convert_http_error(web.HTTPExpectationFailed(), request)
        else:
            error = _described(exc)
        response = error_response(error)
        response.force_close()
        add_headers(request, response)
        if isinstance(error, InvalidRequest):
            self._record(response.headers[REQUEST_ID_HEADER], error)
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response, and ignore the rest of a body if the response is the last one."""
        if isinstance(resp, web.HTTPException):
            # The middlewares have seen neither the error of a bad `Expect` nor the framing.
            error = convert_http_error(resp, request)
            resp = error_response(error, error_format(request), request_id_of(request))
            resp.force_close()
        sent = await super().finish_response(request, resp, start_time)
        if not resp.keep_alive and not request.content.is_eof():
            self.close()  # aiohttp then waits until the client has read the response and closes
            if self.transport is not None and self.transport.can_write_eof():
                self.transport.write_eof()
        return sent

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Log an exception, but not that the rest of a body is broken after the response."""
        if not isinstance(kwargs.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kwargs)


def connection_factory(
    server: web.Server, keepalive_s: float, audit: AuditLog | None, direct: Direct
) -> Callable[[], Connection]:
    """Return a function that creates the protocol of an accepted connection.

    Args:
        keepalive_s: time for the complete headers of a request, in seconds. The time begins with
            the connection, and again after each response.
        audit: the audit log of refused requests, or None.
    """
    options: dict[str, Any] = {
        "access_log": None,
        "audit": audit,
        "direct": direct,
        "auto_decompress": False,  # `content_encoding` decodes the bodies of admitted requests
        "keepalive_timeout": keepalive_s,
        "max_line_size": LONGEST_HEADER_BYTES,
        "max_field_size": LONGEST_HEADER_BYTES,
    }
    return partial(Connection, server, loop=asyncio.get_running_loop(), **options)


def add_headers(request: web.BaseRequest | DirectRequest, response: Response) -> None:
    """Add the headers of every response, streamed or not."""
    # aiohttp rejects a bad `Expect` before the middlewares have run.
    request_id = request.get(REQUEST_ID) or request_id_of(request)
    response.headers[REQUEST_ID_HEADER] = request_id
    if is_anthropic(request):
        response.headers[ANTHROPIC_ID_HEADER] = request_id
    response.headers.pop("Server", None)  # aiohttp's names its version
    if response.keep_alive is False and response.status != 101:
        response.headers["Connection"] = "close"


def check_framing(request: web.BaseRequest) -> None:
    """Check what aiohttp accepts although the request is not valid HTTP/1.0 or HTTP/1.1.

    A proxy may see other requests in the same bytes.

    Raises:
        InvalidHttp: the version, `Host` or `Transfer-Encoding` is invalid.
        UnsupportedTransferEncoding: the body has another transfer coding than chunked.
    """
    version, host = request.version, request.headers.get("Host", "")
    if version not in {HttpVersion10, HttpVersion11}:
        sent = f"HTTP/{version.major}.{version.minor}"
        raise InvalidHttp(f"{sent} is not supported on this connection; use HTTP/1.1")
    if host and not HOST.fullmatch(host):
        raise InvalidHttp("the header Host is not the name or address of a server")
    if not host and version == HttpVersion11:
        raise InvalidHttp("the header Host is empty")
    coding = request.headers.get("Transfer-Encoding")
    if coding is None:
        return
    if version == HttpVersion10:  # RFC 9112, 6.1: the length of the body is not reliable
        raise InvalidHttp("Transfer-Encoding needs HTTP/1.1")
    if coding.lower() != "chunked":
        raise UnsupportedTransferEncoding("the only supported Transfer-Encoding is chunked")


def ends_connection(request: web.Request, response: web.StreamResponse, most_bytes: int) -> bool:
    """Return whether the connection cannot serve another request after a response.

    Args:
        most_bytes: the maximum size of a body, in bytes.
    """
    if response.status == 101:
        return False  # a peer uses the connection
    if _is_last(request):
        # aiohttp reads the body of CONNECT as further requests. It loses what a client sends in the
        # same packet after a request for another protocol, or after the response to its head.
        return True
    if request.version < HttpVersion11 and "Content-Length" not in response.headers:
        return True  # the end of the connection is the end of the response
    if "Content-Encoding" in request.headers and request.body_exists and BODY not in request:
        return True  # the body is broken, or it belongs to a refused request and is not decoded
    body = request.content
    if body.is_eof() and body.exception() is None:
        return False
    # The rest of the body may be endless or broken, unless the client has stated its length.
    length = request.content_length
    return length is None or length > most_bytes or body.exception() is not None


def _is_last(request: web.BaseRequest) -> bool:
    """Return whether a request must be the last one, by its method or by `Connection`."""
    values = request.headers.getall("Connection", ())
    options = {option.strip() for value in values for option in value.lower().split(",")}
    upgrades = "upgrade" in options and "Upgrade" in request.headers
    return request.method == hdrs.METH_CONNECT or upgrades or "close" in options


def _end_unless_unread(transport: asyncio.BaseTransport) -> bool:
    """Send the end of a connection, and return True, unless the kernel has unread bytes of it."""
    if transport.is_closing():
        return True
    descriptor = os.dup(transport.get_extra_info("socket").fileno())
    with socket.socket(fileno=descriptor) as connection, suppress(OSError):  # the client has left
        with suppress(BlockingIOError):
            if connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return False
        # The event loop closes the connection later. A client could send a request until then.
        if transport.get_extra_info("sslcontext") is None:
            connection.shutdown(socket.SHUT_WR)
    return True


def _response_bytes(error: RequestTimeout, request_id: str) -> bytes:
    """Return the response to a request whose headers are incomplete."""
    body = error.body()
    lines = (
        f"HTTP/1.1 {error.status} Request Timeout",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        f"{REQUEST_ID_HEADER}: {request_id}",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _described(error: BaseException | None) -> GatewayError:
    """Return the error that a client gets for an error that aiohttp raised below the handlers."""
    if not isinstance(error, HttpProcessingError):
        log(logging.ERROR, "internal error", error=error)
        return as_gateway_error(RuntimeError())
    if isinstance(error, LineTooLong):
        return HeadersTooLarge(f"the request line or a header exceeds {LONGEST_HEADER_BYTES} bytes")
    reason = " ".join(error.message.split())
    return InvalidHttp(f"the request is not valid HTTP: {reason}")
