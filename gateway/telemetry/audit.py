"""The audit log: refusals and the use of API keys, as JSON lines without keys and prompts.

A node refuses requests without a known key, of foreign pages and without a required certificate. It
also refuses requests beyond a quota or a deadline, large or slow requests, and bytes that are not
HTTP. Malformed parameters are errors of the client, and a node that loads or drains is not a
refusal of a client, so neither has a record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from draftgate.gateway.json_lines import JsonLinesFile

REFUSALS: Final = frozenset({401, 403, 408, 413, 429, 431})
"""Statuses of requests that the node refuses because of their sender, their size or their pace."""


class AuditRecord(msgspec.Struct, frozen=True):
    """A request with an API key, or a refused request.

    Attributes:
        at_s: Unix time at the end of the request.
        client: address of the client, or of the last proxy.
        method, path: the target, or None if the headers could not be read.
        status: the HTTP status.
        tenant: the tenant of the key, or None without a known key.
        key: the first 8 digits of the SHA-256 of the key that was sent, or None without a key.
        code: the code of the error, or None without an error.
    """

    at_s: float
    request_id: str
    client: str
    method: str | None
    path: str | None
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
        target: tuple[str, str] | None,
        status: int,
        code: str | None,
        *,
        tenant: str | None = None,
        key: str | None = None,
    ) -> None:
        """Record the end of a request, if it used a key or was refused.

        Args:
            target: method and path, or None for a request whose headers could not be read.
        """
        if tenant is None and target is not None and status not in REFUSALS:
            return
        method, path = target or (None, None)
        now_s = self._now_s()
        self._file.append(
            AuditRecord(now_s, request_id, client, method, path, status, tenant, key, code)
        )
