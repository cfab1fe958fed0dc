"""Tests of upstreams that break HTTP, their own API or their word, on real sockets.

The guide lists these behaviours. No request fails that another upstream can serve, and the client
gets exactly one ending.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from typing import Any

import httpx
import pytest

from draftgate.backends.openai import monitor
from draftgate.backends.openai.events import MOST_EVENT_BYTES
from draftgate.backends.openai.upstream import SILENCE_S
from tests.gateway.harness import client, events, until
from tests.gateway.raw_upstreams import byte_upstream
from tests.gateway.upstreams import (
    DONE,
    LAST,
    TOKEN,
    WHOLE,
    Clock,
    forwarding,
    refusal,
    upstream,
    whole,
)

PATH = "/v1/completions"
BODY = {"model": "theirs", "prompt": "x"}
STREAM = {**BODY, "stream": True}
OK = b"HTTP/1.1 200 OK\r\n"
JSON = b"Content-Type: application/json\r\n"
SSE = b"Content-Type: text/event-stream\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


def sized(body: bytes, length: int | None = None, head: bytes = OK + JSON) -> bytes:
    """Return a response with a length, which may be wrong."""
    return b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body) if length is None else length, body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def packed(body: bytes, coding: bytes = b"gzip") -> bytes:
    """Return a response whose compressed body is `body`."""
    return sized(body, head=OK + JSON + b"Content-Encoding: %b\r\n" % coding)


BROKEN = {
    "nothing": b"",
    "half a head": OK + b"Content-Le",
    "no http": b"SSH-2.0-OpenSSH_9.6\r\n",
    "large head": OK + b"X: " + b"x" * (70 << 10),
    "empty": OK + JSON + b"\r\n",
    "empty with a length": sized(b""),
    "short body": sized(WHOLE[:9], len(WHOLE)),
    "bad chunk size": OK + JSON + CHUNKED + chunk(WHOLE[:9]) + b"zz\r\n",
    "missing chunk": OK + JSON + CHUNKED + chunk(WHOLE),
    "missing part of a large body": OK + JSON + CHUNKED + chunk(b" " * (300 << 10)),
    "two lengths": OK + JSON + b"Content-Length: 1\r\n" + sized(WHOLE, head=b""),
    "page": sized(b"<html>Welcome to nginx!</html>", head=OK + b"Content-Type: text/html\r\n"),
    "only hints": b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n",
    "other protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
    "unknown coding": packed(WHOLE, b"zstd"),
    "no gzip": packed(WHOLE),
    "half a gzip": packed(gzip.compress(WHOLE)[:-9]),
    "aborted": sized(b'{"choices": [{"text": "Well", "finish_reason": "abort"}]}'),
}
"""Responses to a request that another upstream can still serve."""


@pytest.mark.parametrize("name", BROKEN)
async def test_request_of_a_broken_upstream_goes_to_another(name: str) -> None:
    """The client gets the response of another upstream, or status 502 in the form of the API if
    there is no other."""
    async with byte_upstream(BROKEN[name]) as bad, upstream(whole) as good:
        async with forwarding(bad, good) as gateway, client(gateway) as http:
            for _ in range(2):
                response = await http.post(PATH, json=BODY)
                assert (response.status_code, response.content) == (200, WHOLE)
        assert bad.begun
        async with forwarding(bad) as gateway, client(gateway) as http:
            response = await http.post(PATH, json=BODY)
            assert response.status_code == 502
            assert response.json()["error"]["code"] == "upstream_failed"
            assert "127.0.0.1" not in response.text


ABORTED = b'data: {"choices":[{"text":"","finish_reason": "abort"}]}\n\n'
BROKEN_STREAMS = {
    "aborted": OK + SSE + CHUNKED + chunk(ABORTED + DONE),
    "no event": OK + SSE + CHUNKED,
    "half an event": OK + SSE + CHUNKED + chunk(TOKEN[:20]),
    "page": BROKEN["page"],
    "half a gzip": OK + SSE + b"Content-Encoding: gzip\r\n" + CHUNKED + chunk(b"\x1f\x8b\x08"),
}


@pytest.mark.parametrize("name", BROKEN_STREAMS)
async def test_stream_without_an_event_goes_to_another_upstream(name: str) -> None:
    """A stream that breaks before its first event has sent nothing to the client."""
    async with (
        byte_upstream(BROKEN_STREAMS[name]) as bad,
        byte_upstream(OK + SSE + CHUNKED + chunk(TOKEN + LAST + DONE) + b"0\r\n\r\n") as good,
        forwarding(bad, good) as gateway,
        client(gateway) as http,
    ):
        response = await http.post(PATH, json=STREAM)
        assert (response.status_code, response.content) == (200, TOKEN + LAST + DONE)
        assert bad.begun


LONG_EVENT = b'data: {"choices":[{"text":"%b"}]}\n\n' % (b"x" * (10 << 20))
BEGUN = OK + SSE + CHUNKED + chunk(TOKEN)
PACKER = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
PACKED_BEGIN = PACKER.compress(TOKEN) + PACKER.flush(zlib.Z_SYNC_FLUSH)
FAILING_STREAMS = {
    "aborted": BEGUN + chunk(ABORTED + DONE) + b"0\r\n\r\n",
    "event cut": BEGUN + chunk(TOKEN[:20]),
    "chunk cut": BEGUN + b"fff\r\n" + TOKEN,
    "bad chunk size": BEGUN + b"xyz\r\n",
    "end without [DONE]": BEGUN + b"0\r\n\r\n",
    "event of 10 MB": BEGUN + chunk(LONG_EVENT) + chunk(LAST + DONE) + b"0\r\n\r\n",
    "endless line": BEGUN + chunk(b":" * (2 * MOST_EVENT_BYTES)) + b"0\r\n\r\n",
    "endless compressed line": OK
    + SSE
    + b"Content-Encoding: gzip\r\n"
    + CHUNKED
    + chunk(PACKED_BEGIN + PACKER.compress(b":" * (64 << 20)) + PACKER.flush())
    + b"0\r\n\r\n",
}


@pytest.mark.parametrize("name", FAILING_STREAMS)
async def test_stream_that_fails_after_its_first_event_has_one_ending(name: str) -> None:
    """The client gets the events before the failure, then one error event and the end."""
    async with (
        byte_upstream(FAILING_STREAMS[name]) as bad,
        forwarding(bad) as gateway,
        client(gateway) as http,
    ):
        response = await http.post(PATH, json=STREAM)
        assert response.status_code == 200
        assert response.content.startswith(TOKEN)
        found = events(response.text)
        assert [number for number, one in enumerate(found) if "error" in one] == [len(found) - 1]
        assert found[-1]["error"]["code"] == "upstream_failed"


TWO_ANSWERS = sized(WHOLE) + sized(b'{"id": "of somebody else"}')
HARMLESS = {
    "hints": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n" + sized(WHOLE), {}),
    "gzip": (packed(gzip.compress(WHOLE)), {}),
    "deflate": (packed(zlib.compress(WHOLE), b"deflate"), {}),
    "closes without saying so": (sized(WHOLE), {"closes": True}),
    "stays open after `close`": (sized(WHOLE, head=OK + JSON + b"Connection: close\r\n"), {}),
    "two responses": (TWO_ANSWERS, {}),
    "bytes after the body": (sized(WHOLE) + b"\r\n\r\nxyz", {}),
    "responds too early": (sized(WHOLE), {"reads_body": False, "closes": True}),
}
"""Responses that clients can use, and how the server treats the connection."""


@pytest.mark.parametrize("name", HARMLESS)
async def test_each_request_gets_its_own_response(name: str) -> None:
    """A client gets what was meant for it, also if earlier responses were longer than they said or
    the server has not read the request."""
    response, fields = HARMLESS[name]
    async with (
        byte_upstream(response, **{"closes": False, **fields}) as odd,
        forwarding(odd) as gateway,
        client(gateway) as http,
    ):
        for number in range(6):
            body = {**BODY, "prompt": "x" * (number % 2 * (1 << 20))}
            got = await http.post(PATH, json=body)
            assert (got.status_code, got.content) == (200, WHOLE)


@pytest.mark.parametrize("begin", [b"", OK + SSE + CHUNKED], ids=["nothing", "head"])
async def test_request_of_a_silent_upstream_goes_to_another(
    begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that accepts connections and sends nothing for 30 s, also not to probes, loses the
    requests that wait for it."""
    clock = Clock()
    async with (
        byte_upstream(begin, closes=False) as silent,
        upstream(whole) as good,
        forwarding(silent, good, clock=clock) as gateway,
        client(gateway) as http,
    ):
        first = gateway.node.fleet.workers[0].backend
        waiting = asyncio.create_task(http.post(PATH, json=BODY))
        await until(lambda: bool(silent.answered))
        silent.mute = True
        monkeypatch.setattr(monitor, "PATIENCE_S", 0.01)
        for seconds in (SILENCE_S - 1.0, 0.5):
            clock.now_s += seconds
            await first.probe()
        assert not waiting.done()
        clock.now_s += SILENCE_S
        await first.probe()
        response = await waiting
        assert (response.status_code, response.content) == (200, WHOLE)


