"""An upstream that redirects cannot make the gateway or its clients send requests elsewhere."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from tests.gateway.harness import client
from tests.gateway.test_upstream_errors import BODY, PATHS
from tests.gateway.upstreams import Handler, ScriptedUpstream, forwarding, upstream


def redirecting_to(target: ScriptedUpstream, status: int) -> Handler:
    """Return a handler that sends every request to another server."""

    async def handler(request: web.Request) -> web.StreamResponse:
        headers = {"Location": target.url + request.path, "Refresh": f"0; url={target.url}"}
        return web.Response(status=status, headers=headers, text="moved")

    return handler


@pytest.mark.parametrize("path", PATHS)
async def test_redirect_of_an_upstream_is_an_error(path: str) -> None:
    """No request reaches the target, and the client gets an error without its address."""
    async with upstream() as target, upstream() as engine:
        async with forwarding(engine) as gateway, client(gateway) as http:
            for status in (300, 301, 302, 303, 304, 305, 307, 308):
                engine.handler = redirecting_to(target, status)
                for streamed in (False, True):
                    response = await http.post(path, json={**BODY, "stream": streamed})
                    assert response.status_code == 502, status
                    assert json.loads(response.content)["error"]["message"]
                    assert target.url not in f"{response.headers} {response.text}"
        assert target.requests == []
