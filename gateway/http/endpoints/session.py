"""The endpoint `/session`, with which the live page logs in and out."""

from __future__ import annotations

from typing import Final

import msgspec
from aiohttp import web

from draftgate.gateway.accounts import Role
from draftgate.gateway.errors import Forbidden, Unauthorized
from draftgate.gateway.http.authentication import COOKIE, Session
from draftgate.gateway.http.context import NODE, SESSION, SESSIONS, json_response, read_body
from draftgate.gateway.http.requests.decoding import decode
from draftgate.gateway.http.requests.schemas import SessionBody

PATH: Final = "/session"


class SessionReply(msgspec.Struct):
    """The response of `/session`.

    Attributes:
        required: whether requests need an API key or a session.
        tenant, role: those of the session, or the role of all requests without keys.
        expires_s: Unix time at which the session ends.
    """

    required: bool
    tenant: str | None = None
    role: str | None = None
    expires_s: int | None = None


_decoder: Final = msgspec.json.Decoder(SessionBody)


async def get_session(request: web.Request) -> web.Response:
    """Return the session of the browser, if it has one."""
    return json_response(_reply(request, request.get(SESSION)))


async def log_in(request: web.Request) -> web.Response:
    """Begin a session, whose cookie stands for an API key from now on.

    Other pages cannot log a browser in, because the node refuses their `Origin`.

    Raises:
        Unauthorized: the API key is not known.
        Forbidden: the key can only read the metrics.
    """
    key, node = decode(await read_body(request), _decoder).key, request.app[NODE]
    if not node.accounts.required:
        return json_response(_reply(request, None))
    account = node.accounts.find(key.strip())
    if account is None:
        raise Unauthorized(f"{node.keys.why_refused(key.strip())}; enter a key of this node")
    if account.role is Role.METRICS:
        raise Forbidden("the role of this API key is metrics, so it can only read /metrics")
    response = web.Response(content_type="application/json")
    secure = request.secure or request.headers.get("Origin", "").lower().startswith("https://")
    session = request.app[SESSIONS].begin(response, account, secure=secure)
    response.body = msgspec.json.encode(_reply(request, session))
    return response


async def log_out(request: web.Request) -> web.Response:
    """End the session of the browser, which deletes its cookie."""
    response = json_response(_reply(request, None))
    response.del_cookie(COOKIE, httponly=True, samesite="Strict")
    return response


def _reply(request: web.Request, session: Session | None) -> SessionReply:
    node = request.app[NODE]
    if not node.accounts.required:
        return SessionReply(required=False, role=Role.OPERATOR.value)
    if session is None:
        return SessionReply(required=True)
    account, expires_s = session
    return SessionReply(True, account.name, account.role.value, expires_s)
