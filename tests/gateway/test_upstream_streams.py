"""Tests of forwarded streams and whole responses: the same bytes and exactly one ending."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from draftgate.gateway.http import stream
from draftgate.gateway.http.replies.rendering import COMMENT
from tests.gateway.harness import client, events, is_idle, port_of, post_raw, running, until
from tests.gateway.upstreams import (
    BEGUN_RESPONSE,
    DONE,
    ENDED_RESPONSE,
    LAST,
    SSE,
    TOKEN,
    USAGE,
    WHOLE,
    Handler,
    after,
    cut_after,
    forwarding,
    held,
    refusal,
    stream_of,
    upstream,
    whole,
)
from tests.upstream_settings import at

STREAM = {"model": "theirs", "prompt": "x", "stream": True}
UPSTREAM_ERROR = b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'
FAILED_RESPONSE = ENDED_RESPONSE.replace(b"completed", b"failed")


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
        (BEGUN_RESPONSE, ENDED_RESPONSE),
        (BEGUN_RESPONSE + ENDED_RESPONSE, DONE),
        (BEGUN_RESPONSE, ENDED_RESPONSE.replace(b"\n", b"\r\n")),
    ],
    ids=[
        "plain",
        "together",
        "torn",
        "crlf",
        "fields",
        "bad-bytes",
        "words",
        "response",
        "response-done",
        "crlf-response",
    ],
)
async def test_stream_passes_unchanged(blocks: tuple[bytes, ...]) -> None:
    """The client receives exactly the upstream's bytes for any division into writes."""
    async with upstream(stream_of(*blocks)) as engine, forwarding(engine) as gateway:
        async with client(gateway) as http:
            response = await http.post("/v1/completions", json=STREAM)
        assert response.status_code == 200
        assert response.content == b"".join(blocks)
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["x-accel-buffering"] == "no"
        assert is_idle(gateway.node)


@pytest.mark.parametrize(
    ("handler", "passed", "reason"),
    [
        (cut_after(TOKEN, TOKEN), TOKEN * 2, "was interrupted"),
        (stream_of(TOKEN, TOKEN), TOKEN * 2, "without [DONE]"),
        (cut_after(TOKEN, LAST[:30]), TOKEN, "was interrupted"),
        (stream_of(TOKEN + LAST[:30]), TOKEN, "without [DONE]"),
        (stream_of(TOKEN, LAST), TOKEN + LAST, "without [DONE]"),
        (stream_of(TOKEN, LAST + DONE.strip()), TOKEN + LAST, "without [DONE]"),
        (stream_of(TOKEN, DONE), TOKEN, "before its choices had finished"),
        (stream_of(TOKEN, b"data: " + b"x" * (5 << 20)), TOKEN, "exceeds"),
        (stream_of(BEGUN_RESPONSE), BEGUN_RESPONSE, "without [DONE]"),
        (stream_of(BEGUN_RESPONSE, DONE), BEGUN_RESPONSE, "before its choices had finished"),
        (stream_of(BEGUN_RESPONSE, ENDED_RESPONSE[:-20]), BEGUN_RESPONSE, "without [DONE]"),
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
        "open-response",
        "open-response-done",
        "half-response",
    ],
)
async def test_cut_stream_ends_with_one_error_event(
    handler: Handler, passed: bytes, reason: str
) -> None:
    """A cut stream ends with one typed error event after its last complete event."""
    async with upstream(handler) as engine, forwarding(engine) as gateway, client(gateway) as http:
        got = (await http.post("/v1/completions", json=STREAM)).content
        assert got.startswith(passed)
        (error,) = events(got[len(passed) :].decode())
        assert error["error"]["code"] == "upstream_failed"
        assert error["error"]["type"] == "server_error"
        assert reason in error["error"]["message"]
        metrics = (await http.get("/metrics")).text
        assert 'outcome="failed"} 1.0' in metrics
        tokens = passed.count(b"data:") - passed.count(b"event: response.created")
        assert f'generation_tokens_total{{model_name="theirs"}} {tokens}.0' in metrics
        assert is_idle(gateway.node)


