"""Streams and whole answers of upstreams: the same bytes, and exactly one ending."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from draftgate.gateway.http import stream
from draftgate.gateway.http.stream import COMMENT
from tests.gateway.harness import client, events, is_idle, port_of, post_raw, running, until
from tests.gateway.upstreams import (
    DONE,
    LAST,
    SSE,
    TOKEN,
    USAGE,
    WHOLE,
    Answering,
    after,
    cut_after,
    held,
    in_front,
    refusal,
    stream_of,
    upstream,
    whole,
)

STREAM = {"model": "theirs", "prompt": "x", "stream": True}
OWN_ERROR = b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'


@pytest.mark.parametrize(
    "blocks",
    [
        (TOKEN, TOKEN, LAST, DONE),
        (TOKEN + LAST, USAGE + DONE),
        (TOKEN[:9], TOKEN[9:] + LAST[:40], LAST[40:] + DONE[:5], DONE[5:]),
        (TOKEN.replace(b"\n", b"\r\n"), LAST.replace(b"\n", b"\r\n"), DONE.replace(b"\n", b"\r\n")),
        (b": hello\n\n", b"id: 7\nevent: x\n" + TOKEN, LAST, DONE),
        (b'data: {"text": "\xff\xfe\x00"}\n\n', LAST, DONE),
        (b'data: {"text": "[DONE]", "x": "error"}\n\n', LAST, DONE),
    ],
    ids=["plain", "together", "torn", "crlf", "fields", "bad-bytes", "words"],
)
async def test_stream_passes_unchanged(blocks: tuple[bytes, ...]) -> None:
    """The client gets exactly the upstream's bytes, whatever pieces they arrive in."""
    async with upstream(stream_of(*blocks)) as there, in_front(there) as where:
        async with client(where) as http:
            answer = await http.post("/v1/completions", json=STREAM)
        assert answer.status_code == 200
        assert answer.content == b"".join(blocks)
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["x-accel-buffering"] == "no"
        assert is_idle(where.node)


@pytest.mark.parametrize(
    ("answer", "passed", "reason"),
    [
        (cut_after(TOKEN, TOKEN), TOKEN * 2, "broke off"),
        (stream_of(TOKEN, TOKEN), TOKEN * 2, "without [DONE]"),
        (cut_after(TOKEN, LAST[:30]), TOKEN, "broke off"),
        (stream_of(TOKEN + LAST[:30]), TOKEN, "without [DONE]"),
        (stream_of(TOKEN, LAST), TOKEN + LAST, "without [DONE]"),
        (stream_of(TOKEN, LAST + DONE.strip()), TOKEN + LAST, "without [DONE]"),
        (stream_of(TOKEN, DONE), TOKEN, "before any choice had finished"),
        (stream_of(TOKEN, b"data: " + b"x" * (5 << 20)), TOKEN, "exceeds"),
    ],
    ids=[
        "cut",
        "closed",
        "half-cut",
        "half-closed",
        "no-done",
        "half-done",
        "no-reason",
        "endless",
    ],
)
async def test_cut_stream_ends_with_one_error_event(
    answer: Answering, passed: bytes, reason: str
) -> None:
    """After the last complete event there is one typed error, no partial event and no [DONE]."""
    async with upstream(answer) as there, in_front(there) as where, client(where) as http:
        got = (await http.post("/v1/completions", json=STREAM)).content
        assert got.startswith(passed)
        (error,) = events(got[len(passed) :].decode())
        assert error["error"]["code"] == "upstream_failed"
        assert error["error"]["type"] == "server_error"
        assert reason in error["error"]["message"]
        metrics = (await http.get("/metrics")).text
        assert 'outcome="failed"' in metrics
        tokens = passed.count(b"data:")
        assert f'generation_tokens_total{{model_name="theirs"}} {tokens}.0' in metrics
        assert is_idle(where.node)


