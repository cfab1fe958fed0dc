"""An upstream's answer that has begun, and what it means where it is none."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from draftgate.backends.base import Exchange, TokenUsage, UpstreamCall
from draftgate.backends.errors import UpstreamFailed, UpstreamUnreachable
from draftgate.gateway.errors import UpstreamBroken, UpstreamUnavailable
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.forwarding.pools import Pooled, pool_of
from draftgate.policies.types import SpeculationPlan

NO_TOKENS: Final = TokenUsage(0, 0, 0)

ERRORS: Final = 400
"""The statuses from here on."""

_UNAVAILABLE: Final = 503
_TOO_MANY: Final = 429
_BAD_GATEWAY: Final = 502
_MOST_REASON_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Forwarded:
    """An upstream's answer that has begun, or that has no body.

    Attributes:
        blocks: the body, from its first byte; ends with `BackendFailed` if the upstream breaks.
        most: the tokens of the prompt, by an estimate, and the most that there may be of output:
            believed where the answer does not say.
        plan: what was decided about speculation; None where there was nothing to decide.
    """

    worker_id: str
    exchange: Exchange
    headers: Mapping[str, str]
    blocks: AsyncGenerator[bytes, None]
    most: TokenUsage
    plan: SpeculationPlan | None = None

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.exchange.status

    def chosen(self, pooled: Pooled | None, worker: FleetWorker) -> Forwarded:
        """Return the answer of an upstream that was chosen so, which tells its client why."""
        if pooled is None:
            return self
        told = pooled.headers(pool_of(worker.backend.load()))
        return replace(self, headers={**self.headers, **told}, plan=pooled.plan)

    def usage(self) -> TokenUsage:
        """Return the tokens so far: what the answer says, else estimates; an error took none."""
        if self.status >= ERRORS:
            return NO_TOKENS
        usage = self.exchange.usage()
        if usage.prompt:
            return usage
        counted = self.exchange.streaming or usage.output > 0
        return self.most._replace(output=usage.output) if counted else self.most


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that says to try elsewhere, or later: 429, 502 or 503."""

    worker: FleetWorker
    exchange: Exchange
    body: bytes

    def told(self, retry_after_s: int) -> Forwarded:
        """Return what a client is told of it: when to come back, and whose quota is spent.

        Raises:
            UpstreamUnavailable, UpstreamBroken: it is not about the client.
        """
        status = self.exchange.status
        if status == _TOO_MANY:
            theirs = self.exchange.headers.items()
            headers = {name: value for name, value in theirs if name.lower() != "retry-after"}
            headers["Retry-After"] = str(retry_after_s)
            worker_id = self.worker.worker_id
            return Forwarded(worker_id, self.exchange, headers, _once(self.body), NO_TOKENS)
        message = f"the upstream answered {status}{_reason(self.body)}"
        if status == _UNAVAILABLE:
            raise UpstreamUnavailable(message, retry_after_s=retry_after_s)
        raise UpstreamBroken(message)


async def begin(
    stack: AsyncExitStack, worker: FleetWorker, call: UpstreamCall, most: TokenUsage
) -> Forwarded:
    """Send the call and wait for the first bytes of the answer.

    Raises:
        UpstreamFailed: none came.
    """
    exchange = await stack.enter_async_context(worker.upstream.forward(call))
    blocks = await stack.enter_async_context(aclosing(exchange.blocks()))
    try:
        first = await anext(blocks, b"")
    except UpstreamFailed as error:
        raise UpstreamUnreachable(str(error)) from error
    rest = await stack.enter_async_context(aclosing(_joined(first, blocks)))
    return Forwarded(worker.worker_id, exchange, exchange.headers, rest, most)


async def refused(worker: FleetWorker, answer: Forwarded) -> Refusal | None:
    """Return the refusal an answer is, or None.

    Raises:
        UpstreamBroken: it is an error of the upstream's that no other attempt helps.
    """
    status = answer.status
    if status not in {_TOO_MANY, _BAD_GATEWAY, _UNAVAILABLE} and not _is_broken(status):
        return None
    body = b""
    async for block in answer.blocks:
        body += block
        if len(body) > _MOST_REASON_BYTES:
            break
    if _is_broken(status):
        raise UpstreamBroken(f"the upstream answered {status}{_reason(body)}")
    return Refusal(worker, answer.exchange, body)


def _is_broken(status: int) -> bool:
    """Whether a status makes no sense to our client: a redirection, or an error of its own."""
    return 300 <= status < ERRORS or (status >= 500 and status not in {501, 502, 503})


async def _joined(first: bytes, blocks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    if first:
        yield first
    async for block in blocks:
        yield block


async def _once(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body


def _reason(body: bytes) -> str:
    """Return what an upstream's error says, after a colon, or nothing."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return ""
    error = found.get("error") if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return f": {message}" if isinstance(message, str) and message else ""
