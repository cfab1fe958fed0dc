"""The audit log: refusals and the use of API keys, as JSON lines without keys and prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from draftgate.gateway.telemetry.json_lines import JsonLinesFile

REFUSALS: Final = frozenset({401, 403, 429})
"""Statuses of requests that the node refuses because of who sent them."""


class AuditRecord(msgspec.Struct, frozen=True):
    """A request with an API key, or a refused request.

    Attributes:
        at_s: Unix time at the end of the request.
        client: address of the client, or of the last proxy.
        status: the HTTP status.
        tenant: the tenant of the key, or None without a known key.
        key: the first 8 digits of the SHA-256 of the key that was sent, or None without a key.
        code: the code of the error, or None without an error.
    """

    at_s: float
    request_id: str
    client: str
    method: str
    path: str
    status: int
    tenant: str | None
    key: str | None
    code: str | None


class AuditLog:
    """The audit log of a node."""

    def __init__(self, file: JsonLinesFile, now_s: Callable[[], float]) -> None:
        """Write to a file.

        Args:
            now_s: the clock, in Unix time.
        """
        self._file = file
        self._now_s = now_s

    def record(
        self,
        request_id: str,
        client: str,
        target: tuple[str, str],
        status: int,
        tenant: str | None,
        key: str | None,
        code: str | None,
    ) -> None:
        """Record the end of a request, if it used a key or was refused.

        Args:
            target: method and path.
        """
        if tenant is not None or status in REFUSALS:
            now_s = self._now_s()
            self._file.append(
                AuditRecord(now_s, request_id, client, *target, status, tenant, key, code)
            )
