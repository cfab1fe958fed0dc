"""Fallbacks: when the next model of a chain gets a request, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, Protocol

from draftgate.backends.errors import BackendFailed, UpstreamFailed
from draftgate.gateway.dispatch.upstreams.error_bodies import is_missing_endpoint, read_error
from draftgate.gateway.errors import (
    GatewayError,
    ModelNotFound,
    QuotaExceeded,
    TooMany,
    UpstreamBroken,
    UpstreamUnavailable,
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
    """Every upstream of the model failed before it responded."""
    OVERLOADED = "overloaded"
    """The upstreams of the model accept no requests (429, 503), or have no capacity in time."""
    CONTEXT = "context_too_long"
    """The request does not fit into the context of the model."""
    UNSUPPORTED = "unsupported"
    """No upstream has the model, or its upstream does not have the endpoint for it."""


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


async def attempt_models(request: ChainedRequest, models: Sequence[str]) -> None:
    """Get a response from the requested model, or from the next one while the reasons apply.

    The client gets the error of the last model.

    Raises:
        GatewayError, BackendFailed: as `ChainedRequest.attempt`.
    """
    for model in models:
        try:
            await request.attempt()
            reason = _reason_of_response(request)
        except (GatewayError, BackendFailed) as error:
            reason = _reason_of(error)
            if reason is None:
                raise
        if reason is None:
            return
        request.fall_back(model, reason)
    await request.attempt()


def _reason_of(error: Exception) -> FallbackReason | None:
    if isinstance(error, UpstreamFailed | UpstreamBroken):
        return FallbackReason.FAILED
    if isinstance(error, ModelNotFound):
        return FallbackReason.UNSUPPORTED
    refused = isinstance(error, TooMany) and not isinstance(error, QuotaExceeded)
    if refused or isinstance(error, UpstreamUnavailable):
        return FallbackReason.OVERLOADED
    return None


def _reason_of_response(request: ChainedRequest) -> FallbackReason | None:
    if not request.is_error:
        return None
    status, error = request.status, read_error(request.body or b"")
    if status == 429:
        return FallbackReason.OVERLOADED
    words = " ".join(filter(None, (error.message, error.code, error.kind)))
    if status in _TOO_LONG and _CONTEXT.search(words):
        return FallbackReason.CONTEXT
    lacks = _LACKS.search(words) and error.param in _CHOOSING
    if status in _LACKING and (is_missing_endpoint(status, error) or lacks or status == 501):
        return FallbackReason.UNSUPPORTED
    return None
