"""Tests of the roles of API keys: what tenants, operators and scrapers see."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from draftgate.gateway.app import Listening, StartError, build_node
from draftgate.gateway.config import ServeConfig
from tests.gateway.harness import client, events, running
from tests.gateway.upstreams import upstream, whole
from tests.upstream_settings import at

PATH = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
KEYS = """
keys:
  - {name: one, key: sk-one}
  - {name: two-secret, key: sk-two}
  - {name: boss, key: sk-boss, role: operator}
  - {name: prometheus, key: sk-scrape, role: metrics}
"""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    """A file with two tenants, an operator and a scraper."""
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    return str(path)


async def generated(http: httpx.AsyncClient, key: str) -> str:
    """Generate a text, and return the id of the request."""
    response = await http.post(PATH, json=BODY, headers=bearer(key))
    assert response.status_code == 200
    return str(response.json()["id"]).removeprefix("cmpl-")


async def decided(http: httpx.AsyncClient, key: str) -> list[str]:
    """Return the ids of the requests whose decisions a key can read."""
    response = await http.get("/decisions?limit=100", headers=bearer(key))
    return [one["request_id"] for one in response.json()["decisions"]]


async def live_text(gateway: Listening, http: httpx.AsyncClient, key: str) -> str:
    """Return the text of all samples."""
    gateway.node.live.take()
    gateway.node.live.take()
    async with http.stream("GET", "/live", headers=bearer(key)) as response:
        async for part in response.aiter_text():
            if events(part):
                return part
    raise AssertionError("no sample")


async def test_tenants_see_only_their_own_decisions(keys_file: str) -> None:
    """A tenant reads its own decisions, and an operator reads all of them, newest first."""
    async with running(api_keys_file=keys_file) as gateway, client(gateway) as http:
        first = await generated(http, "sk-one")
        second = await generated(http, "sk-two")
        third = await generated(http, "sk-one")
        assert await decided(http, "sk-one") == [third, first]
        assert await decided(http, "sk-two") == [second]
        assert await decided(http, "sk-boss") == [third, second, first]
        latest = await http.get("/decisions?limit=1", headers=bearer("sk-two"))
        assert [one["request_id"] for one in latest.json()["decisions"]] == [second]


async def test_no_endpoint_shows_a_tenant_the_others(keys_file: str) -> None:
    """Nothing that a tenant can read has the name or a request of another tenant."""
    async with running(api_keys_file=keys_file) as gateway, client(gateway) as http:
        secret = await generated(http, "sk-two")
        operators = ("/decisions", "/workers", "/health", "/ready", "/version")
        paths = (*operators, "/v1/models", "/", "/openapi.json")
        pages = [(await http.get(path, headers=bearer("sk-one"))).text for path in paths]
        pages.append((await http.get("/metrics", headers=bearer("sk-one"))).text)
        pages.append(await live_text(gateway, http, "sk-one"))
        for page in pages:
            assert "two-secret" not in page
            assert secret not in page


@pytest.mark.parametrize("path", ["/metrics", "/metrics/"])
async def test_only_operators_and_scrapers_read_metrics(keys_file: str, path: str) -> None:
    """The node refuses its metrics to tenants, because they name all tenants."""
    async with running(api_keys_file=keys_file) as gateway, client(gateway) as http:
        await generated(http, "sk-two")
        refused = await http.get(path, headers=bearer("sk-one"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        for key in ("sk-boss", "sk-scrape"):
            page = await http.get(path, headers=bearer(key))
            assert page.status_code == 200
            assert 'tenant="two-secret"' in page.text


@pytest.mark.parametrize(
    "path",
    [
        PATH, "/decisions", "/records", "/usage", "/usage/history", "/keys", "/audit", "/workers",
        "/live", "/v1/models", "/nowhere",
    ],
)  # fmt: skip
async def test_a_scraper_reads_nothing_but_metrics(keys_file: str, path: str) -> None:
    """A key with the role `metrics` can neither generate text nor read anything else."""
    async with running(api_keys_file=keys_file) as gateway, client(gateway) as http:
        method = "POST" if path == PATH else "GET"
        refused = await http.request(method, path, json=BODY, headers=bearer("sk-scrape"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")


async def test_keys_for_metrics_come_from_a_setting() -> None:
    """The keys in `--metrics-keys` can only read the metrics, and the other keys cannot."""
    settings = {"api_keys": ("sk-one",), "metrics_keys": ("sk-scrape",)}
    async with running(**settings) as gateway, client(gateway) as http:
        assert (await http.get("/metrics", headers=bearer("sk-scrape"))).status_code == 200
        assert (await http.get("/metrics", headers=bearer("sk-one"))).status_code == 403
        assert (await http.get("/v1/models", headers=bearer("sk-scrape"))).status_code == 403
        assert (await http.get("/metrics")).status_code == 401


async def test_a_node_without_keys_shows_everything(http: httpx.AsyncClient) -> None:
    """A node without keys shows all decisions and its metrics to every client."""
    response = await http.post(PATH, json=BODY)
    found = (await http.get("/decisions")).json()["decisions"]
    assert [one["request_id"] for one in found] == [response.json()["id"].removeprefix("cmpl-")]
    assert (await http.get("/metrics")).status_code == 200


def test_keys_for_metrics_alone_stop_the_start() -> None:
    """A node with keys for metrics only would serve no client, so the start fails."""
    with pytest.raises(StartError, match="need an API key for clients"):
        build_node(ServeConfig(backend="sim", metrics_keys=("sk-scrape",)))


async def test_decisions_about_upstreams_belong_to_their_tenant(keys_file: str) -> None:
    """A tenant does not see the decisions about another tenant's requests to upstreams."""
    async with upstream(whole) as one, upstream(whole) as two:
        settings = {
            "backend": "openai",
            "api_keys_file": keys_file,
            "upstream": at(one.url, two.url),
            "upstream_speculates": (one.url,),
        }
        async with running(**settings) as gateway, client(gateway) as http:
            response = await http.post(PATH, json=BODY, headers=bearer("sk-two"))
            assert response.status_code == 200
            assert len(await decided(http, "sk-boss")) == len(await decided(http, "sk-two")) == 1
            assert await decided(http, "sk-one") == []