@pytest.mark.parametrize("end", [DONE, TOKEN + DONE, b""], ids=["done", "more", "closed"])
@pytest.mark.parametrize("error", [UPSTREAM_ERROR, FAILED_RESPONSE], ids=["error", "response"])
async def test_error_event_of_the_upstream_ends_the_stream(error: bytes, end: bytes) -> None:
    """The gateway forwards an error event of the upstream and ends the stream."""
    handler = stream_of(TOKEN, error + end)
    async with upstream(handler) as engine, forwarding(engine) as gateway, client(gateway) as http:
        got = (await http.post("/v1/completions", json=STREAM)).content
        assert got == TOKEN + error
        assert 'outcome="failed"} 1.0' in (await http.get("/metrics")).text


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("sent", [(), (TOKEN,)], ids=["silent", "begun"])
async def test_client_that_leaves_cancels_at_the_upstream(
    sent: tuple[bytes, ...], stream: bool
) -> None:
    """A disconnect of the client cancels the request at the upstream."""
    async with upstream(held(*sent)) as engine, forwarding(engine) as gateway:
        reader, writer = await post_raw(gateway, "/v1/completions", {**STREAM, "stream": stream})
        await engine.arrived.get()
        if sent:
            await reader.readuntil(b"\n\n")
        assert not is_idle(gateway.node)
        writer.close()
        assert await engine.disconnected.get() == "/v1/completions"
        await until(lambda: is_idle(gateway.node))


async def test_prompt_of_a_begun_stream_no_longer_waits() -> None:
    """The tokens of a prompt count as waiting at its upstream until the stream begins, so that a
    long output does not keep other requests from there."""
    begin = asyncio.Event()
    handler = after(begin, held(TOKEN))
    async with upstream(handler) as engine, forwarding(engine) as gateway:
        (worker,) = gateway.node.models[0].dispatcher.fleet.workers
        reader, writer = await post_raw(gateway, "/v1/completions", STREAM)
        await engine.arrived.get()
        assert worker.usage.unstarted_prompt_tokens > 0
        begin.set()
        await reader.readuntil(TOKEN)
        assert worker.usage.unstarted_prompt_tokens == 0
        writer.close()
        await until(lambda: is_idle(gateway.node))


async def test_comments_are_sent_until_the_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway sends comments until the first byte of the upstream's stream."""
    monkeypatch.setattr(stream, "KEEPALIVE_S", 0.005)
    begin = asyncio.Event()
    handler = after(begin, stream_of(TOKEN, LAST, DONE))
    async with upstream(handler) as engine, forwarding(engine) as gateway:
        reader, writer = await post_raw(gateway, "/v1/completions", STREAM)
        await reader.readuntil(COMMENT)
        begin.set()
        rest = await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()
        await until(lambda: is_idle(gateway.node))
    assert rest.index(TOKEN) < rest.index(LAST) < rest.index(DONE)


SPACED = b'{"error": {"message": "two  spaces\\n and a line",\n "code": "x"}}'


