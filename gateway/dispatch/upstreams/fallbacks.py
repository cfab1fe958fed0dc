"""Fallbacks: when the next model of a chain gets a request, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from draftgate.backends.errors import BackendFailed
from draftgate.gateway.dispatch.run import Fallback
from draftgate.gateway.dispatch.upstreams.error_bodies import (
    UpstreamErrorBody,
    is_missing_endpoint,
    read_error,
)
from draftgate.gateway.errors import (
    AdapterUnavailable,
    Draining,
    GatewayError,
    QuotaExceeded,
    TooMany,
    Unavailable,
    UnsupportedTask,
    UpstreamBroken,
    UpstreamTimeout,
    WorkerFailed,
    as_gateway_error,
)

FALLBACK_HEADER: Final = "X-Draftgate-Fallback"
MODEL_HEADER: Final = "X-Draftgate-Model"
"""The headers of a response of another model than the requested one: the reason, and the model."""

_CONTEXT: Final = re.compile(
    r"context[ _-]?(?:length|size|window)|max_model_len|maximum model length", re.IGNORECASE
)
"""Words in the errors of vLLM, SGLang, llama.cpp, Draftgate and OpenAI about a request that is too
long."""

_LACKS: Final = re.compile(
    r"does not (?:support|exist)|not supported|not implemented"
    r"|(?:no|provide a) chat template|chat_template is not set",
    re.IGNORECASE,
)
"""Words in errors about an endpoint or a feature, such as chats of a model without a template."""

_TOO_LONG: Final = frozenset({400, 413, 422})
_LACKING: Final = frozenset({400, 404, 405, 501})
_CHOOSING: Final = frozenset({None, "model", "messages"})
"""Parameters of errors about what a model lacks. Another parameter is at fault itself."""


class FallbackReason(StrEnum):
    """Why another model than the requested one gets a request."""

    FAILED = "failed"
    """Every upstream or worker of the model failed before it responded."""
    OVERLOADED = "overloaded"
    """The model accepts no requests (429, 503), has no capacity in time, or is still loading."""
    CONTEXT = "context_too_long"
    """The request does not fit into the context of the model."""
    UNSUPPORTED = "unsupported"
    """Nothing has the model, or the model or its upstream does not have the endpoint."""


class Unanswered(GatewayError):
    """An upstream responded with an error for which the next model of the chain gets the request.

    Attributes:
        reason: why.
    """

    def __init__(self, reason: FallbackReason) -> None:
        super().__init__(f"no upstream of the model responds: {reason}")
        self.reason = reason


class Turn(NamedTuple):
    """The models of a chain that the upstreams of a node have in turn.

    Attributes:
        further: the models after the one that the request names.
        is_last: whether no model after these may respond.
        fallback: the change to the model that the request names, or None if the client named it.
    """

    further: Sequence[str] = ()
    is_last: bool = True
    fallback: Fallback | None = None


class ChainedRequest(Protocol):
    """A request that may be sent to several models (`forwarding.ForwardedRequest`)."""

    status: int
    is_error: bool
    body: bytes | None

    async def attempt(self) -> None:
        """Get a response from an upstream of the present model, which may be an error."""
        ...

    def fall_back(self, model: str, reason: FallbackReason) -> None:
        """Use another model from now on."""
        ...


async def attempt_models(request: ChainedRequest, turn: Turn) -> None:
    """Get a response from the requested model, or from the next one while the reasons apply.

    The client gets the error of the last model.

    Raises:
        GatewayError, BackendFailed: as `ChainedRequest.attempt`.
        Unanswered: the last of these models responds with an error, and is not that of the chain.
    """
    for model in turn.further:
        try:
            await request.attempt()
            reason = _reason_of_response(request)
        except (GatewayError, BackendFailed) as error:
            reason = reason_of(error)
            if reason is None:
                raise
        if reason is None:
            return
        request.fall_back(model, reason)
    await request.attempt()
    if not turn.is_last and (reason := _reason_of_response(request)) is not None:
        raise Unanswered(reason)


def reason_of(error: Exception) -> FallbackReason | None:
    """Return why another model may get a request that ended with an error, or None if none may."""
    shown = as_gateway_error(error)
    match shown:
        case Unanswered():
            return shown.reason
        case QuotaExceeded() | Draining():
            return None
        case UpstreamBroken() | UpstreamTimeout() | WorkerFailed() | AdapterUnavailable():
            return FallbackReason.FAILED
        case TooMany() | Unavailable():
            return FallbackReason.OVERLOADED
        case UnsupportedTask():
            return FallbackReason.UNSUPPORTED
    described = UpstreamErrorBody(
        shown.message, shown.param, shown.code, shown.type, has_openai_form=True
    )
    return _reason_of_error(shown.status, described)


def _reason_of_response(request: ChainedRequest) -> FallbackReason | None:
    if not request.is_error:
        return None
    return _reason_of_error(request.status, read_error(request.body or b""))


def _reason_of_error(status: int, error: UpstreamErrorBody) -> FallbackReason | None:
    if status == 429:
        return FallbackReason.OVERLOADED
    words = " ".join(filter(None, (error.message, error.code, error.kind)))
    if status in _TOO_LONG and _CONTEXT.search(words):
        return FallbackReason.CONTEXT
    lacks = _LACKS.search(words) and error.param in _CHOOSING
    if status in _LACKING and (is_missing_endpoint(status, error) or lacks or status == 501):
        return FallbackReason.UNSUPPORTED
    return None
