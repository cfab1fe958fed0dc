"""Responses to errors."""

from __future__ import annotations

from aiohttp import hdrs, web

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