@pytest.mark.parametrize("end", [DONE, TOKEN + DONE, b""], ids=["done", "more", "closed"])
async def test_error_event_of_the_upstream_ends_the_stream(end: bytes) -> None:
    """It passes unchanged; no error of ours and nothing else follows it."""
    answer = stream_of(TOKEN, OWN_ERROR + end)
    async with upstream(answer) as there, in_front(there) as where, client(where) as http:
        got = (await http.post("/v1/completions", json=STREAM)).content
        assert got == TOKEN + OWN_ERROR
        assert 'outcome="failed"' in (await http.get("/metrics")).text


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("sent", [(), (TOKEN,)], ids=["silent", "begun"])
async def test_client_that_leaves_cancels_at_the_upstream(
    sent: tuple[bytes, ...], stream: bool
) -> None:
    """This holds for streams and whole answers, before and after the first byte."""
    async with upstream(held(*sent)) as there, in_front(there) as where:
        reader, writer = await post_raw(where, "/v1/completions", {**STREAM, "stream": stream})
        await there.came.get()
        if sent:
            await reader.readuntil(b"\n\n")
        assert not is_idle(where.node)
        writer.close()
        assert await there.left.get() == "/v1/completions"
        await until(lambda: is_idle(where.node))


async def test_comments_are_sent_until_the_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the stream follows unchanged."""
    monkeypatch.setattr(stream, "KEEPALIVE_S", 0.005)
    begin = asyncio.Event()
    answer = after(begin, stream_of(TOKEN, LAST, DONE))
    async with upstream(answer) as there, in_front(there) as where:
        reader, writer = await post_raw(where, "/v1/completions", STREAM)
        await reader.readuntil(COMMENT)
        begin.set()
        rest = await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()
        await until(lambda: is_idle(where.node))
    assert rest.index(TOKEN) < rest.index(LAST) < rest.index(DONE)


SPACED = b'{"error": {"message": "two  spaces\\n and a line",\n "code": "x"}}'


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (refusal(400, SPACED), {"message": "two  spaces\n and a line", "code": "x"}),
        (refusal(200, SPACED), {"message": "two  spaces\n and a line", "code": "x"}),
        (refusal(400, b"<html>\n<p>bad</p>"), None),
        (refusal(200, WHOLE), None),
        (refusal(200, b"[" * 100_000), None),
        (cut_after(), None),
        (refusal(500, b"out of memory"), None),
        (refusal(503, b""), None),
    ],
    ids=["error", "error-200", "html", "no-stream", "deep", "cut", "500", "503"],
)
async def test_answer_in_place_of_a_begun_stream_is_one_error_event(
    answer: Answering, told: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a comment an upstream's error passes as an event; any other answer is described."""
    monkeypatch.setattr(stream, "KEEPALIVE_S", 0.005)
    begin = asyncio.Event()
    async with upstream(after(begin, answer)) as there, in_front(there) as where:
        reader, writer = await post_raw(where, "/v1/completions", STREAM, "Connection: close\r\n")
        head = await reader.readuntil(COMMENT)
        begin.set()
        rest = await reader.read()
        writer.close()
        await until(lambda: is_idle(where.node))
    assert (head + rest).count(b"HTTP/1.1") == 1
    assert rest.endswith(b"\r\n0\r\n\r\n")
    data = [line for line in rest.split(b"\r\n") if line.startswith(b"data: ")]
    (error,) = events(b"".join(data).decode())
    if told is not None:
        assert error["error"] == told
    else:
        assert error["error"]["code"] in {"upstream_failed", "upstream_unavailable"}
        assert "<" not in error["error"]["message"]


