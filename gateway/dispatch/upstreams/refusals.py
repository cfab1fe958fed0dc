"""Responses of upstreams that are errors: which the client gets, and in which form."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from draftgate.gateway.dispatch.upstreams.error_bodies import read_error
from draftgate.gateway.dispatch.upstreams.forwarder import UNAVAILABLE
from draftgate.gateway.errors import UpstreamBroken, UpstreamUnavailable
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.logs import log

FIRST_REDIRECT: Final = 300
FIRST_ERROR: Final = 400
MOST_REASON_BYTES: Final = 64 << 10

DENIED: Final = frozenset({401, 403, 407})
"""Statuses about the key of the gateway. The upstream does not get the key of the client, which
would take the status for a verdict on its own key."""

_TOO_MANY: Final = 429
_BAD_GATEWAY: Final = 502
REFUSALS: Final = frozenset({_TOO_MANY, _BAD_GATEWAY, UNAVAILABLE, *DENIED})
"""Statuses after which another upstream may succeed."""

PASSED_ON: Final = frozenset({*range(400, 500), 501}) - REFUSALS
"""Statuses of errors that the client gets. Other errors and redirects mean nothing to it."""

_RETRY_HEADERS: Final = frozenset({"retry-after", "retry-after-ms"})


def check_refusal(status: int, body: bytes, worker: FleetWorker) -> None:
    """Check that another upstream may succeed after an error of this one.

    Raises:
        UpstreamBroken: another attempt would not avoid the error.
    """
    if status in DENIED:
        where = worker.backend.card.root
        log(logging.WARNING, "an upstream denies access", upstream=where, status=status)
    if status not in REFUSALS:
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
        # The reason of the upstream may quote a part of the key.
        raise UpstreamBroken(
            "the upstream is misconfigured: it denied this gateway access with status "
            f"{status}; the operator must check --upstream-api-key-env"
        )
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
