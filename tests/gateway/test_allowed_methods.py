"""Tests of the methods that each route announces in `Allow`."""

from __future__ import annotations

import re

from draftgate.gateway.app import Listening
from draftgate.gateway.http.context import NODE
from draftgate.gateway.routes import build_app
from tests.gateway.harness import client

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH")


def paths(gateway: Listening) -> list[str]:
    """Return an example of the path of every route."""
    app = build_app(gateway.node)
    assert app[NODE] is gateway.node
    canonical = {resource.canonical for resource in app.router.resources()}
    return sorted({re.sub(r"\{[^{}]*\}", "x", path) for path in canonical})


async def test_every_route_announces_exactly_its_methods(sim: Listening) -> None:
    """`OPTIONS` of each path, and status 405, list exactly the methods that the path accepts."""
    async with client(sim) as http:
        for path in paths(sim):
            options = await http.request("OPTIONS", path)
            if options.status_code == 404:
                continue  # the connections of other nodes need their headers
            assert options.status_code == 204, path
            allowed = set(options.headers["allow"].split(", "))
            accepted = {"OPTIONS"}
            for method in METHODS:
                async with http.stream(method, path) as response:
                    if response.status_code != 405:
                        accepted.add(method)
                        continue
                    assert set(response.headers["allow"].split(", ")) == allowed, (method, path)
            assert allowed == accepted, path


async def test_the_count_of_input_tokens_is_no_stored_response(sim: Listening) -> None:
    """`/v1/responses/input_tokens` accepts POST alone, with and without a final slash."""
    async with client(sim) as http:
        for path in ("/v1/responses/input_tokens", "/v1/responses/input_tokens/"):
            options = await http.request("OPTIONS", path)
            assert options.headers["allow"] == "OPTIONS, POST"
            for method in ("GET", "DELETE", "HEAD"):
                assert (await http.request(method, path)).status_code == 405
        other = await http.request("OPTIONS", "/v1/responses/input_tokens2")
        assert other.headers["allow"] == "DELETE, GET, HEAD, OPTIONS"
