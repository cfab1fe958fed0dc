"""The responses to direct requests and to those of aiohttp, and responses to errors."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter

from draftgate.gateway.errors import (
    ErrorFormat,
    ExpectationFailed,
    GatewayError,
    InvalidHttp,
    InvalidRequest,
    MethodNotAllowed,
    RequestTimeout,
    RouteNotFound,
)
from draftgate.gateway.http.direct import DirectRequest, DirectResponse, Headers, Request, Response


class EventResponse(web.StreamResponse):
    """A response whose headers wait for the first event, so that one packet contains both."""

    _send_headers_immediately = False


def new_response(
    request: Request, headers: Headers, status: int = 200
) -> EventResponse | DirectResponse:
    """Return a response of unknown length, which has not begun."""
    if isinstance(request, DirectRequest):
        return DirectResponse(request, status, headers)
    return EventResponse(headers=headers, status=status)


async def begin_response(
    request: Request, response: EventResponse | DirectResponse
) -> AbstractStreamWriter | DirectResponse:
    """Complete the headers of a response, and return what writes its body."""
    if isinstance(response, DirectResponse):
        return await response.prepare()
    assert not isinstance(request, DirectRequest)
    writer = await response.prepare(request)
    assert writer is not None  # only websockets have no writer
    return writer


def of_aiohttp(response: Response) -> web.StreamResponse:
    """Return the response to a request that is not direct."""
    assert not isinstance(response, DirectResponse)
    return response


def send_whole(
    request: Request, body: bytes, headers: Headers, status: int = 200
) -> Coroutine[Any, Any, Response]:
    """Send a whole response from within the handler, and return it, once awaited.

    The request therefore counts as in flight until the response has been sent.

    Raises:
        ConnectionResetError: the client has disconnected.
    """
    if isinstance(request, DirectRequest):
        return DirectResponse(request, status, headers).send(body)
    return _send_prepared(request, body, headers, status)


async def _send_prepared(
    request: web.Request, body: bytes, headers: Headers, status: int
) -> Response:
    prepared = web.Response(status=status, headers=headers, body=body)
    await prepared.prepare(request)
    await prepared.write_eof()
    return prepared


class ErrorResponse(web.Response):
    """A response whose headers do not name the server, also below the application."""

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        self.headers.pop("Server", None)


def error_response(
    error: GatewayError, wanted: ErrorFormat = ErrorFormat.OPENAI, request_id: str = ""
) -> web.Response:
    """Return the response to an error, whose JSON has the wanted format."""
    response = ErrorResponse(
        status=error.status,
        body=error.body(wanted, request_id),
        content_type="application/json",
        headers=error.headers(),
    )
    # RFC 9110, 15.5.9 and RFC 9112, 6.3: the rest of such a request is not awaited.
    if isinstance(error, RequestTimeout | InvalidHttp):
        response.force_close()
    return response


def convert_http_error(error: web.HTTPException, request: web.BaseRequest) -> GatewayError:
    """Return the gateway error for an error that aiohttp raised."""
    if error.status == 404:
        return RouteNotFound(f"the path {request.path} does not exist")
    if isinstance(error, web.HTTPMethodNotAllowed):
        return MethodNotAllowed(
            f"{request.path} does not accept {request.method}",
            sorted({*error.allowed_methods, hdrs.METH_OPTIONS}),
        )
    if isinstance(error, web.HTTPExpectationFailed):
        return ExpectationFailed("the only supported value of Expect is 100-continue")
    return InvalidRequest(error.reason or "the request is malformed")
