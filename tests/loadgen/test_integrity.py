"""Verdicts on streams, against a small server that misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from loadgen.audit import StreamAudit, Verdict
from loadgen.client import Question, ask, first_model

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
METRICS = {"seed": 1, "speculative_decoding": {"num_drafted_tokens": 4, "num_accepted_tokens": 3}}


def chunk(text: str = "", reason: str | None = None, index: int = 0, **more: object) -> str:
    return json.dumps(
        {"choices": [{"index": index, "text": text, "finish_reason": reason}], **more}
    )


def chat_chunk(delta: dict, reason: str | None = None) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


USAGE_CHUNK = json.dumps({"choices": [], "usage": USAGE, "metrics": METRICS})
GOOD = [chunk("a"), chunk("b", "length"), USAGE_CHUNK, "[DONE]"]
STREAMS = {
    Verdict.OK: GOOD,
    Verdict.NO_DONE: GOOD[:-1],
    Verdict.NO_USAGE: [*GOOD[:2], "[DONE]"],
    Verdict.NO_FINISH_REASON: [chunk("a"), USAGE_CHUNK, "[DONE]"],
    Verdict.AFTER_FINISH: [chunk("a", "stop"), chunk("b"), USAGE_CHUNK, "[DONE]"],
    Verdict.AFTER_DONE: [*GOOD, chunk("c")],
    Verdict.ERROR_EVENT: [chunk("a"), json.dumps({"error": {"message": "the worker failed"}})],
    Verdict.MALFORMED: [chunk("a"), "{", *GOOD[1:]],
}


def application(handler) -> web.Application:
    async def models(request):
        return web.json_response({"data": [{"id": "tiny"}]})

    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    app.router.add_post("/v1/chat/completions", handler)
    app.router.add_get("/v1/models", models)
    return app


@asynccontextmanager
async def server(handler):
    """Serve `handler` at both paths, and yield a session and the address."""
    runner = web.AppRunner(application(handler), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    timeout = aiohttp.ClientTimeout(5)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            yield session, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def streaming(events, *, cut: bool = False, delay_s: float = 0.0):
    async def handler(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await asyncio.sleep(delay_s)
            await response.write(f": ping\n\ndata: {event}\n\n".encode())
        if cut:
            request.transport.abort()
        return response

    return handler


async def verdict_of(handler, question: Question | None = None):
    async with server(handler) as (session, url):
        return await ask(session, url, "tiny", question or Question("x", 2, 1))


@pytest.mark.parametrize("verdict", STREAMS)
async def test_every_fault_has_its_verdict(verdict: Verdict) -> None:
    """A stream that misses or adds something fails with that cause, and an intact one is ok."""
    record = await verdict_of(streaming(STREAMS[verdict]))
    assert record.verdict is verdict, record.detail
    assert bool(record.detail) == (verdict is not Verdict.OK)


async def test_an_intact_stream_is_recorded_with_its_times_and_figures() -> None:
    """Text, usage, metrics and ordered instants; latency counts from the scheduled instant."""
    record = await verdict_of(streaming(GOOD, delay_s=0.01))
    assert record.texts == ("ab",)
    assert (record.usage, record.metrics) == (USAGE, METRICS)
    assert record.scheduled_s < record.first_s < record.last_s < record.end_s
    assert record.ttft_s >= 0.01
    assert record.tpot_s == pytest.approx(record.last_s - record.first_s)


async def test_the_first_token_is_the_first_text() -> None:
    """A role, an empty delta or a comment is not the first token."""
    events = [
        chat_chunk({"role": "assistant", "content": ""}),
        chat_chunk({"content": "hi"}),
        chat_chunk({}, "stop"),
        USAGE_CHUNK,
        "[DONE]",
    ]
    handler = streaming(events, delay_s=0.02)
    record = await verdict_of(handler, Question("x", 2, 1, chat=True))
    assert record.verdict is Verdict.OK
    assert record.texts == ("hi",)
    assert record.ttft_s >= 0.04


async def test_a_cut_connection_is_no_success() -> None:
    """A connection that dies before the end is cut, although all of its text came."""
    record = await verdict_of(streaming(GOOD, cut=True))
    assert record.verdict is Verdict.CUT


async def test_refusals_are_not_streams() -> None:
    """An error status, an answer which is no stream, and no server at all are told apart."""

    async def busy(request):
        return web.json_response({"error": {"message": "busy"}}, status=429)

    async def plain(request):
        return web.json_response({"choices": []})

    refused = await verdict_of(busy)
    assert refused.verdict is Verdict.HTTP_STATUS
    assert "429" in refused.detail
    assert (await verdict_of(plain)).verdict is Verdict.NO_STREAM
    async with server(plain) as (session, url):
        pass
    async with aiohttp.ClientSession() as session:
        record = await ask(session, url, "tiny", Question("x", 2, 1))
    assert record.verdict is Verdict.NO_CONNECTION


async def test_a_silent_server_times_out() -> None:
    """A stream that stops without ending is a timeout, not a success."""

    async def silent(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f"data: {chunk('a')}\n\n".encode())
        await asyncio.sleep(5)
        return response

    async with (
        server(silent) as (_, url),
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(0.2)) as hasty,
    ):
        record = await ask(hasty, url, "tiny", Question("x", 2, 1))
    assert record.verdict is Verdict.TIMEOUT
    assert record.texts == ("a",)


async def test_what_is_sent_is_what_was_asked() -> None:
    """The body streams, asks for usage, and carries the question and its extra fields."""
    bodies = []

    async def handler(request):
        bodies.append(await request.json())
        return await streaming(GOOD)(request)

    extra = (("speculation", {"mode": "off"}),)
    async with server(handler) as (session, url):
        assert await first_model(session, url) == "tiny"
        await ask(session, url, "tiny", Question("x", 2, 7, extra=extra))
        await ask(session, url, "tiny", Question("x", 2, 7, chat=True))
    completion, chat = bodies
    assert completion["prompt"] == "x"
    assert chat["messages"] == [{"role": "user", "content": "x"}]
    assert completion["stream_options"] == {"include_usage": True}
    assert (completion["seed"], completion["speculation"]) == (7, {"mode": "off"})


def test_every_choice_must_end() -> None:
    """With n choices each needs its own finish_reason; a choice nobody asked for is malformed."""
    audit = StreamAudit(choices=2, wants_usage=False)
    audit.add(chunk("a", "stop", index=1))
    audit.add("[DONE]")
    audit.end()
    assert audit.verdict is Verdict.NO_FINISH_REASON
    assert "[0]" in audit.detail
    stranger = StreamAudit()
    stranger.add(chunk("a", index=1))
    assert stranger.verdict is Verdict.MALFORMED
