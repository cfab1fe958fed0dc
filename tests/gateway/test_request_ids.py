"""Tests of `x-request-id`, the id that a response shares with its log lines."""

from __future__ import annotations

import asyncio
import gzip

import httpx
import pytest

from draftgate.gateway.app import Listening
from tests.gateway.harness import port_of, running

CLIENT_ID = "trace-me 42"
HI = [{"role": "user", "content": "hi"}]

REQUESTS = {
    "whole": ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}, 200),
    "stream": ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True}, 200),
    "chat stream": (
        "POST", "/v1/chat/completions", {"messages": HI, "max_tokens": 1, "stream": True}, 200,
    ),
    "bad field": ("POST", "/v1/completions", {"prompt": 5}, 400),
    "no model": ("POST", "/v1/completions", {"model": "other", "prompt": "a"}, 404),
    "no route": ("GET", "/nothing", None, 404),
    "no such method": ("DELETE", "/v1/completions", None, 405),
    "tokenize": ("POST", "/tokenize", {"prompt": "a"}, 200),
    "models": ("GET", "/v1/models", None, 200),
    "metrics": ("GET", "/metrics", None, 200),
}  # fmt: skip


@pytest.mark.parametrize("case", REQUESTS)
async def test_every_response_has_the_clients_id(http: httpx.AsyncClient, case: str) -> None:
    """The server returns the client's id with every whole response, stream and error."""
    method, path, body, status = REQUESTS[case]
    response = await http.request(method, path, json=body, headers={"x-request-id": CLIENT_ID})
    assert (response.status_code, response.headers["x-request-id"]) == (status, CLIENT_ID)


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"no such thing", {"content-encoding": "gzip"}, 400),
        (gzip.compress(b" " * 2000), {"content-encoding": "gzip"}, 413),
        (b" " * 2000, {}, 413),
        (b"{}", {"expect": "tea"}, 417),
    ],
    ids=["no json", "no gzip", "a bomb", "too large", "expectation"],
)
async def test_rejected_requests_have_the_clients_id(
    content: bytes, headers: dict[str, str], status: int
) -> None:
    """The server returns the client's id with requests that it rejects before reading the body."""
    async with running(max_body_bytes=1000) as gateway, httpx.AsyncClient(timeout=60) as http:
        sent = {"x-request-id": CLIENT_ID, **headers}
        url = f"{gateway.url}/v1/completions"
        response = await http.post(url, content=content, headers=sent)
    assert (response.status_code, response.headers["x-request-id"]) == (status, CLIENT_ID)


async def test_malformed_http_is_rejected_and_the_node_continues(
    sim: Listening, http: httpx.AsyncClient
) -> None:
    """The server responds with 400 to malformed HTTP, closes the connection and continues to
    serve."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(sim))
    writer.write(b"no such\x00 protocol\r\n\r\n")
    response = await reader.read()
    writer.close()
    assert response.startswith(b"HTTP/1.")
    assert b" 400 " in response.splitlines()[0]
    assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize("sent", ["", "x" * 129, "caf\u00e9"])
async def test_unprintable_or_long_id_is_replaced(http: httpx.AsyncClient, sent: str) -> None:
    """The server replaces an empty, long or non-ASCII id with a new id."""
    headers = {"x-request-id": sent.encode("latin-1")}
    made = [(await http.get("/health", headers=headers)).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    assert all(new_id.isalnum() and len(new_id) == 24 for new_id in made)
