"""Tests of the sessions of browsers: login, cookie, foreign pages, expiry and logout."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from http.cookies import SimpleCookie
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from draftgate.gateway.accounts import Account, Accounts, Role
from draftgate.gateway.app import Listening
from draftgate.gateway.http.authentication import COOKIE, SESSION_S, Sessions
from tests.gateway.harness import ScriptedBackend, client, running
from tests.gateway.test_accounts import KEYS, bearer

METRICS_KEY = "  - {name: prometheus, key: sk-metrics, role: metrics}\n"


@pytest.fixture
async def guarded(tmp_path: Path, scripted: ScriptedBackend) -> AsyncIterator[Listening]:
    """A node that requires keys, with an audit log."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS + METRICS_KEY)
    audit = str(tmp_path / "audit")
    async with running(backends=[scripted], api_keys_file=str(keys), audit_file=audit) as gateway:
        yield gateway


async def log_in(http: httpx.AsyncClient, key: str, **headers: str) -> httpx.Response:
    return await http.post("/session", json={"key": key}, headers=headers)


async def test_a_session_stands_for_its_key(guarded: Listening, tmp_path: Path) -> None:
    """After the login, requests with the cookie have the tenant and the role of the key, until the
    logout. The audit log shows the same key as for requests with the key itself."""
    async with client(guarded) as http:
        assert (await http.get("/session")).json() == {
            "required": True, "tenant": None, "role": None, "expires_s": None
        }  # fmt: skip
        assert (await http.get("/decisions")).status_code == 401
        found = (await log_in(http, "sk-search")).json()
        assert (found["tenant"], found["role"]) == ("search", "tenant")
        assert (await http.get("/session")).json() == found
        assert (await http.get("/decisions")).json()["drafts"]["tenant"] == "search"
        assert (await http.get("/metrics")).status_code == 403
        await http.get("/decisions", headers=bearer("sk-search"))
        assert (await http.delete("/session")).json()["tenant"] is None
        assert (await http.get("/decisions")).status_code == 401
    await guarded.node.heartbeat.write_files()
    lines = map(json.loads, (tmp_path / "audit").read_text().splitlines())
    used = [line["key"] for line in lines if line["path"] == "/decisions" and line["tenant"]]
    assert len(used) == 2
    assert len(set(used)) == 1


async def test_the_cookie_is_only_for_this_node(guarded: Listening) -> None:
    """Scripts cannot read the cookie, other sites do not send it, and over HTTPS it is secure."""
    async with client(guarded) as http:
        for scheme in ("http", "https"):
            origin = f"{scheme}://{guarded.url.partition('://')[2]}"
            response = await log_in(http, "sk-search", origin=origin)
            cookie = SimpleCookie(response.headers["set-cookie"])[COOKIE]
            assert (cookie["httponly"], cookie["samesite"]) == (True, "Strict")
            assert (cookie["path"], cookie["max-age"]) == ("/", str(SESSION_S))
            assert bool(cookie["secure"]) == (scheme == "https")
            assert "sk-search" not in cookie.value


async def test_foreign_pages_can_neither_log_in_nor_use_a_session(guarded: Listening) -> None:
    """A login from another origin is refused. A request that changes anything needs the origin of
    this node beside the cookie, and an API key needs none."""
    own = {"origin": guarded.url}
    async with client(guarded) as http:
        assert (await log_in(http, "sk-boss", origin="http://127.0.0.1:1")).status_code == 403
        await log_in(http, "sk-boss")
        role = {"role": "any"}
        for headers, status in (({}, 401), (own, 404), ({"origin": "http://127.0.0.1:1"}, 403)):
            response = await http.put("/workers/none/role", json=role, headers=headers)
            assert response.status_code == status
        response = await http.put("/workers/none/role", json=role, headers=bearer("sk-boss"))
        assert response.status_code == 404


@pytest.mark.parametrize(("key", "status"), [("sk-wrong", 401), ("", 401), ("sk-metrics", 403)])
async def test_other_keys_begin_no_session(guarded: Listening, key: str, status: int) -> None:
    """An unknown key and a key for the metrics are refused without a cookie."""
    async with client(guarded) as http:
        response = await log_in(http, key)
        assert response.status_code == status
        assert "set-cookie" not in response.headers
        assert "sk-" not in response.text


async def test_a_node_without_keys_needs_no_session(scripted: ScriptedBackend) -> None:
    """Without keys, all requests have the role of operators and no cookie is set."""
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        response = await log_in(http, "sk-any")
        assert "set-cookie" not in response.headers
        assert response.json()["role"] == (await http.get("/session")).json()["role"] == "operator"


def test_a_session_ends_with_its_time_and_with_its_key() -> None:
    """A cookie is valid until its expiry, on nodes with the same secret, for the same key. A
    changed expiry, tenant or signature is no session."""
    now_s = 1000.0
    account, other = Account("a.b", "sk-1"), Account("ü", "sk-2")
    accounts = Accounts([account, other])
    sessions = Sessions(b"secret", lambda: now_s)
    response = web.Response()
    began = sessions.begin(response, account, secure=False)
    cookie = response.cookies[COOKIE].value

    def find(value: str, sessions: Sessions = sessions, accounts: Accounts = accounts):
        headers = {"Cookie": f"{COOKIE}={value}"}
        request = make_mocked_request("GET", "/", headers=headers)
        return sessions.find(request, accounts, own_page=False)

    assert find(cookie) == began
    assert find(cookie, Sessions(b"other", lambda: now_s)) is None
    assert find(cookie, accounts=Accounts([Account("a.b", "sk-new"), other])) is None
    assert find(cookie, accounts=Accounts([other])) is None
    metrics = Account("a.b", "sk-1", role=Role.METRICS)
    assert find(cookie, accounts=Accounts([metrics, other])) is None
    expiry, name, proof = cookie.split(".")
    for changed in (
        f"{int(expiry) + 1}.{name}.{proof}",
        f"{expiry}.w7w=.{proof}",
        f"{expiry}.{name}.{proof[:-1]}",
        *(f"{expiry}.{name}", "", ".", "..", "x.y.z", f"{expiry}.\xff.{proof}"),
    ):
        assert find(changed) is None
    now_s += SESSION_S - 1
    assert find(cookie) == began
    now_s += 1
    assert find(cookie) is None
