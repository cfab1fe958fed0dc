"""Tests of the rules for `Host` and `Origin`, which keep foreign web pages out."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from draftgate.gateway.app import Listening
from tests.gateway.harness import ScriptedBackend, client, port_of, running

PAGE = "https://chat.example.com"
BODY = '{"prompt": "x", "max_tokens": 1}'
KEY = {"authorization": "Bearer sk-page"}
LISTED: dict[str, Any] = {"cors_origins": (PAGE,), "api_keys": ("sk-page",)}


async def status_of(gateway: Listening, host: str, path: str = "/v1/models", **headers: str) -> int:
    """Return the status of a GET request with this `Host`."""
    async with client(gateway) as http:
        return (await http.get(path, headers={"host": host, **headers})).status_code


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:9", "127.0.0.1", "127.0.0.1:80", "127.8.8.8", "[::1]", "[::1]:8000"],
)
async def test_loopback_listener_accepts_loopback_names(sim: Listening, host: str) -> None:
    """A node on a loopback address without keys accepts loopback names with any port."""
    assert await status_of(sim, host) == 200


@pytest.mark.parametrize("path", ["/live", "/v1/models", "/", "/version", "/nowhere"])
@pytest.mark.parametrize(
    "host",
    [
        "a.example",
        "a.example:8000",
        "127.0.0.1.a.example",
        "localhost.a.example",
        "10.0.0.5",
        "[::2]",
    ],
)
async def test_loopback_listener_rejects_other_names(
    http: httpx.AsyncClient, host: str, path: str
) -> None:
    """A node on a loopback address without keys rejects other names, as DNS rebinding sends."""
    response = await http.get(path, headers={"host": host})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden_host")


@pytest.mark.parametrize(
    ("settings", "accepted", "rejected"),
    [
        ({"allowed_hosts": ("node.lan",)}, ["node.lan:80", "localhost"], ["other.lan"]),
        ({"api_keys": ("sk-page",)}, ["node.lan", "localhost"], []),
        (
            {"api_keys": ("sk-page",), "allowed_hosts": ("node.lan", "[::1]")},
            ["Node.LAN", "[::1]:80"],
            ["localhost", "a.node.lan"],
        ),
        ({"host": "0.0.0.0"}, ["node.lan", "10.0.0.5:8000"], []),
        ({"host": "0.0.0.0", "allowed_hosts": ("node.lan",)}, ["node.lan"], ["10.0.0.5"]),
    ],
    ids=["loopback-listed", "keys", "keys-listed", "any", "any-listed"],
)
async def test_allowed_hosts_decide(
    settings: dict[str, Any], accepted: list[str], rejected: list[str]
) -> None:
    """A node accepts the listed names, or all names if its clients cannot be foreign pages."""
    async with running(**settings) as gateway:
        assert [await status_of(gateway, host, **KEY) for host in accepted] == [200] * len(accepted)
        assert [await status_of(gateway, host, **KEY) for host in rejected] == [403] * len(rejected)


@pytest.mark.parametrize(
    "origin", ["http://localhost:1", "https://a.example", "null", "chrome-extension://abc"]
)
async def test_foreign_page_cannot_post(scripted: ScriptedBackend, origin: str) -> None:
    """The node rejects a text/plain POST of a foreign page, which needs no preflight."""
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        headers = {"content-type": "text/plain", "origin": origin}
        response = await http.post("/v1/completions", content=BODY, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden_origin")
    assert "access-control-allow-origin" not in response.headers
    assert scripted.submitted.empty()


@pytest.mark.parametrize("settings", [{}, {"api_keys": ("sk-page",)}, {"host": "0.0.0.0"}])
async def test_foreign_page_cannot_read_live_samples(settings: dict[str, Any]) -> None:
    """The node rejects a foreign page on any listen address, with and without keys."""
    async with running(**settings) as gateway:
        host = f"127.0.0.1:{port_of(gateway)}"
        assert await status_of(gateway, host, "/live", origin="https://a.example", **KEY) == 403


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_own_page_may_post(sim: Listening, http: httpx.AsyncClient, scheme: str) -> None:
    """The node accepts its own origin, also if a proxy in front of the node speaks TLS."""
    origin = {"origin": f"{scheme}://127.0.0.1:{port_of(sim)}"}
    assert (await http.post("/v1/completions", content=BODY, headers=origin)).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_may_use_any_name_and_origin(sim: Listening, path: str) -> None:
    """The node serves `/health` and `/ready` for every `Host` and `Origin`."""
    assert await status_of(sim, "a.example", path, origin="https://a.example") == 200


async def test_preflight_of_a_listed_origin_needs_no_key() -> None:
    """The response to a preflight allows the requested method and headers, without a key."""
    wanted = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    foreign = {**wanted, "origin": "https://a.example"}
    async with running(**LISTED) as gateway, client(gateway) as http:
        listed = await http.options("/v1/completions", headers=wanted)
        other = await http.options("/v1/completions", headers=foreign)
    assert listed.status_code == 204
    assert listed.headers["access-control-allow-origin"] == PAGE
    assert listed.headers["access-control-allow-methods"] == "POST"
    assert listed.headers["access-control-allow-headers"] == "authorization,content-type"
    assert other.status_code == 403
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}, KEY, 200),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1, "stream": True}, KEY, 200),
        ("/v1/completions", {"prompt": 5}, KEY, 400),
        ("/v1/completions", {"prompt": "x"}, {}, 401),
        ("/nowhere", {}, KEY, 404),
    ],
    ids=["whole", "stream", "malformed", "no-key", "no-route"],
)
async def test_scripts_of_a_listed_origin_can_read_responses(
    path: str, body: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    """Responses, streams and errors have the headers of CORS for a listed origin."""
    async with running(**LISTED) as gateway, client(gateway) as http:
        response = await http.post(path, json=body, headers={**headers, "origin": PAGE})
    assert response.status_code == status
    assert response.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in response.headers["access-control-expose-headers"]
    assert response.headers["vary"] == "Origin"


async def test_responses_have_no_cors_headers_by_default(http: httpx.AsyncClient) -> None:
    """A node without listed origins sends no header of CORS."""
    headers = (await http.get("/v1/models")).headers
    assert not [name for name in headers if name == "vary" or name.startswith("access-control-")]


async def test_metrics_are_read_by_any_address_and_no_other_name() -> None:
    """Prometheus uses the addresses of pods, which a page that rebinds its name cannot send. The
    origin of a page is checked as on all paths."""
    settings = ({"host": "0.0.0.0", "allowed_hosts": ("node.lan",)}, {})
    for setting in settings:
        async with running(**setting) as gateway, client(gateway) as http:
            url = gateway.url.replace("0.0.0.0", "127.0.0.1")
            for host in ("10.0.0.5:8000", "10.0.0.5", "[fd00::5]:8000"):
                scraped = await http.get(f"{url}/metrics", headers={"host": host})
                assert scraped.status_code == 200, host
                listed = await http.get(f"{url}/decisions", headers={"host": host})
                assert listed.status_code == 403, host
                page = {"host": host, "origin": "https://evil.example"}
                assert (await http.get(f"{url}/metrics", headers=page)).status_code == 403
            for host in ("evil.example", "10.0.0.5.evil.example", "1e4", "0x7f.1"):
                scraped = await http.get(f"{url}/metrics", headers={"host": host})
                assert scraped.status_code == 403, host
