"""Endpoints for operators, which refuse parameters of the query that they do not know."""

from __future__ import annotations

from typing import Any

import pytest

from draftgate.gateway.http.openapi.operations import OPERATIONS
from tests.gateway.harness import client, running
from tests.gateway.test_budgets import KEYS, bearer

READ = {
    one.path: one
    for one in OPERATIONS
    if one.method == "GET" and not one.open and one.path.partition("/")[2][:3] != "v1/"
}
"""The endpoints for operators that return JSON or events, by their paths."""

OPEN = {"/metrics", "/openapi.json"}
"""Endpoints of tools, which may add parameters of their own."""


@pytest.mark.parametrize("path", sorted(READ.keys() - OPEN))
async def test_unknown_parameters_are_named(path: str, tmp_path: Any) -> None:
    """The error names the parameter, and the ones that the endpoint knows."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    url = path.replace("{name}", "a").replace("{request_id}", "r")
    known = [one["name"] for one in READ[path].parameters if one["in"] == "query"]
    async with running(api_keys_file=str(keys)) as gateway, client(gateway) as http:
        http.headers.update(bearer("sk-root"))
        response = await http.get(url, params={"models": "x"})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "models")
        assert error["message"].startswith(f"models: is not a parameter of {url}; ")
        hint = "did you mean 'model'?" if "model" in known else ", ".join(known) or "it has none"
        assert hint in error["message"]


async def test_page_of_an_unknown_request_has_status_404(tmp_path: Any) -> None:
    """Browsers get the page, whose script says what is wrong, and others see the status. A client
    without a key does not learn which requests exist."""
    async with running() as gateway, client(gateway) as http:
        sent = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        found = await http.get(f"/requests/{sent.headers['x-request-id']}")
        assert found.status_code == 200
        tag = {"if-none-match": found.headers["etag"]}
        missing = await http.get("/requests/doesnotexist", headers=tag)
        assert (missing.status_code, missing.text) == (404, found.text)
        assert missing.headers["content-type"] == found.headers["content-type"]
        assert (await http.get("/requests")).status_code == 200
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    async with running(api_keys_file=str(keys)) as gateway, client(gateway) as http:
        assert (await http.get("/requests/doesnotexist")).status_code == 200
