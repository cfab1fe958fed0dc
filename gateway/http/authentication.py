"""The API key or the session of a client.

Programs send their API key with each request. A browser sends the key once, to `POST /session`, and
then a cookie that scripts cannot read. The cookie names the tenant and the time of its expiry, and
has an HMAC of both and of the key's digest. So all processes of a node accept it, and it ends with
the key. A pool with a peer secret accepts it on all its nodes, other nodes only until they stop.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from aiohttp import hdrs, web

from draftgate.gateway.accounts import Account, Accounts, Role

COOKIE: Final = "draftgate_session"

SESSION_S: Final = 12 * 3600
"""Time after which a browser has to log in again, in seconds. (Chosen, not tuned.)"""

_SAFE: Final = frozenset({hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS})


class Session(NamedTuple):
    """A session of a browser, which ends at a Unix time."""

    account: Account
    expires_s: int


def key_of(headers: Mapping[str, str]) -> str | None:
    """Return the API key of a request, which Anthropic's clients send as `x-api-key`."""
    scheme, _, value = headers.get("Authorization", "").strip().partition(" ")
    bearer = value.strip() if scheme.lower() == "bearer" else ""
    return bearer or headers.get("x-api-key", "").strip() or None


class Sessions:
    """The sessions of browsers, which are only in their cookies."""

    def __init__(self, secret: bytes, now_s: Callable[[], float] = time.time) -> None:
        """Accept the cookies that are signed with a secret.

        Args:
            now_s: the clock, in Unix time.
        """
        self._secret = secret
        self._now_s = now_s

    def begin(self, response: web.Response, account: Account, *, secure: bool) -> Session:
        """Set the cookie of a new session in a response.

        Args:
            secure: whether the browser reached this node over HTTPS.
        """
        session = Session(account, int(self._now_s()) + SESSION_S)
        name = base64.urlsafe_b64encode(account.name.encode()).decode()
        response.set_cookie(
            COOKIE,
            f"{session.expires_s}.{name}.{self._proof(session)}",
            max_age=SESSION_S,
            httponly=True,
            samesite="Strict",
            secure=secure,
        )
        return session

    def find(self, request: web.Request, accounts: Accounts, *, own_page: bool) -> Session | None:
        """Return the session of a request, or None.

        Args:
            own_page: whether `Origin` names this node. Only then may a request with a cookie change
                anything, because `SameSite` does not separate ports and subdomains.
        """
        if request.method not in _SAFE and not own_page:
            return None
        expiry, _, rest = request.cookies.get(COOKIE, "").partition(".")
        name, _, proof = rest.partition(".")
        try:
            expires_s, tenant = int(expiry), base64.urlsafe_b64decode(name).decode()
        except ValueError:
            return None
        account = accounts.named(tenant)
        if account is None or account.role is Role.METRICS or expires_s <= self._now_s():
            return None
        session = Session(account, expires_s)
        sent = proof.encode("utf-8", "surrogateescape")  # a cookie may contain any bytes
        found = hmac.compare_digest(sent, self._proof(session).encode())
        return session if found else None

    def _proof(self, session: Session) -> str:
        account, expires_s = session
        text = f"{expires_s} {account.digest} {account.name}"
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()