async def test_request_of_a_slow_upstream_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that misses probes but still sends bytes of any response keeps its requests."""
    clock = Clock()
    async with (
        byte_upstream(OK + SSE + CHUNKED + chunk(TOKEN), closes=False) as slow,
        forwarding(slow, clock=clock) as gateway,
        client(gateway) as http,
        http.stream("POST", PATH, json=STREAM) as stream,
    ):
        blocks = stream.aiter_bytes()
        assert await anext(blocks) == TOKEN
        slow.response, slow.mute = b"", True
        waiting = asyncio.create_task(http.post(PATH, json=BODY))
        await until(lambda: len(slow.answered) == 2)
        monkeypatch.setattr(monitor, "PATIENCE_S", 0.01)
        for _ in range(3):
            clock.now_s += SILENCE_S
            slow.answered[0].write(chunk(TOKEN))
            assert await anext(blocks) == TOKEN
            await gateway.node.fleet.workers[0].backend.probe()
            assert not waiting.done()
        waiting.cancel()


@pytest.mark.parametrize(
    "listing",
    [
        b"<html>",
        b"[" * 100_000,
        b"null",
        b'{"data": {"id": "theirs"}}',
        b'{"data": []}',
        b'{"data": [{"id": 7}, "theirs", null, {}]}',
        b'{"data": [{"id": "theirs"' + b" " * (5 << 20) + b"}]}",
        b'{"object": "list", "data": [{"id": "theirs", "max_model_len": -1e400}]}',
    ],
    ids=["html", "deep", "null", "object", "empty", "types", "huge", "number"],
)
async def test_unusable_list_of_models_leaves_the_last_one(listing: bytes) -> None:
    """A healthy server keeps its models and its requests while its list cannot be used."""
    async with upstream(whole) as engine, forwarding(engine) as gateway, client(gateway) as http:
        engine.listing = listing
        for _ in range(4):
            await gateway.node.fleet.workers[0].backend.probe()
        assert (await http.post(PATH, json=BODY)).status_code == 200
        assert [one["id"] for one in (await http.get("/v1/models")).json()["data"]] == ["theirs"]
        engine.listing = json.dumps({"data": [{"id": "new"}]}).encode()
        await gateway.node.fleet.workers[0].backend.probe()
        assert (await http.post(PATH, json={**BODY, "model": "new"})).status_code == 200


async def test_long_list_of_models_is_parsed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of a megabyte does not hold the event loop."""
    import threading

    threads: list[tuple[int, int]] = []

    def watched(page: bytes) -> Any:
        threads.append((len(page), threading.get_ident()))
        return json.JSONDecoder().decode(page.decode())

    monkeypatch.setattr(monitor.json, "loads", watched)
    async with upstream(whole) as engine:
        engine.listing = json.dumps({"data": [{"id": f"m{n:05}"} for n in range(60_000)]}).encode()
        async with forwarding(engine) as gateway, client(gateway) as http:
            assert (await http.post(PATH, json={**BODY, "model": "m59999"})).status_code == 200
    ((size, thread),) = threads
    assert size > 1 << 20
    assert thread != threading.get_ident()


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/props"])
async def test_slow_page_costs_no_request(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that does not arrive in time says nothing about the server, which gets requests."""
    monkeypatch.setattr(monitor, "PATIENCE_S", 0.05)
    async with upstream(whole) as engine, forwarding(engine) as gateway, client(gateway) as http:
        backend = gateway.node.fleet.workers[0].backend
        engine.silent.add(path)
        for _ in range(4):
            await backend.probe()
            await backend.poll()
        assert backend.failure is None
        assert (await http.post(PATH, json=BODY)).status_code == 200


@pytest.mark.parametrize("status", [401, 407])
async def test_upstream_that_denies_access_is_paused(status: int) -> None:
    """An upstream that denies access gets no requests for 1 s, then 2 s and so on, whatever its
    probes say, and `/ready` says why. After an accepted request, it is as trusted as before."""
    clock = Clock()
    async with (
        upstream(refusal(status)) as a,
        upstream(whole) as b,
        forwarding(a, b, clock=clock) as gateway,
        client(gateway) as http,
    ):
        first = gateway.node.fleet.workers[0].backend
        for pause_s in (1.0, 2.0, 4.0):
            before = len(a.requests)
            for _ in range(4):
                assert (await http.post(PATH, json=BODY)).status_code == 200
            await first.probe()
            assert len(a.requests) == before + 1
            (paused,) = (await http.get("/ready")).json()["workers"]
            assert paused["status"] == "paused"
            assert f"denied this gateway access with status {status}" in paused["reason"]
            assert f"{pause_s} s" in paused["reason"]
            clock.now_s += pause_s
        a.handler = whole
        await asyncio.gather(*(http.post(PATH, json=BODY) for _ in range(2)))
        a.handler = refusal(status)
        await asyncio.gather(*(http.post(PATH, json=BODY) for _ in range(2)))
        (paused,) = (await http.get("/ready")).json()["workers"]
        assert "1.0 s" in paused["reason"]


async def test_denied_access_everywhere_is_one_kind_of_error() -> None:
    """During the pause as before it, the client gets status 502 with advice for the operator."""
    async with (
        upstream(refusal(401)) as engine,
        forwarding(engine, clock=Clock()) as gateway,
        client(gateway) as http,
    ):
        found: list[httpx.Response] = [await http.post(PATH, json=BODY) for _ in range(3)]
        assert len(engine.requests) == 1
        assert (await http.get("/ready")).status_code == 503
    assert {one.status_code for one in found} == {502}
    assert len({one.json()["error"]["message"] for one in found}) == 1


async def test_one_forbidden_request_does_not_pause_an_upstream() -> None:
    """A single 403 may concern one request, and two in a row pause the upstream."""
    async with (
        upstream(refusal(403)) as engine,
        forwarding(engine, clock=Clock()) as gateway,
        client(gateway) as http,
    ):
        assert (await http.post(PATH, json=BODY)).status_code == 502
        assert (await http.get("/ready")).status_code == 200
        assert (await http.post(PATH, json=BODY)).status_code == 502
        assert (await http.get("/ready")).status_code == 503
        assert len(engine.requests) == 2
