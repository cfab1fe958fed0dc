"""The settings of forwarded requests that concern other upstreams and models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from draftgate.backends.base import UpstreamCall
from draftgate.backends.errors import UpstreamFailed, UpstreamLate
from draftgate.backends.openai.continuation import CONTINUED
from draftgate.policies.resilience.failover import MOST_RESUMES
from draftgate.policies.resilience.liveness import UPSTREAM_PATIENCE_S

MOST_KEPT_BYTES: Final = 1 << 20
"""Default of the bytes that are kept of a stream. A chunk of vLLM with one token has 200 bytes, so
these are 5,000 tokens."""

NO_FALLBACKS: Final[Mapping[str, Sequence[str]]] = MappingProxyType({})


class RetryCause(StrEnum):
    """Why another attempt for a request is necessary."""

    FAILED = "failed"
    """The upstream did not respond."""
    LATE = "late"
    """The upstream sent no byte within its timeout."""
    REFUSED = "refused"
    """The upstream refused the request."""
    LOST = "lost"
    """The upstream broke off a stream."""

    @classmethod
    def of(cls, failure: UpstreamFailed | None) -> RetryCause:
        """Return the cause for an attempt that failed, or was refused without a failure."""
        if failure is None:
            return cls.REFUSED
        return cls.LATE if isinstance(failure, UpstreamLate) else cls.FAILED


class ForwardingRules(NamedTuple):
    """When another upstream or model gets a request.

    Attributes:
        most_bytes: bytes that are kept of a stream, or 0 to continue none.
        patience_s: silence after the first byte that counts as a loss, in seconds.
        most_resumes: maximum number of continuations of a stream.
        fallbacks: for the name of a model, those that get its requests in turn.
        most_preemptions: maximum number of times that a request is aborted for one of a higher
            class, or 0 if no upstream allows it.
        start_timeout_s: time that a request waits for a server of its model to start, in seconds,
            or 0 to fail at once.
    """

    most_bytes: int = MOST_KEPT_BYTES
    patience_s: float = UPSTREAM_PATIENCE_S
    most_resumes: int = MOST_RESUMES
    fallbacks: Mapping[str, Sequence[str]] = NO_FALLBACKS
    most_preemptions: int = 0
    start_timeout_s: float = 0.0

    def keeps(self, call: UpstreamCall) -> bool:
        """Return whether the stream of a call is kept."""
        return self.most_bytes > 0 and call.path in CONTINUED