async def test_broken_answer_in_place_of_a_begun_stream_is_one_error_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part of a JSON document does not reach the client."""
    monkeypatch.setattr(stream, "KEEPALIVE_S", 0.005)
    begin = asyncio.Event()

    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b'{"error"')
        assert request.transport is not None
        request.transport.close()
        return response

    async with upstream(after(begin, half)) as there, in_front(there) as where:
        reader, writer = await post_raw(where, "/v1/completions", STREAM, "Connection: close\r\n")
        await reader.readuntil(COMMENT)
        begin.set()
        rest = await reader.read()
        writer.close()
    assert rest.count(b"HTTP/1.1") == 0
    assert rest.count(b"data: ") == rest.count(b'"code":"upstream_failed"') == 1


async def test_client_that_leaves_during_comments_is_a_cancel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It counts as cancelled and not as failed, and nothing is kept."""
    monkeypatch.setattr(stream, "KEEPALIVE_S", 0.001)
    async with upstream(held()) as there, in_front(there) as where, client(where) as http:
        reader, writer = await post_raw(where, "/v1/completions", STREAM)
        await reader.readuntil(COMMENT)
        assert writer.transport is not None
        writer.transport.abort()
        await until(lambda: is_idle(where.node))
        metrics = (await http.get("/metrics")).text
    assert 'outcome="cancelled"' in metrics
    assert 'outcome="failed"' not in metrics


async def test_forwarded_tokens_reach_the_live_page() -> None:
    """The samples contain the tokens, the time to first token and the end."""
    answer = stream_of(TOKEN, TOKEN, LAST, USAGE, DONE)
    async with upstream(answer) as there, in_front(there) as where, client(where) as http:
        await http.post("/v1/completions", json=STREAM)
        recent = where.node.metrics.recent
        assert (recent.tokens, recent.requests) == (4, 1)
        assert recent.ttft_s() is not None
        metrics = (await http.get("/metrics")).text
    assert 'reason="error"' not in metrics


@pytest.mark.long
async def test_slow_reader_slows_the_upstream() -> None:
    """A client that does not read stops the upstream's writing, and no byte is lost."""
    block = b'data: {"text": "' + b"z" * (64 << 10) + b'"}\n\n'
    sent = 0

    async def flood(request):
        nonlocal sent
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        for _ in range(1024):
            await response.write(block)
            sent += 1
        await response.write(LAST + DONE)
        return response

    async with upstream(flood) as there, in_front(there) as where:
        reader, writer = await post_raw(where, "/v1/completions", STREAM)
        seen, still = -1, 0

        def blocked() -> bool:
            nonlocal seen, still
            still = still + 1 if seen == sent else 0
            seen = sent
            return still == 100

        await until(blocked)
        assert sent < 512  # kernel buffers of two connections, and ours
        count, tail = 0, b""
        while not tail.endswith(b"\r\n0\r\n\r\n"):
            got = await reader.read(1 << 20)
            count += got.count(b"z")
            tail = (tail + got)[-200:]
        writer.close()
    assert count == 1024 * (64 << 10)
    assert LAST + DONE in tail


async def test_whole_answer_passes_unchanged() -> None:
    """Status, type and bytes are the upstream's, and tokens are counted."""
    async with upstream(whole) as there, in_front(there) as where, client(where) as http:
        answer = await http.post("/v1/chat/completions", json={"messages": []})
        assert (answer.status_code, answer.content) == (200, WHOLE)
        assert answer.headers["content-type"] == "application/json"
        metrics = (await http.get("/metrics")).text
        assert 'draftgate_generation_tokens_total{model_name="theirs"} 2.0' in metrics
        assert 'draftgate_prompt_tokens_total{model_name="theirs"} 5.0' in metrics


async def test_broken_whole_answer_is_an_error() -> None:
    """A part of a JSON document does not reach the client."""

    async def half(request):
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b'{"id"')
        request.transport.close()
        return response

    async with upstream(half) as there, in_front(there) as where, client(where) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "upstream_failed"


async def test_large_whole_answer_is_not_buffered() -> None:
    """An answer of 3 MB passes as it arrives, and is complete."""
    body = json.dumps({"data": ["y" * 1000] * 3000}).encode()
    async with (
        upstream(refusal(200, body)) as there,
        in_front(there) as where,
        client(where) as http,
    ):
        assert (await http.post("/v1/embeddings", json={"input": "x"})).content == body


