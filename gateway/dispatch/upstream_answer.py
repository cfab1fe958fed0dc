"""The response of an upstream: a begun response or a refusal."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Final

import msgspec

from draftgate.backends.base import Exchange, TokenUsage, UpstreamCall
from draftgate.backends.errors import UpstreamFailed, UpstreamUnreachable
from draftgate.gateway.errors import UpstreamBroken, UpstreamUnavailable
from draftgate.gateway.fleet import FleetWorker
from draftgate.policies.types import SpeculationPlan
from draftgate.policies.values import immutable

NO_TOKENS: Final = TokenUsage(0, 0, 0)

FIRST_ERROR_STATUS: Final = 400

_TOO_MANY: Final = 429
_BAD_GATEWAY: Final = 502
_UNAVAILABLE: Final = 503
_MOST_REASON_BYTES: Final = 64 << 10


@immutable
class UpstreamAnswer:
    """A response whose first bytes have arrived.

    Attributes:
        blocks: the body from its first byte. The generator raises `BackendFailed` if the upstream
            fails.
        limits: estimated prompt tokens and maximum output tokens, for a response without usage.
        plan: the decision about speculation, or None without a choice.
    """

    worker_id: str
    exchange: Exchange
    headers: Mapping[str, str]
    blocks: AsyncGenerator[bytes, None]
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
    """A response with status 429, 502 or 503, after which another upstream may succeed."""

    worker: FleetWorker
    exchange: Exchange
    body: bytes

    def to_client(self, retry_after_s: int) -> UpstreamAnswer:
        """Return the response with status 429 that the client receives.

        Args:
            retry_after_s: the client's retry delay, in seconds.

        Raises:
            UpstreamUnavailable, UpstreamBroken: the status is 503 or 502, which the client does not
                get.
        """
        status = self.exchange.status
        if status == _TOO_MANY:
            theirs = self.exchange.headers.items()
            headers = {name: value for name, value in theirs if name.lower() != "retry-after"}
            headers["Retry-After"] = str(retry_after_s)
            worker_id = self.worker.worker_id
            return UpstreamAnswer(
                worker_id, self.exchange, headers, _single_block(self.body), NO_TOKENS
            )
        message = f"the upstream responded with status {status}{_reason(self.body)}"
        if status == _UNAVAILABLE:
            raise UpstreamUnavailable(message, retry_after_s=retry_after_s)
        raise UpstreamBroken(message)


async def begin_answer(
    stack: AsyncExitStack, worker: FleetWorker, call: UpstreamCall, limits: TokenUsage
) -> UpstreamAnswer:
    """Send a call and wait for the first bytes of the response, which `stack` keeps open.

    Raises:
        UpstreamFailed: no bytes arrived.
    """
    exchange = await stack.enter_async_context(worker.upstream.forward(call))
    blocks = await stack.enter_async_context(aclosing(exchange.blocks()))
    try:
        first = await anext(blocks, b"")
    except UpstreamFailed as error:
        raise UpstreamUnreachable(str(error)) from error
    whole = await stack.enter_async_context(aclosing(_joined(first, blocks)))
    return UpstreamAnswer(worker.worker_id, exchange, exchange.headers, whole, limits)


async def read_refusal(worker: FleetWorker, answer: UpstreamAnswer) -> UpstreamRefusal | None:
    """Return the refusal in a response, or None for any other response.

    Raises:
        UpstreamBroken: the response is an error that another attempt would not avoid.
    """
    status = answer.status
    # Redirects and internal errors of the upstream mean nothing to the client.
    broken = 300 <= status < FIRST_ERROR_STATUS or (status >= 500 and status not in {501, 502, 503})
    if not broken and status not in {_TOO_MANY, _BAD_GATEWAY, _UNAVAILABLE}:
        return None
    body = b""
    async for block in answer.blocks:
        body += block
        if len(body) > _MOST_REASON_BYTES:
            break
    if broken:
        raise UpstreamBroken(f"the upstream responded with status {status}{_reason(body)}")
    return UpstreamRefusal(worker, answer.exchange, body)


async def _joined(first: bytes, blocks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    if first:
        yield first
    async for block in blocks:
        yield block


async def _single_block(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body


def _reason(body: bytes) -> str:
    """Return the message of an upstream's error after a colon, or an empty string."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return ""
    error = found.get("error") if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return f": {message}" if isinstance(message, str) and message else ""