@pytest.mark.parametrize(
    ("handler", "expected_error"),
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
async def test_response_other_than_a_stream_after_comments_is_one_error_event(
    handler: Handler, expected_error: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway sends one error event if the upstream does not stream after comments."""
    monkeypatch.setattr(stream, "KEEPALIVE_S", 0.005)
    begin = asyncio.Event()
    async with upstream(after(begin, handler)) as engine, forwarding(engine) as gateway:
        reader, writer = await post_raw(gateway, "/v1/completions", STREAM, "Connection: close\r\n")
        head = await reader.readuntil(COMMENT)
        begin.set()
        rest = await reader.read()
        writer.close()
        await until(lambda: is_idle(gateway.node))
    assert (head + rest).count(b"HTTP/1.1") == 1
    assert rest.endswith(b"\r\n0\r\n\r\n")
    data = [line for line in rest.split(b"\r\n") if line.startswith(b"data: ")]
    (error,) = events(b"".join(data).decode())
    if expected_error is not None:
        assert error["error"] == expected_error
    else:
        known = {"upstream_failed", "upstream_unavailable", "upstream_rejected"}
        assert error["error"]["code"] in known
        assert "<" not in error["error"]["message"]


async def test_broken_response_after_comments_is_one_error_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gateway sends one error event if the upstream sends a part of a JSON document after
    comments."""
    monkeypatch.setattr(stream, "KEEPALIVE_S", 0.005)
    begin = asyncio.Event()

    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b'{"error"')
        assert request.transport is not None
        request.transport.close()
        return response

    async with upstream(after(begin, half)) as engine, forwarding(engine) as gateway:
        reader, writer = await post_raw(gateway, "/v1/completions", STREAM, "Connection: close\r\n")
        await reader.readuntil(COMMENT)
        begin.set()
        rest = await reader.read()
        writer.close()
    assert rest.count(b"HTTP/1.1") == 0
    assert rest.count(b"data: ") == rest.count(b'"code":"upstream_failed"') == 1


async def test_disconnect_during_comments_counts_as_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gateway counts a disconnect during comments as cancelled and not as failed."""
    monkeypatch.setattr(stream, "KEEPALIVE_S", 0.001)
    async with upstream(held()) as engine, forwarding(engine) as gateway, client(gateway) as http:
        reader, writer = await post_raw(gateway, "/v1/completions", STREAM)
        await reader.readuntil(COMMENT)
        assert writer.transport is not None
        writer.transport.abort()
        await until(lambda: is_idle(gateway.node))
        metrics = (await http.get("/metrics")).text
    assert 'outcome="cancelled"} 1.0' in metrics
    assert 'outcome="failed"} 1.0' not in metrics


@pytest.mark.parametrize("handler", [cut_after(TOKEN), held(TOKEN)], ids=["cut", "cancelled"])
async def test_output_that_was_cut_off_does_not_count_as_its_length(handler: Handler) -> None:
    """Admission learns lengths only from outputs that ended by themselves."""
    async with upstream(handler) as engine, forwarding(engine) as gateway:
        outputs = gateway.node.models[0].dispatcher.admission._outputs
        reader, writer = await post_raw(gateway, "/v1/completions", STREAM)
        await reader.readuntil(TOKEN)
        assert writer.transport is not None
        writer.transport.abort()
        await until(lambda: is_idle(gateway.node))
        assert outputs.expected_tokens("", 100) == 100.0
        engine.handler = stream_of(TOKEN, LAST, DONE)
        async with client(gateway) as http:
            await http.post("/v1/completions", json=STREAM)
        assert outputs.expected_tokens("", 100) < 100.0


async def test_forwarded_tokens_reach_the_live_page() -> None:
    """The samples of the live page contain the tokens and the TTFT of forwarded streams."""
    handler = stream_of(TOKEN, TOKEN, LAST, USAGE, DONE)
    async with upstream(handler) as engine, forwarding(engine) as gateway, client(gateway) as http:
        await http.post("/v1/completions", json=STREAM)
        recent = gateway.node.metrics.recent
        assert (recent.tokens, recent.requests) == (4, 1)
        assert recent.ttft_s()
        metrics = (await http.get("/metrics")).text
    assert 'reason="error"' not in metrics


@pytest.mark.long
async def test_slow_reader_slows_the_upstream() -> None:
    """A client that stops reading also stops the upstream's writes, and no byte is lost."""
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

    async with upstream(flood) as engine, forwarding(engine) as gateway:
        reader, writer = await post_raw(gateway, "/v1/completions", STREAM)
        seen, unchanged_checks = -1, 0

        def blocked() -> bool:
            nonlocal seen, unchanged_checks
            unchanged_checks = unchanged_checks + 1 if seen == sent else 0
            seen = sent
            return unchanged_checks == 100

        await until(blocked)
        assert sent < 512  # kernel buffers of two connections and the gateway's buffer
        count, tail = 0, b""
        while not tail.endswith(b"\r\n0\r\n\r\n"):
            got = await reader.read(1 << 20)
            count += got.count(b"z")
            tail = (tail + got)[-200:]
        writer.close()
    assert count == 1024 * (64 << 10)
    assert LAST + DONE in tail


async def test_whole_response_passes_unchanged() -> None:
    """The gateway forwards a whole response unchanged and counts its tokens."""
    async with upstream(whole) as engine, forwarding(engine) as gateway, client(gateway) as http:
        response = await http.post("/v1/chat/completions", json={"messages": []})
        assert (response.status_code, response.content) == (200, WHOLE)
        assert response.headers["content-type"] == "application/json"
        metrics = (await http.get("/metrics")).text
        assert 'draftgate_generation_tokens_total{model_name="theirs"} 2.0' in metrics
        assert 'draftgate_prompt_tokens_total{model_name="theirs"} 5.0' in metrics


async def test_broken_whole_response_is_an_error() -> None:
    """The gateway responds with 502 if the upstream sends a part of a JSON document."""

    async def half(request):
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b'{"id"')
        request.transport.close()
        return response

    async with upstream(half) as engine, forwarding(engine) as gateway, client(gateway) as http:
        reply = await http.post("/v1/completions", json={"prompt": "x"})
        assert reply.status_code == 502
        assert reply.json()["error"]["code"] == "upstream_failed"


