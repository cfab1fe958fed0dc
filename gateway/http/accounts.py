"""Whose request it is: API keys of requests, as bearer tokens or as a browser's password."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, TypeVar

from aiohttp import web

from draftgate.gateway.accounts import EVERYBODY, Account
from draftgate.gateway.dispatch.admission import Ask
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.errors import Unauthorized
from draftgate.gateway.http.context import NODE
from draftgate.gateway.http.peers.endpoint import is_peer

ACCOUNT: Final = web.RequestKey("account", Account)
"""Whose request it is."""

_OPEN_PATHS: Final = frozenset({"/health", "/ready", "/version"})
"""What an orchestrator asks, who has no key; they tell nothing of any request."""

Asked = TypeVar("Asked", Job, Ask)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Find the account of a request. Other nodes have none: they prove that they are such.

    Raises:
        Unauthorized: keys are required, and the request has none that is known.
    """
    accounts = request.app[NODE].accounts
    request[ACCOUNT] = EVERYBODY
    if is_peer(request):
        return await handler(request)
    if accounts.required and request.path not in _OPEN_PATHS:
        key = _key(request.headers.get("Authorization", ""))
        account = None if key is None else accounts.find(key)
        if account is None:
            sent = "no API key was sent" if key is None else "the API key is not known"
            raise Unauthorized(f"{sent}; send `Authorization: Bearer KEY`")
        request[ACCOUNT] = account
    return await handler(request)


def fingerprint(tenant: str, body: bytes) -> int:
    """Return 64 bits that are the same for what a tenant sends again, byte by byte.

    A megabyte takes a millisecond.
    """
    digest = hashlib.blake2b(body, digest_size=8, key=tenant.encode()[:64])
    return int.from_bytes(digest.digest(), "big")


def in_name_of_account(asked: Asked, account: Account, body: bytes, retries: int | None) -> Asked:
    """Return what a body asks for in its account's name, and within its bounds. Any thread."""
    return replace(
        asked,
        service=account.capped(asked.service),
        tenant=account.name,
        share=account.share,
        fingerprint=fingerprint(account.name, body),
        retries=retries,
    )


def _key(authorization: str) -> str | None:
    """Return the key of a header; None if there is none.

    Browsers ask for a name and a password: the password is the key, the name is anything.
    """
    scheme, _, value = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return value.strip() or None
    if scheme.lower() != "basic":
        return None
    try:
        name_and_password = base64.b64decode(value, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return name_and_password.partition(":")[2] or None
