"""The errors that a client can get.

    GatewayError              500  server_error
    ├── OutputCut             500  ... code output_cut
    ├── InvalidRequest        400  invalid_request_error
    │   ├── InvalidHttp       400  ... code invalid_value
    │   │   └── UnsupportedTransferEncoding 501 code unsupported_transfer_encoding
    │   ├── Unsupported       400  ... code unsupported_parameter
    │   ├── UnsupportedTask   400  ... code unsupported
    │   ├── ContextTooLong    400  ... code context_length_exceeded
    │   ├── PreviousResponseNotFound 400 code previous_response_not_found
    │   ├── ModelNotFound     404  ... code model_not_found
    │   ├── ResponseNotFound  404  ... code response_not_found
    │   ├── WorkerNotFound    404  ... code worker_not_found
    │   ├── NotStored         404  ... code not_found
    │   ├── RequestNotFound   404  ... code request_not_found
    │   ├── RouteNotFound     404  ... code not_found
    │   ├── ForbiddenHost     403  ... code forbidden_host
    │   ├── ForbiddenOrigin   403  ... code forbidden_origin
    │   ├── Forbidden         403  ... code forbidden
    │   ├── CertificateRequired 403 ... code client_certificate_required
    │   ├── MethodNotAllowed  405  ... code method_not_allowed
    │   ├── RequestTimeout    408  ... code request_timeout
    │   ├── FixedRole         409  ... code fixed_role
    │   ├── FileInUse         409  ... code file_in_use
    │   ├── BodyTooLarge      413  ... code body_too_large
    │   ├── UnsupportedEncoding 415 .. code unsupported_encoding
    │   ├── ExpectationFailed 417  ... code expectation_failed
    │   └── HeadersTooLarge   431  ... code headers_too_large
    ├── Unauthorized          401  invalid_request_error, code invalid_api_key
    ├── TooMany               429  rate_limit_error, with Retry-After
    │   ├── QuotaExceeded          ... code rate_limit_exceeded
    │   ├── Overloaded             ... code overloaded
    │   ├── QueueTimeout           ... code queue_timeout
    │   └── UpstreamBusy           ... code upstream_busy
    ├── NotOffered            501  ... code not_offered
    ├── UpstreamRejection     the upstream's status, type and code
    ├── UpstreamBroken        502  ... code upstream_failed
    ├── UpstreamTimeout       504  ... code upstream_timeout
    └── Unavailable           503  server_error, with Retry-After
        ├── Starting               ... code model_loading
        ├── Draining               ... code draining
        ├── WorkerFailed           ... code worker_failed
        ├── AdapterUnavailable     ... code adapter_unavailable
        └── UpstreamUnavailable    ... code upstream_unavailable

The response of each is OpenAI's `{"error": {"message", "type", "param", "code"}}`, or Anthropic's
`{"type": "error", "error": {"type", "message"}, "request_id"}` for requests of that API. An
error with Retry-After also has `retry_after_s` in its `error`, because a stream that has begun has
no more headers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final

import msgspec

from draftgate.backends.errors import (
    AdapterFailed,
    BackendFailed,
    RequestRejected,
    UpstreamFailed,
    UpstreamLate,
    UpstreamUnreachable,
)

LONGEST_MESSAGE: Final = 1000
"""Maximum characters of a message. Some messages quote the request, which may be long."""


class ErrorFormat(Enum):
    """The format of an error's JSON."""

    OPENAI = "OpenAI's"
    ANTHROPIC = "Anthropic's"


_ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors, by HTTP status. Other statuses have the types of their class."""


_ANTHROPIC_DETAILS: Final[Mapping[str | None, Mapping[str, object]]] = {
    "thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
}
"""The details of Anthropic's errors by parameter. With these, the tool runners of its clients send
the request again without a thread, and then send all messages."""


class GatewayError(Exception):
    """An error with an HTTP status and OpenAI's fields.

    This class itself is an internal error. Subclasses set their status, type and code as keywords,
    and inherit the others.

    Attributes:
        param: path of the invalid parameter, e.g. `messages[0].content`.
        retry_after_s: seconds after which a retry may succeed, or None to send no header.
    """

    status: int = 500
    type: str = "server_error"
    code: str = "internal_error"

    def __init_subclass__(cls, **fields: str | int) -> None:
        for name, value in fields.items():
            setattr(cls, name, value)

    def __init__(
        self, message: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        if len(message) > LONGEST_MESSAGE:
            message = message[:LONGEST_MESSAGE] + "..."
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self, wanted: ErrorFormat = ErrorFormat.OPENAI, request_id: str = "") -> bytes:
        """Return the JSON of the response in the wanted format.

        Args:
            request_id: the id of the request, which only Anthropic's format contains.
        """
        if wanted is ErrorFormat.ANTHROPIC:
            otherwise = "api_error" if self.status >= 500 else "invalid_request_error"
            kind = _ANTHROPIC_TYPES.get(self.status, otherwise)
            error = {"type": kind, "message": self.message, **self.retry_field()}
            if details := _ANTHROPIC_DETAILS.get(self.param):
                error["details"] = details
            return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})
        fields = {"message": self.message, "type": self.type, "param": self.param}
        return msgspec.json.encode({"error": {**fields, "code": self.code, **self.retry_field()}})

    def retry_field(self) -> dict[str, float]:
        """Return `retry_after_s` in whole milliseconds, or nothing without a retry delay."""
        if self.retry_after_s is None:
            return {}
        return {"retry_after_s": math.ceil(self.retry_after_s * 1e3) / 1e3}

    def headers(self) -> list[tuple[str, str]]:
        """Return the headers of the response, in which a name may occur several times."""
        if self.retry_after_s is None:
            return []
        # HTTP's header has whole seconds, rounded up. OpenAI's clients prefer milliseconds.
        return [
            ("Retry-After", str(math.ceil(self.retry_after_s))),
            ("retry-after-ms", str(math.ceil(self.retry_after_s * 1e3))),
        ]


class InvalidRequest(GatewayError, status=400, type="invalid_request_error", code="invalid_value"):
    """The request is malformed or impossible."""


class InvalidHttp(InvalidRequest):
    """The request is not valid HTTP, so its connection closes."""


class UnsupportedTransferEncoding(InvalidHttp, status=501, code="unsupported_transfer_encoding"):
    """The body has a transfer coding other than chunked."""


def invalid(param: str, problem: str) -> InvalidRequest:
    """Return the error of an invalid parameter.

    The message begins with the path of the parameter.
    """
    return InvalidRequest(f"{param}: {problem}", param)


class Unsupported(InvalidRequest, code="unsupported_parameter"):
    """A parameter would change the output and is not supported yet."""

    def __init__(self, param: str, detail: str = "", *, advice: str = "") -> None:
        """Begin an error.

        Args:
            detail: the value, if the parameter is supported with others.
            advice: why it is not supported, or what to use instead.
        """
        reason = f": {advice}" if advice else " yet"
        super().__init__(f"{param}{detail} is not supported{reason}", param)


class UnsupportedTask(InvalidRequest, code="unsupported"):
    """The model does not do what the endpoint needs."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "model")


class ContextTooLong(InvalidRequest, code="context_length_exceeded"):
    """Prompt and output do not fit into the context.

    The message states both lengths.
    """


class ModelNotFound(InvalidRequest, status=404, code="model_not_found"):
    """No model has this name."""

    def __init__(self, requested: str, *served: str) -> None:
        known = ", ".join(map(repr, served))
        super().__init__(
            f"the model {requested!r} does not exist; this node serves {known}", "model"
        )


class ResponseNotFound(InvalidRequest, status=404, code="response_not_found"):
    """The store has no response of this id for the API key."""

    def __init__(self, response_id: str) -> None:
        super().__init__(f"the response {response_id!r} does not exist or is not stored any more")


class WorkerNotFound(InvalidRequest, status=404, code="worker_not_found"):
    """The pool has no worker of this id."""

    def __init__(self, worker_id: str) -> None:
        super().__init__(f"the worker {worker_id!r} does not exist; /workers lists all workers")


class NotStored(InvalidRequest, status=404, code="not_found"):
    """The API key has no file or batch of this id."""


class RequestNotFound(InvalidRequest, status=404, code="request_not_found"):
    """The node has no record of a request of this id."""


class PreviousResponseNotFound(InvalidRequest, code="previous_response_not_found"):
    """The response that a request continues does not exist.

    The status is 400, as in OpenAI's API, because the error concerns a parameter.
    """

    def __init__(self, response_id: str) -> None:
        param = "previous_response_id"
        problem = f"the response {response_id!r} does not exist or is not stored any more"
        super().__init__(f"{param}: {problem}", param)


class RouteNotFound(InvalidRequest, status=404, code="not_found"):
    """No endpoint has this path."""


class ForbiddenHost(InvalidRequest, status=403, code="forbidden_host"):
    """The node does not accept the name in the header `Host`."""


class ForbiddenOrigin(InvalidRequest, status=403, code="forbidden_origin"):
    """The request is from a web page of another origin, which is not in `--cors-origins`."""


class Forbidden(InvalidRequest, status=403, code="forbidden"):
    """The role of the API key does not include the endpoint."""


class CertificateRequired(InvalidRequest, status=403, code="client_certificate_required"):
    """The client has shown no certificate, which `--tls-client-ca-file` requires."""


class MethodNotAllowed(InvalidRequest, status=405, code="method_not_allowed"):
    """The path exists, but does not support this method."""

    def __init__(self, message: str, allowed: Sequence[str]) -> None:
        super().__init__(message)
        self._allowed = allowed

    def headers(self) -> list[tuple[str, str]]:
        """Return the methods of the path (RFC 9110, 15.5.6)."""
        return [("Allow", ", ".join(self._allowed))]


