"""Responses of upstreams that are errors or incomplete, and what the client gets for them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from draftgate.backends.base import DENIED, Exchange
from draftgate.backends.errors import UpstreamFailed, UpstreamUnreachable
from draftgate.gateway.dispatch.upstreams.error_bodies import read_error
from draftgate.gateway.errors import UpstreamBroken, UpstreamUnavailable
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.logs import log

FIRST_REDIRECT: Final = 300
FIRST_ERROR: Final = 400
MOST_REASON_BYTES: Final = 64 << 10

WHOLE_BYTES: Final = 1 << 20
"""A whole response up to this size is sent once it is complete. The client then gets an error
instead of a part if the upstream breaks off. A completion of 32,000 tokens has 150 kB."""

UNAVAILABLE: Final = 503
_TOO_MANY: Final = 429
_BAD_GATEWAY: Final = 502
REFUSALS: Final = frozenset({_TOO_MANY, _BAD_GATEWAY, UNAVAILABLE, *DENIED})
"""Statuses after which another upstream may succeed."""

PASSED_ON: Final = frozenset({*range(400, 500), 501}) - REFUSALS
"""Statuses of errors that the client gets. Other errors and redirects mean nothing to it."""

_RETRY_HEADERS: Final = frozenset({"retry-after", "retry-after-ms"})


def check_refusal(status: int, body: bytes, worker: FleetWorker, *, has_kv: bool) -> None:
    """Check that another upstream may succeed after an error of this one.

    Args:
        has_kv: whether the upstream was to copy the KV cache of the prompt from another one.

    Raises:
        UpstreamFailed: the upstream may not have got the KV cache, which it can compute itself.
        UpstreamBroken: another attempt would not avoid the error.
    """
    if status in DENIED:
        where = worker.backend.card.root
        log(logging.WARNING, "an upstream denies access", upstream=where, status=status)
    if status not in REFUSALS:
        if has_kv:
            raise UpstreamFailed(reason(status, body))
        raise UpstreamBroken(reason(status, body))


def passed_refusal(
    status: int, headers: Mapping[str, str], body: bytes, retry_after_s: int
) -> Mapping[str, str]:
    """Return the headers with which the client gets a refusal that has status 429.

    Args:
        retry_after_s: seconds until an upstream may be called again.

    Raises:
        UpstreamUnavailable, UpstreamBroken: the client does not get the response, because its
            status is not 429.
    """
    if status in DENIED:
        raise denied_access(status)
    if status == _TOO_MANY:
        kept = {
            name: value for name, value in headers.items() if name.lower() not in _RETRY_HEADERS
        }
        return kept | {"Retry-After": str(retry_after_s), "retry-after-ms": f"{retry_after_s}000"}
    message = reason(status, body)
    if status == UNAVAILABLE:
        raise UpstreamUnavailable(message, retry_after_s=retry_after_s)
    raise UpstreamBroken(message)


def reason(status: int, body: bytes) -> str:
    """Return the status of an error, with the message of the upstream if it has one."""
    found = f"the upstream responded with status {status}"
    message = read_error(body).message
    return f"{found}: {message}" if message else found


def denied_access(status: int) -> UpstreamBroken:
    """Return the error for a request whose upstreams deny this gateway access.

    The message omits the upstream's reason, which may quote a part of the key.
    """
    return UpstreamBroken(
        f"the upstream is misconfigured: it denied this gateway access with status {status}; the "
        "operator must check --upstream-api-key-env"
    )


async def read_first(exchange: Exchange) -> bytes:
    """Return the first bytes of a stream, or a whole response unless it is large.

    Another upstream can still respond if a whole response breaks off.

    Raises:
        UpstreamUnreachable: the response is incomplete, or has no body although it is a success.
    """
    try:
        first = await exchange.read()
        if exchange.streaming or exchange.status >= FIRST_ERROR:
            return first
        if not first:
            raise UpstreamUnreachable("its response is empty")
        begin, _ = await read_begin(exchange.read, WHOLE_BYTES, first)
    except UpstreamFailed as error:
        raise UpstreamUnreachable(str(error)) from error
    return begin


async def read_begin(
    read: Callable[[], Awaitable[bytes]], least_bytes: int, first: bytes = b""
) -> tuple[bytes, bool]:
    """Return the body and True, or False and only its begin of more than some bytes.

    Args:
        read: returns the next bytes of the body, or nothing at its end.
        first: its first bytes, which have been read.
    """
    body = bytearray(first)
    while len(body) <= least_bytes:
        block = await read()
        if not block:
            return bytes(body), True
        body += block
    return bytes(body), False


async def read_and_close(exchange: Exchange) -> bytes:
    """Return the body of a response, of a large one at least `WHOLE_BYTES`, and end the exchange.

    Raises:
        UpstreamFailed: the response is incomplete.
    """
    try:
        body = exchange.body
        if body is None:
            body, _ = await read_begin(exchange.read, WHOLE_BYTES)
        return body
    finally:
        exchange.close()
