"""Errors a client can see.

    GatewayError              500  server_error
    ├── InvalidRequest        400  invalid_request_error
    │   ├── Unsupported       400  ... code unsupported_parameter
    │   ├── NoEmbeddings      400  ... code unsupported
    │   ├── ContextTooLong    400  ... code context_length_exceeded
    │   ├── ModelNotFound     404  ... code model_not_found
    │   ├── RouteNotFound     404  ... code not_found
    │   ├── MethodNotAllowed  405  ... code method_not_allowed
    │   └── BodyTooLarge      413  ... code body_too_large
    ├── Unauthorized          401  invalid_request_error, code invalid_api_key
    ├── TooMany               429  rate_limit_error, with Retry-After
    │   ├── QuotaExceeded          ... code rate_limit_exceeded
    │   ├── Overloaded             ... code overloaded
    │   ├── QueueTimeout           ... code queue_timeout
    │   └── UpstreamBusy           ... code upstream_busy
    ├── NotOffered            501  ... code not_offered
    ├── UpstreamBroken        502  ... code upstream_failed
    └── Unavailable           503  server_error, with Retry-After
        ├── Starting               ... code model_loading
        ├── Draining               ... code draining
        ├── WorkerFailed           ... code worker_failed
        └── UpstreamUnavailable    ... code upstream_unavailable

On the wire each is OpenAI's `{"error": {"message", "type", "param", "code"}}`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Final

import msgspec

from draftgate.backends.errors import (
    BackendFailed,
    RequestRejected,
    UpstreamFailed,
    UpstreamUnreachable,
)

LONGEST_MESSAGE: Final = 1000
"""Characters of a message: some quote what the client sent, which may be as long as a body."""


class GatewayError(Exception):
    """An error with an HTTP status and OpenAI's fields; by itself, a fault of ours.

    Attributes:
        param: path of the request parameter at fault, e.g. `messages[0].content`.
        retry_after_s: seconds after which trying again may help; None sends no header.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = "internal_error"

    def __init__(
        self, message: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        if len(message) > LONGEST_MESSAGE:
            message = message[:LONGEST_MESSAGE] + "..."
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """Return the JSON that clients parse."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def headers(self) -> dict[str, str]:
        """Return the headers that go with it.

        HTTP counts whole seconds, which are rounded up; OpenAI's clients look for milliseconds
        first.
        """
        if self.retry_after_s is None:
            return {}
        return {
            "Retry-After": str(math.ceil(self.retry_after_s)),
            "retry-after-ms": str(math.ceil(self.retry_after_s * 1e3)),
        }


class InvalidRequest(GatewayError):
    """The request is malformed or asks for what cannot be."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


def invalid(param: str, problem: str) -> InvalidRequest:
    """Return the error of an invalid parameter; the message begins with the parameter's path."""
    return InvalidRequest(f"{param}: {problem}", param)


class Unsupported(InvalidRequest):
    """A parameter that would change the output, and which is not supported yet."""

    code = "unsupported_parameter"

    def __init__(self, param: str, detail: str = "") -> None:
        super().__init__(f"{param}{detail} is not supported yet", param)


class NoEmbeddings(InvalidRequest):
    """What runs here has no hidden states to give, or not those that the checkpoint asks for."""

    code = "unsupported"

    def __init__(self, backend: str, model: str) -> None:
        super().__init__(f"the backend {backend!r} gives no embeddings of {model!r}", "model")


class ContextTooLong(InvalidRequest):
    """Prompt and output do not fit; the message has both numbers."""

    code = "context_length_exceeded"


class ModelNotFound(InvalidRequest):
    """There is no model of that name."""

    status = 404
    code = "model_not_found"

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(f"the model {asked!r} does not exist; served here: {served!r}", "model")


class RouteNotFound(InvalidRequest):
    """No such path."""

    status = 404
    code = "not_found"


class MethodNotAllowed(InvalidRequest):
    """The path exists, but not for this method."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, allowed: Sequence[str]) -> None:
        super().__init__(message)
        self._allowed = allowed

    def headers(self) -> dict[str, str]:
        """Return the methods that the path takes (RFC 9110, 15.5.6)."""
        return {"Allow": ", ".join(self._allowed)}


class BodyTooLarge(InvalidRequest):
    """The body exceeds `--max-body-bytes`."""

    status = 413
    code = "body_too_large"


class Unauthorized(GatewayError):
    """There is no such API key, or none was sent."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        """Say how to authenticate: programs with a bearer token, browsers with a password."""
        return {"WWW-Authenticate": 'Bearer, Basic realm="draftgate"'}


class TooMany(GatewayError):
    """Not now: the client may come back after `retry_after_s`.

    Attributes:
        kind: what stood against it, for figures.
    """

    status = 429
    type = "rate_limit_error"
    code = "too_many"

    def __init__(self, message: str, retry_after_s: float, kind: str | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.kind = kind or self.code or ""


class QuotaExceeded(TooMany):
    """The key's own quota does not allow it now."""

    code = "rate_limit_exceeded"


class Overloaded(TooMany):
    """It could not be answered in time: said before it waits in vain."""

    code = "overloaded"


class QueueTimeout(TooMany):
    """It waited for as long as anything may."""

    code = "queue_timeout"


class NotOffered(GatewayError):
    """What is asked for exists, but not with the backend of this node."""

    status = 501
    code = "not_offered"


class UpstreamBusy(TooMany):
    """Every upstream has asked to be left alone for a while."""

    code = "upstream_busy"


class UpstreamBroken(GatewayError):
    """An upstream does not answer, broke while it did, or answered with an error of its own."""

    status = 502
    code = "upstream_failed"


class Unavailable(GatewayError):
    """This node takes no requests now; another one, or this one later, may."""

    status = 503
    code = "unavailable"


class Starting(Unavailable):
    """The model is being loaded."""

    code = "model_loading"


class Draining(Unavailable):
    """The node is about to stop and finishes only what it has begun."""

    code = "draining"


class WorkerFailed(Unavailable):
    """The worker broke, or stopped while the request ran."""

    code = "worker_failed"


class UpstreamUnavailable(Unavailable):
    """No upstream serves now."""

    code = "upstream_unavailable"


def as_gateway_error(error: Exception) -> GatewayError:
    """Return what a client may see of any error. What is not ours to explain becomes a bare 500."""
    if isinstance(error, GatewayError):
        return error
    if isinstance(error, RequestRejected):
        kind = InvalidRequest if error.limit_tokens is None else ContextTooLong
        return kind(str(error), error.param)
    if isinstance(error, UpstreamUnreachable):
        return UpstreamBroken("the upstream does not answer")  # where it is, the log says
    if isinstance(error, UpstreamFailed):
        return UpstreamBroken(f"the upstream failed: {error}")
    if isinstance(error, BackendFailed):
        return WorkerFailed(f"the worker failed: {error}", retry_after_s=5)
    return GatewayError("internal error; the server's log has the details")