async def test_compressed_answer_is_decoded() -> None:
    """We request no compression, and decode the answer of an upstream that compresses anyway."""

    async def zipped(request):
        response = web.StreamResponse(headers=SSE)
        response.enable_compression(web.ContentCoding.gzip)
        await response.prepare(request)
        await response.write(TOKEN + LAST + DONE)
        return response

    async with upstream(zipped) as there, in_front(there) as where, client(where) as http:
        answer = await http.post("/v1/completions", json=STREAM)
        assert there.requests[0].headers["Accept-Encoding"] == "identity"
        assert "content-encoding" not in answer.headers
        assert answer.content == TOKEN + LAST + DONE


async def test_stopped_node_ends_streams_with_an_error_event() -> None:
    """Connections that we close are treated like any other failure."""
    async with upstream(held(TOKEN)) as there, in_front(there) as where:
        reader, writer = await post_raw(where, "/v1/completions", STREAM)
        await reader.readuntil(TOKEN)
        await where.node.fleet.stop()
        rest = await reader.read()
        writer.close()
        assert b'"code":"upstream_failed"' in rest
        assert b"[DONE]" not in rest


async def test_stopped_node_answers_waiting_requests() -> None:
    """A request without an answer so far gets an error and no lost connection."""
    async with upstream(held()) as there, in_front(there) as where:
        reader, writer = await post_raw(where, "/v1/completions", STREAM)
        await there.came.get()
        await where.node.fleet.stop()
        head = await reader.readuntil(b"\r\n")
        assert head == b"HTTP/1.1 502 Bad Gateway\r\n"
        writer.close()


@pytest.mark.parametrize("usage", [True, False], ids=["usage", "counted"])
async def test_tokens_follow_from_usage_or_events(usage: bool) -> None:
    """The last `usage` counts; without one each event with output is a token."""
    blocks = (TOKEN, TOKEN, TOKEN, LAST, *([USAGE] if usage else []), DONE)
    async with upstream(stream_of(*blocks)) as there, in_front(there) as where:
        async with client(where) as http:
            await http.post("/v1/completions", json=STREAM)
            metrics = (await http.get("/metrics")).text
        tokens = "3.0" if usage else "4.0"
        assert f'draftgate_generation_tokens_total{{model_name="theirs"}} {tokens}' in metrics
        cached = "2.0" if usage else "0.0"
        assert f'draftgate_cached_prompt_tokens_total{{model_name="theirs"}} {cached}' in metrics


@pytest.mark.parametrize("owner", ["vllm", "llamacpp"])
async def test_connection_is_reused_after_a_complete_stream(owner: str) -> None:
    """A server that closes its connections gets a new one for each request."""
    ports = []

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        return await stream_of(TOKEN, LAST, DONE)(request)

    async with upstream(answer) as there:
        there.owner = owner
        async with in_front(there) as where, client(where) as http:
            for _ in range(5):
                await http.post("/v1/completions", json=STREAM)
    assert len(ports) == 5
    assert len(set(ports)) == (5 if owner == "llamacpp" else 1)


async def test_two_nodes_in_a_row_give_the_answer_of_one() -> None:
    """Text, metrics and ending are the same, apart from ids and times."""
    body = {"prompt": "def f(x):", "max_tokens": 20, "seed": 3, "stream": True}
    async with running() as sim, running(backend="openai", upstream=(sim.url,)) as where:
        texts = []
        for node in (sim, where):
            async with client(node) as http:
                found = events((await http.post("/v1/completions", json=body)).text)
            assert found[-1] == "[DONE]"
            assert "metrics" in found[-2]
            texts.append("".join(one["choices"][0]["text"] for one in found[:-1]))
        assert texts[0] == texts[1] != ""
        assert port_of(sim) != port_of(where)