async def test_large_whole_response_is_complete() -> None:
    """The gateway forwards a response of 3 MB completely."""
    body = json.dumps({"data": ["y" * 1000] * 3000}).encode()
    async with (
        upstream(refusal(200, body)) as engine,
        forwarding(engine) as gateway,
        client(gateway) as http,
    ):
        assert (await http.post("/v1/embeddings", json={"input": "x"})).content == body


async def test_pages_that_may_read_a_response_are_not_chosen_by_the_upstream() -> None:
    """Headers of an upstream do not let scripts of other origins read a response."""
    allows = refusal(200, b"{}", Access_Control_Allow_Origin="*", x_kept="1")
    async with upstream(allows) as engine, forwarding(engine) as gateway, client(gateway) as http:
        reply = await http.post("/v1/completions", json={"prompt": "x"})
    assert "access-control-allow-origin" not in reply.headers
    assert reply.headers["x-kept"] == "1"


async def test_compressed_response_is_decoded() -> None:
    """The gateway requests no compression and decodes a compressed response."""

    async def compressed(request):
        response = web.StreamResponse(headers=SSE)
        response.enable_compression(web.ContentCoding.gzip)
        await response.prepare(request)
        await response.write(TOKEN + LAST + DONE)
        return response

    async with (
        upstream(compressed) as engine,
        forwarding(engine) as gateway,
        client(gateway) as http,
    ):
        reply = await http.post("/v1/completions", json=STREAM)
        assert engine.requests[0].headers["Accept-Encoding"] == "identity"
        assert "content-encoding" not in reply.headers
        assert reply.content == TOKEN + LAST + DONE


async def test_stopped_node_ends_streams_with_an_error_event() -> None:
    """A stopping gateway ends its open streams with an error event."""
    async with upstream(held(TOKEN)) as engine, forwarding(engine) as gateway:
        close = "Connection: close\r\n"
        reader, writer = await post_raw(gateway, "/v1/completions", STREAM, close)
        await reader.readuntil(TOKEN)
        await gateway.node.fleet.stop()
        rest = await reader.read()
        writer.close()
        assert b'"code":"upstream_failed"' in rest
        assert b"[DONE]" not in rest


async def test_stopped_node_responds_to_waiting_requests() -> None:
    """A stopping gateway responds to waiting requests with an error."""
    async with upstream(held()) as engine, forwarding(engine) as gateway:
        reader, writer = await post_raw(gateway, "/v1/completions", STREAM)
        await engine.arrived.get()
        await gateway.node.fleet.stop()
        head = await reader.readuntil(b"\r\n")
        assert head == b"HTTP/1.1 502 Bad Gateway\r\n"
        writer.close()


@pytest.mark.parametrize("usage", [True, False], ids=["usage", "counted"])
async def test_tokens_follow_from_usage_or_events(usage: bool) -> None:
    """The gateway counts the tokens of the last usage, or each event with output without usage."""
    blocks = (TOKEN, TOKEN, TOKEN, LAST, *([USAGE] if usage else []), DONE)
    async with upstream(stream_of(*blocks)) as engine, forwarding(engine) as gateway:
        async with client(gateway) as http:
            await http.post("/v1/completions", json=STREAM)
            metrics = (await http.get("/metrics")).text
        tokens = "3.0" if usage else "4.0"
        assert f'draftgate_generation_tokens_total{{model_name="theirs"}} {tokens}' in metrics
        cached = "2.0" if usage else "0.0"
        assert f'draftgate_cached_prompt_tokens_total{{model_name="theirs"}} {cached}' in metrics


async def test_connection_is_reused_after_a_complete_stream() -> None:
    """The gateway reuses the connection of a complete stream."""
    ports = []

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        return await stream_of(TOKEN, LAST, DONE)(request)

    async with upstream(handler) as engine, forwarding(engine) as gateway, client(gateway) as http:
        for _ in range(5):
            await http.post("/v1/completions", json=STREAM)
    assert len(ports) == 5
    assert len(set(ports)) == 1


async def test_chain_of_two_nodes_gives_the_same_text() -> None:
    """A chain of two nodes gives the same text and ending as a single node."""
    body = {"prompt": "def f(x):", "max_tokens": 20, "seed": 3, "stream": True}
    async with running() as sim, running(backend="openai", upstream=at(sim.url)) as gateway:
        texts = []
        for node in (sim, gateway):
            async with client(node) as http:
                found = events((await http.post("/v1/completions", json=body)).text)
            assert found[-1] == "[DONE]"
            assert "metrics" in found[-2]
            texts.append("".join(event["choices"][0]["text"] for event in found[:-1]))
        assert texts[0] == texts[1] != ""
        assert port_of(sim) != port_of(gateway)
