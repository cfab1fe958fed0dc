"""Tests of connections: errors below the application, announced endings and trailing slashes."""

from __future__ import annotations

import asyncio
import json
import logging

import httpx
import pytest

from draftgate.gateway.app import Listening
from tests.gateway.harness import (
    PATIENCE_S,
    ScriptedBackend,
    client,
    events,
    port_of,
    post_raw,
    running,
    until,
)
from tests.gateway.upstreams import forwarding, upstream, whole

TEXT = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 1}
HOST = b"Host: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST
HEALTH = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
LONG = 33 << 10
BODY_PATHS = (
    TEXT,
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/tokenize",
)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

CHUNKED = b"24\r\n" + b" " * 36 + b"\r\n0\r\n\r\n"
OLD_POST = POST.replace(b"1.1", b"1.0")

NOT_HTTP = {
    "garbage": (b"no such\x00 protocol\r\n\r\n", 400),
    "method": (b"BREW /health HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "http2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "empty host": (b"GET /health HTTP/1.1\r\nHost: \r\n\r\n", 400),
    "host with space": (b"GET /health HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
    "host with path": (b"GET /health HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
    "host with user": (b"GET /health HTTP/1.0\r\nHost: a@b\r\n\r\n", 400),
    "host with bracket": (b"GET /health HTTP/1.1\r\nHost: [\r\n\r\n", 400),
    "host with port name": (b"GET /health HTTP/1.1\r\nHost: a:http\r\n\r\n", 400),
    "no version": (b"GET /health\r\n\r\n", 400),
    "version 0.9": (b"GET /health HTTP/0.9\r\n" + HOST + b"\r\n", 400),
    "version 2.0": (b"GET /health HTTP/2.0\r\n" + HOST + b"\r\n", 400),
    "coding": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKED, 501),
    "unknown coding": (POST + b"Transfer-Encoding: x,chunked\r\n\r\n" + CHUNKED, 501),
    "identity": (POST + b"Transfer-Encoding: identity, chunked\r\n\r\n" + CHUNKED, 501),
    "empty coding": (POST + b"Transfer-Encoding: , chunked\r\n\r\n" + CHUNKED, 501),
    "coding at the end": (POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n" + CHUNKED, 400),
    "chunked twice": (POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n" + CHUNKED, 400),
    "old chunked": (OLD_POST + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED, 400),
    "two lengths": (
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 9\r\n\r\n" + CHUNKED,
        400,
    ),
    "two hosts": (b"GET /health HTTP/1.1\r\n" + HOST + HOST + b"\r\n", 400),
    "many headers": (b"GET /health HTTP/1.1\r\n" + HOST + b"a: b\r\n" * 200 + b"\r\n", 400),
    "length": (POST + b"Content-Length: -3\r\n\r\n", 400),
    "chunk": (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n", 400),
    "long header": (b"GET /health HTTP/1.1\r\n" + HOST + b"a: " + b"x" * LONG + b"\r\n\r\n", 431),
    "long line": (b"GET /" + b"x" * LONG + b" HTTP/1.1\r\n" + HOST + b"\r\n", 431),
}


async def connect(gateway: Listening) -> Streams:
    return await asyncio.open_connection("127.0.0.1", port_of(gateway))


async def read_response(reader: asyncio.StreamReader) -> tuple[int, httpx.Headers, bytes]:
    """Read the next response, whose length is known."""
    async with asyncio.timeout(PATIENCE_S):
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = httpx.Headers([line.split(": ", 1) for line in lines if line])
        body = await reader.readexactly(int(headers["content-length"]))
    return int(first.split()[1]), headers, body


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Return whether the server closes the connection without sending more."""
    async with asyncio.timeout(PATIENCE_S):
        return await reader.read() == b""


@pytest.mark.parametrize("case", NOT_HTTP)
async def test_malformed_http_gets_openais_error(
    sim: Listening, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The response to malformed HTTP is JSON, names no software, and announces the closing of the
    connection. The server logs nothing."""
    sent, expected = NOT_HTTP[case]
    reader, writer = await connect(sim)
    writer.write(sent)
    status, headers, body = await read_response(reader)
    assert await is_closed(reader)
    writer.close()
    error = json.loads(body)["error"]
    assert (status, error["type"]) == (expected, "invalid_request_error")
    assert error["message"]
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert headers["x-request-id"]
    shown = f"{headers} {body.decode()}".lower()
    assert "aiohttp" not in shown
    assert "python" not in shown
    assert "install" not in shown
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("coding", ["chunked", "Chunked", "CHUNKED"])
async def test_chunked_bodies_are_accepted(sim: Listening, coding: str) -> None:
    """The name of the coding has no case."""
    data = json.dumps(BODY).encode()
    reader, writer = await connect(sim)
    writer.write(POST + f"Transfer-Encoding: {coding}\r\n\r\n".encode())
    writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
    assert (await read_response(reader))[0] == 200
    writer.close()


async def test_old_clients_need_no_host(sim: Listening) -> None:
    """HTTP/1.0 does not know the header `Host`."""
    reader, writer = await connect(sim)
    writer.write(b"GET /health HTTP/1.0\r\n\r\n")
    assert (await read_response(reader))[0] == 200
    writer.close()


async def test_failure_below_the_handlers_is_a_bare_500(
    sim: Listening, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response to an exception outside of all handlers is JSON without the exception's text."""

    def explode(_request: object) -> str:
        raise KeyError("secret detail")

    monkeypatch.setattr("draftgate.gateway.routes.request_id_of", explode)
    response = await http.get("/health")
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in response.text
    assert response.headers["connection"] == "close"


async def test_headers_of_32_kib_pass(http: httpx.AsyncClient) -> None:
    """The server accepts a header value and a query of 32 KiB."""
    value = "x" * (32 << 10)
    assert (await http.get("/health", headers={"x-token": value})).status_code == 200
    assert (await http.get(f"/health?token={value}")).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_broken_body_announces_that_the_connection_closes(
    sim: Listening, encoding: str
) -> None:
    """The response to a badly compressed body has `Connection: close`, so that a pooled client
    opens a new connection."""
    reader, writer = await connect(sim)
    head = f"Content-Encoding: {encoding}\r\nContent-Length: 5\r\n\r\n"
    writer.write(POST + head.encode() + b"hello")
    status, headers, body = await read_response(reader)
    assert (status, headers["connection"]) == (400, "close")
    assert "400" not in json.loads(body)["error"]["message"]
    assert await is_closed(reader)
    writer.close()


async def test_body_that_breaks_later_is_400_at_once(sim: Listening) -> None:
    """A request whose body turns out not to be valid HTTP does not wait for the rest."""
    reader, writer = await connect(sim)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head + b"1\r\n{\r\n")
    await until(lambda: sim.node.in_flight > 0)
    writer.write(b"x\r\n")
    status, headers, body = await read_response(reader)
    assert (status, headers["connection"]) == (400, "close")
    assert b"the body cannot be read" in body
    assert await is_closed(reader)
    writer.close()


async def test_body_of_connect_is_no_request(sim: Listening) -> None:
    """The connection closes after `CONNECT`, whose body would be read as another request."""
    reader, writer = await connect(sim)
    inner = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(inner) + inner)
    status, headers, _ = await read_response(reader)
    assert (status, headers["connection"]) == (404, "close")
    assert await is_closed(reader)
    writer.close()


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
async def test_ignored_upgrade_ends_the_connection(sim: Listening, protocol: str) -> None:
    """The connection closes after a request for another protocol, because the parser loses what
    follows in the same packet, and would then read the rest of it as a request."""
    reader, writer = await connect(sim)
    upgrade = f"Connection: Upgrade\r\nUpgrade: {protocol}\r\n"
    head = f"GET /health HTTP/1.1\r\nHost: localhost\r\n{upgrade}\r\nPOST /tokenize HT"
    writer.write(head.encode())
    status, headers, _ = await read_response(reader)
    assert (status, headers["connection"]) == (200, "close")
    assert await is_closed(reader)
    writer.close()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_close_wins_over_keep_alive(sim: Listening, version: str) -> None:
    """The connection closes if any option of `Connection` is `close`."""
    reader, writer = await connect(sim)
    options = "Connection: x, close\r\nConnection: keep-alive\r\n"
    writer.write(f"GET /health HTTP/{version}\r\nHost: localhost\r\n{options}\r\n".encode())
    status, headers, _ = await read_response(reader)
    assert (status, headers["connection"]) == (200, "close")
    assert await is_closed(reader)
    writer.close()


async def test_pooled_client_survives_broken_bodies(sim: Listening) -> None:
    """A client with one pooled connection alternates broken and good requests without errors."""
    limits = httpx.Limits(max_connections=1)
    async with httpx.AsyncClient(
        base_url=sim.url, limits=limits, verify=False, timeout=PATIENCE_S
    ) as http:
        for _ in range(5):
            gzip = {"content-encoding": "gzip"}
            assert (await http.post(TEXT, content=b"hello", headers=gzip)).status_code == 400
            assert (await http.post(TEXT, json=BODY)).status_code == 200


async def test_early_response_to_an_encoded_body_announces_the_closing(
    sim: Listening, caplog: pytest.LogCaptureFixture
) -> None:
    """A response before the end of an encoded body has `Connection: close`, because the rest may
    be broken. A broken rest is not logged."""
    reader, writer = await connect(sim)
    head = b"POST /nowhere HTTP/1.1\r\n" + HOST
    writer.write(head + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\n")
    status, headers, _ = await read_response(reader)
    assert (status, headers["connection"]) == (404, "close")
    writer.write(b"hello")
    assert await is_closed(reader)
    writer.close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_connection_survives_an_early_response_to_a_plain_body(sim: Listening) -> None:
    """A response before the end of a plain body leaves the connection open for the next request."""
    reader, writer = await connect(sim)
    writer.write(b"POST /nowhere HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n\r\n")
    status, headers, _ = await read_response(reader)
    assert status == 404
    assert "connection" not in headers
    writer.write(b"hello" + HEALTH)
    assert (await read_response(reader))[0] == 200
    writer.close()


async def test_too_large_body_announces_the_closing() -> None:
    """The response to a body above the limit has `Connection: close`."""
    async with running(max_body_bytes=1000) as gateway:
        reader, writer = await connect(gateway)
        writer.write(POST + b"Content-Length: 100000\r\n\r\n" + b" " * 2000)
        status, headers, _ = await read_response(reader)
        assert (status, headers["connection"]) == (413, "close")
        writer.close()


async def test_stream_to_an_old_client_ends_with_the_connection(sim: Listening) -> None:
    """A stream over HTTP/1.0 has no length, so the server closes the connection after it."""
    data = json.dumps({**BODY, "stream": True}).encode()
    head = f"POST {TEXT} HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: {len(data)}\r\n\r\n"
    reader, writer = await connect(sim)
    writer.write(head.encode() + data)
    async with asyncio.timeout(PATIENCE_S):
        response = (await reader.read()).decode()
    writer.close()
    assert "\r\nConnection: close\r\n" in response
    assert events(response)[-1] == "[DONE]"


async def test_connection_survives_an_error_event(scripted: ScriptedBackend) -> None:
    """A stream that ends with an error event leaves the connection open for the next request."""
    async with running(backends=[scripted]) as gateway:
        reader, writer = await post_raw(gateway, TEXT, {**BODY, "stream": True})
        scripted.emit(await scripted.submitted.get(), "begun")
        await reader.readuntil(b"begun")
        scripted.crash("device lost")
        assert b"device lost" in await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.write(HEALTH)
        assert (await read_response(reader))[0] == 503
        writer.close()


async def test_slow_headers_are_408() -> None:
    """The server responds with 408 to incomplete headers and closes the connection, although bytes
    still arrive."""
    async with running(keepalive_timeout_s=0.1) as gateway:
        reader, writer = await connect(gateway)
        writer.write(b"GET /health HTTP/1.1\r\n" + HOST + b"a: ")
        response = asyncio.ensure_future(read_response(reader))
        async with asyncio.timeout(PATIENCE_S):
            while not response.done():
                writer.write(b"x")
                await asyncio.wait({response}, timeout=0.01)
        status, headers, body = response.result()
        assert (status, headers["connection"]) == (408, "close")
        assert headers["x-request-id"]
        assert json.loads(body)["error"]["code"] == "request_timeout"
        assert await is_closed(reader)
        writer.close()


async def test_slow_headers_of_a_later_request_are_408() -> None:
    """The time for headers begins again after each response, also after one with a body."""
    async with running(keepalive_timeout_s=0.1) as gateway:
        reader, writer = await post_raw(gateway, TEXT, BODY)
        assert (await read_response(reader))[0] == 200
        writer.write(b"GET /hea")
        assert (await read_response(reader))[0] == 408
        assert await is_closed(reader)
        writer.close()


@pytest.mark.parametrize("used", [False, True])
async def test_idle_connection_is_closed_without_a_response(used: bool) -> None:
    """The server closes a connection without bytes of a request silently, because a client would
    take a response for that to its next request."""
    async with running(keepalive_timeout_s=0.1) as gateway:
        reader, writer = await connect(gateway)
        if used:
            writer.write(HEALTH)
            assert (await read_response(reader))[0] == 200
        assert await is_closed(reader)
        writer.close()


ANSWERS = {
    "malformed": b"garbage\r\n\r\n",
    "expect": b"GET /health HTTP/1.1\r\nExpect: more\r\n" + HOST + b"\r\n",
    "refused": b"GET /nowhere HTTP/1.1\r\n" + HOST + b"\r\n",
    "health": HEALTH,
    "page": b"GET / HTTP/1.1\r\n" + HOST + b"\r\n",
    "metrics": b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\n",
}


@pytest.mark.parametrize("case", ANSWERS)
async def test_no_response_names_the_server(sim: Listening, case: str) -> None:
    """No response has the header `Server`."""
    reader, writer = await connect(sim)
    writer.write(ANSWERS[case])
    _, headers, _ = await read_response(reader)
    assert "server" not in headers
    writer.close()


async def test_streams_and_forwarded_responses_name_no_server(http: httpx.AsyncClient) -> None:
    """Neither streams nor the responses of upstreams have the header `Server`."""
    assert "server" not in (await http.post(TEXT, json={**BODY, "stream": True})).headers
    async with upstream(whole) as engine, forwarding(engine) as gateway, client(gateway) as other:
        assert "server" not in (await other.post(TEXT, json={"prompt": "x"})).headers


async def test_idle_time_does_not_end_a_running_request(scripted: ScriptedBackend) -> None:
    """A response may take longer than the time in which idle connections are closed."""
    async with running(backends=[scripted], keepalive_timeout_s=0.1) as gateway:
        reader, writer = await post_raw(gateway, TEXT, BODY)
        request = await scripted.submitted.get()
        for _ in range(2):
            idle, idle_writer = await connect(gateway)
            assert await is_closed(idle)
            idle_writer.close()
        scripted.emit(request, "late", last=True)
        status, _, body = await read_response(reader)
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, "late")
        writer.close()


async def begin_body(gateway: Listening, path: str) -> Streams:
    """Send the head of a long body and the first byte of the body."""
    reader, writer = await connect(gateway)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
    writer.write(head.encode() + b"{")
    return reader, writer


async def read_timeout(reader: asyncio.StreamReader, path: str) -> None:
    """Read a response with status 408 that announces the end of the connection."""
    status, headers, body = await read_response(reader)
    assert (status, headers["connection"]) == (408, "close")
    error = json.loads(body)["error"]
    assert "the body did not arrive within" in error["message"]
    # Errors of Anthropic's API have no code.
    assert error.get("code") == (None if path == "/v1/messages" else "request_timeout")


@pytest.mark.parametrize("path", BODY_PATHS)
async def test_slow_body_is_408(path: str) -> None:
    """The server responds with 408 if the body does not arrive in time, and closes the
    connection."""
    async with running(body_timeout_s=0.05) as gateway:
        reader, writer = await begin_body(gateway, path)
        await read_timeout(reader, path)
        writer.close()


@pytest.mark.parametrize("path", [TEXT, "/v1/embeddings"])
async def test_slow_body_for_an_upstream_is_408(path: str) -> None:
    """A body for an upstream has the same timeout, and the upstream gets no request."""
    async with upstream(whole) as engine, forwarding(engine, body_timeout_s=0.05) as gateway:
        reader, writer = await begin_body(gateway, path)
        await read_timeout(reader, path)
        writer.close()
        assert engine.requests == []


@pytest.mark.parametrize("path", BODY_PATHS)
async def test_body_that_trickles_is_408(path: str) -> None:
    """The timeout covers the whole body, so a body that arrives byte by byte gets a 408 too."""

    async def trickle(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b" ")
            await asyncio.sleep(0.005)

    async with running(body_timeout_s=0.2) as gateway:
        reader, writer = await begin_body(gateway, path)
        trickling = asyncio.create_task(trickle(writer))
        try:
            await read_timeout(reader, path)
        finally:
            trickling.cancel()
            writer.close()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions/"),
        ("GET", "/v1/models/"),
        ("GET", "/v1/models/scripted/"),
        ("GET", "/health/"),
        ("HEAD", "/health/"),
        ("GET", "/decisions/?limit=3"),
    ],
)
async def test_paths_may_end_with_a_slash(
    scripted: ScriptedBackend, method: str, path: str
) -> None:
    """The server treats a path with a trailing slash like the path without it."""
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        pending = asyncio.create_task(http.request(method, path, json=BODY))
        if method == "POST":
            scripted.emit(await scripted.submitted.get(), "x", last=True)
        assert (await pending).status_code == 200


async def test_open_paths_with_a_slash_need_no_key() -> None:
    """The server serves `/health/` without a key and guards other paths with a slash."""
    async with running(api_keys=("sk-one",)) as gateway, client(gateway) as http:
        assert (await http.get("/health/")).status_code == 200
        assert (await http.get("/v1/models/")).status_code == 401


async def test_upstream_gets_the_path_without_a_slash() -> None:
    """The gateway forwards a path with a trailing slash without the slash."""
    async with upstream(whole) as engine, forwarding(engine) as gateway, client(gateway) as http:
        assert (await http.post(f"{TEXT}/?a=b/", json={"prompt": "x"})).status_code == 200
    assert engine.requests[0].path_qs == f"{TEXT}?a=b/"