class RequestTimeout(InvalidRequest, status=408, code="request_timeout"):
    """The body did not arrive within `--body-timeout-s`."""


class FixedRole(InvalidRequest, status=409, code="fixed_role"):
    """The worker cannot change its role while it runs."""


class FileInUse(InvalidRequest, status=409, code="file_in_use"):
    """A batch that has not ended reads the file."""


class BodyTooLarge(InvalidRequest, status=413, code="body_too_large"):
    """The body exceeds `--max-body-bytes`."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(f"the body exceeds {most_bytes} bytes")


class UnsupportedEncoding(InvalidRequest, status=415, code="unsupported_encoding"):
    """The body has a `Content-Encoding` that the server does not decode."""

    def __init__(self, message: str, supported: Sequence[str]) -> None:
        super().__init__(message)
        self._supported = supported

    def headers(self) -> list[tuple[str, str]]:
        """Return the encodings that the server decodes (RFC 9110, 15.5.16)."""
        return [("Accept-Encoding", ", ".join(self._supported))]


class ExpectationFailed(InvalidRequest, status=417, code="expectation_failed"):
    """The header `Expect` has an unknown value."""


class HeadersTooLarge(InvalidRequest, status=431, code="headers_too_large"):
    """The request line or a header is too long."""


class Unauthorized(GatewayError, status=401, type="invalid_request_error", code="invalid_api_key"):
    """The request has no API key or an unknown key."""

    def headers(self) -> list[tuple[str, str]]:
        """Return the supported authentication."""
        return [("WWW-Authenticate", "Bearer")]


class TooMany(GatewayError, status=429, type="rate_limit_error", code="too_many"):
    """The request is rejected for now.

    The client may retry after `retry_after_s`.

    Attributes:
        kind: the reason, for metrics.
    """

    def __init__(self, message: str, retry_after_s: float, kind: str | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.kind = kind or self.code


class QuotaExceeded(TooMany, code="rate_limit_exceeded"):
    """The quota of the API key is used up."""


class Overloaded(TooMany, code="overloaded"):
    """The response would be too late, so the request is rejected before it waits."""


class QueueTimeout(TooMany, code="queue_timeout"):
    """The request waited for the maximum time."""


class UpstreamBusy(TooMany, code="upstream_busy"):
    """Every upstream has requested a pause."""


class OutputCut(GatewayError, code="output_cut"):
    """The format of a request allows no continuation of an output that is incomplete."""

    def __init__(self, tokens: int) -> None:
        super().__init__(
            f"the output is incomplete, because its format allows no text after {tokens} tokens; "
            "simplify the schema or grammar, or try another seed"
        )


class NotOffered(GatewayError, status=501, code="not_offered"):
    """The backend of this node does not have this endpoint."""


class UpstreamRejection(GatewayError):
    """An upstream rejected the request, in another form than that of the API."""

    def __init__(
        self,
        message: str,
        status: int,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, param)
        self.status = status
        self.type = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.code = code or "upstream_rejected"


class UpstreamBroken(GatewayError, status=502, code="upstream_failed"):
    """An upstream did not respond, broke off its response, or sent an error."""


class UpstreamTimeout(GatewayError, status=504, code="upstream_timeout"):
    """An upstream did not respond within its timeout."""


class Unavailable(GatewayError, status=503, code="unavailable"):
    """This node accepts no requests at present, but another node may."""


class Starting(Unavailable, code="model_loading"):
    """The model is loading."""


class Draining(Unavailable, code="draining"):
    """The node is about to stop and only finishes its running requests."""


class WorkerFailed(Unavailable, code="worker_failed"):
    """The worker failed, or stopped while the request ran."""


class AdapterUnavailable(Unavailable, code="adapter_unavailable"):
    """No worker can load the LoRA adapter of the request."""


class UpstreamUnavailable(Unavailable, code="upstream_unavailable"):
    """No upstream is available."""


def as_gateway_error(error: Exception) -> GatewayError:
    """Return the error that a client gets for an exception.

    An unknown exception becomes an internal error without details.
    """
    if isinstance(error, GatewayError):
        return error
    if isinstance(error, RequestRejected):
        kind = InvalidRequest if error.limit_tokens is None else ContextTooLong
        return kind(str(error), error.param)
    if isinstance(error, UpstreamLate):
        return UpstreamTimeout("the upstream did not respond in time")
    if isinstance(error, UpstreamUnreachable):
        return UpstreamBroken("the upstream does not respond")  # only the log has its address
    if isinstance(error, UpstreamFailed):
        return UpstreamBroken(f"the upstream failed: {error}")
    if isinstance(error, AdapterFailed):
        return AdapterUnavailable(f"the LoRA adapter is unavailable: {error}", retry_after_s=5)
    if isinstance(error, BackendFailed):
        return WorkerFailed(f"the worker failed: {error}", retry_after_s=5)
    return GatewayError("internal error; the server's log has the details")
