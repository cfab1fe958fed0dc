"""The response of an upstream: a begun response or a refusal."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Final, Self

from draftgate.backends.base import Exchange, TokenUsage, UpstreamCall
from draftgate.backends.errors import UpstreamFailed, UpstreamUnreachable
from draftgate.gateway.dispatch.upstreams.error_bodies import read_error
from draftgate.gateway.dispatch.worker_spans import open_dispatch
from draftgate.gateway.errors import UpstreamBroken, UpstreamUnavailable
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.logs import log
from draftgate.gateway.tracing import Span
from draftgate.policies.types import SpeculationPlan
from draftgate.policies.values import immutable

NO_TOKENS: Final = TokenUsage(0, 0, 0)

FIRST_ERROR_STATUS: Final = 400

_TOO_MANY: Final = 429
_BAD_GATEWAY: Final = 502
_UNAVAILABLE: Final = 503
DENIED: Final = frozenset({401, 403, 407})
"""Statuses about the key of the gateway. The upstream does not get the key of the client, which
would take the status for a verdict on its own key."""

_MOST_REASON_BYTES: Final = 64 << 10
_RETRY_HEADERS: Final = frozenset({"retry-after", "retry-after-ms"})


@immutable
class UpstreamAnswer:
    """A response whose first bytes have arrived.

    Attributes:
        blocks: the body from its first byte. The iterator raises `BackendFailed` if the upstream
            fails.
        limits: estimated prompt tokens and maximum output tokens, for a response without usage.
        plan: the decision about speculation, or None without a choice.
    """

    worker_id: str
    exchange: Exchange
    headers: Mapping[str, str]
    blocks: AsyncIterator[bytes]
    limits: TokenUsage
    plan: SpeculationPlan | None = None

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.exchange.status

    @property
    def is_error(self) -> bool:
        """Whether the status is an error."""
        return self.status >= FIRST_ERROR_STATUS

    def usage(self) -> TokenUsage:
        """Return the reported or estimated tokens so far.

        An error has no tokens.
        """
        if self.is_error:
            return NO_TOKENS
        usage = self.exchange.usage()
        if usage.prompt:
            return usage
        counted = self.exchange.streaming or usage.output > 0
        return self.limits._replace(output=usage.output) if counted else self.limits


@immutable
class UpstreamRefusal:
    """A response after which another upstream may succeed: status 429, 502 or 503, or no access."""

    worker: FleetWorker
    exchange: Exchange
    body: bytes

    def to_client(self, retry_after_s: int) -> UpstreamAnswer:
        """Return the response with status 429 that the client receives.

        Args:
            retry_after_s: the client's retry delay, in seconds.

        Raises:
            UpstreamUnavailable, UpstreamBroken: the client does not get the response, because its
                status is not 429.
        """
        status = self.exchange.status
        if status == _TOO_MANY:
            theirs = self.exchange.headers.items()
            headers = {name: value for name, value in theirs if name.lower() not in _RETRY_HEADERS}
            headers |= {"Retry-After": str(retry_after_s), "retry-after-ms": f"{retry_after_s}000"}
            worker_id = self.worker.worker_id
            return UpstreamAnswer(
                worker_id, self.exchange, headers, _single_block(self.body), NO_TOKENS
            )
        if status in DENIED:
            # The reason of the upstream may quote a part of the key.
            raise UpstreamBroken(
                "the upstream is misconfigured: it denied this gateway access with status "
                f"{status}; the operator must check --upstream-api-key-env"
            )
        message = f"the upstream responded with status {status}{_reason(self.body)}"
        if status == _UNAVAILABLE:
            raise UpstreamUnavailable(message, retry_after_s=retry_after_s)
        raise UpstreamBroken(message)


class Calling:
    """A call of an upstream, which its owner begins once and always ends."""

    def __init__(
        self, worker: FleetWorker, call: UpstreamCall, limits: TokenUsage, span: Span
    ) -> None:
        """Prepare a call.

        Args:
            limits: estimated prompt tokens and maximum output tokens.
            span: the parent of the call's span.
        """
        self._worker = worker
        self._call = call
        self._limits = limits
        self._span = open_dispatch(span, worker.worker_id, worker.server)
        self._forwarding: AbstractAsyncContextManager[Exchange] | None = None  # once entered
        self._blocks: AsyncGenerator[bytes, None] | None = None

    async def begin(self) -> UpstreamAnswer | UpstreamRefusal:
        """Send the call and wait for the first bytes of the response.

        Raises:
            UpstreamFailed: no bytes arrived.
            UpstreamBroken: the response is an error that another attempt would not avoid.
        """
        call, worker = self._call, self._worker
        if self._span.recording:
            call = call._replace(headers={**call.headers, **self._span.propagation()})
        forwarding = worker.upstream.forward(call)
        exchange = await forwarding.__aenter__()
        self._forwarding = forwarding
        self._blocks = blocks = exchange.blocks()
        try:
            first = await anext(blocks, b"")
        except UpstreamFailed as error:
            raise UpstreamUnreachable(str(error)) from error
        self._span.set({"http.response.status_code": exchange.status})
        body = FirstAndRest(first, blocks)
        return await read_refusal(worker, exchange, body) or UpstreamAnswer(
            worker.worker_id, exchange, exchange.headers, body, self._limits
        )

    async def end(self, error: BaseException | None) -> None:
        """Cancel the rest of the call, and end its span."""
        try:
            if self._blocks is not None:
                await self._blocks.aclose()
        finally:
            try:
                if self._forwarding is not None:
                    await self._forwarding.__aexit__(
                        *(None, None, None)
                        if error is None
                        else (type(error), error, error.__traceback__)
                    )
            finally:
                if error is not None:
                    self._span.fail(error)
                self._span.end()


class FirstAndRest:
    """An iterator of blocks, of which the first has been read."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        self._first = first
        self._rest = rest

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[bytes]:
        if not self._first:
            return anext(self._rest)
        first, self._first = self._first, b""
        return _ready(first)


async def _ready(block: bytes) -> bytes:
    return block


async def read_refusal(
    worker: FleetWorker, exchange: Exchange, blocks: AsyncIterator[bytes]
) -> UpstreamRefusal | None:
    """Return the refusal in a response, or None for any other response.

    Raises:
        UpstreamBroken: the response is an error that another attempt would not avoid.
    """
    status = exchange.status
    if status < 300:
        return None
    # Redirects and internal errors of the upstream mean nothing to the client.
    broken = 300 <= status < FIRST_ERROR_STATUS or (status >= 500 and status not in {501, 502, 503})
    if not broken and status not in {_TOO_MANY, _BAD_GATEWAY, _UNAVAILABLE, *DENIED}:
        return None
    if status in DENIED:
        where = worker.backend.card.root
        log(logging.WARNING, "an upstream denies access", upstream=where, status=status)
    body = b""
    async for block in blocks:
        body += block
        if len(body) > _MOST_REASON_BYTES:
            break
    if broken:
        raise UpstreamBroken(f"the upstream responded with status {status}{_reason(body)}")
    return UpstreamRefusal(worker, exchange, body)


async def _single_block(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body


def _reason(body: bytes) -> str:
    """Return the message of an upstream's error after a colon, or an empty string."""
    message = read_error(body).message
    return f": {message}" if message else ""
