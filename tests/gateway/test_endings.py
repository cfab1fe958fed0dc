"""Tests of stream endings: all finish reasons and `[DONE]`, or exactly one error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import httpx
import pytest
from openai import APIError

from draftgate.backends.types import Delta, FinishReason
from draftgate.gateway.app import Listening
from draftgate.gateway.http import stream
from tests.gateway.clients import openai_client
from tests.gateway.harness import ScriptedBackend, events, post_raw, running, until

FINAL = Delta(0, (1,), "", (), FinishReason.STOP)
BODY = {"prompt": "x", "max_tokens": 400}


@pytest.fixture
async def node(scripted: ScriptedBackend) -> AsyncIterator[Listening]:
    """A node with a scripted worker."""
    async with running(backends=[scripted]) as gateway:
        yield gateway


def send_request(http: httpx.AsyncClient, **fields: object) -> asyncio.Task[httpx.Response]:
    """Send a request in the background."""
    return asyncio.create_task(http.post("/v1/completions", json={**BODY, **fields}))


@asynccontextmanager
async def streaming(
    http: httpx.AsyncClient, path: str = "/v1/completions", **fields: object
) -> AsyncIterator[AsyncIterator[str]]:
    """Send a streaming request and yield the lines of its response."""

    async def lines() -> AsyncIterator[str]:
        async for line in (await opening).aiter_lines():
            yield line

    request = http.build_request("POST", path, json={"max_tokens": 400, "stream": True, **fields})
    opening = asyncio.create_task(http.send(request, stream=True))
    try:
        async with aclosing(lines()) as found:
            yield found
    finally:
        await (await opening).aclose()


async def test_tokens_of_one_step_are_one_event(
    scripted: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The server sends the tokens of one step as one event."""
    response = send_request(http, stream=True)
    request = await scripted.submitted.get()
    scripted.emit(request, "return self.value\n", last=True)
    chunk, done = events((await response).text)
    assert chunk["choices"][0]["text"] == "return self.value\n"
    assert (chunk["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")
    assert (await response).headers["x-accel-buffering"] == "no"
    assert (await response).headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
async def test_each_step_is_one_chunk_with_the_usage_so_far(
    scripted: ScriptedBackend, http: httpx.AsyncClient, chat: bool
) -> None:
    """The server sends one chunk per step, and its usage counts all tokens so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    path, body = "/v1/completions", {"prompt": "x"}
    if chat:
        path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}
    steps = ["one ", "five are in this step ", "and three more"]
    chunks = []
    async with streaming(http, path, **body, stream_options=options) as lines:
        request = await scripted.submitted.get()
        for step in steps:
            scripted.emit(request, step, last=step is steps[-1])
            chunks += events(await anext(lines))
            await anext(lines)  # the empty line after an event
        last, done = events("\n".join([line async for line in lines]))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [c["delta"]["content"] if chat else c["text"] for c in choices] == steps
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 6, 9]
    assert (last["choices"], last["usage"], done) == ([], chunks[-1]["usage"], "[DONE]")


async def test_failure_after_first_byte_sends_one_error_event(
    scripted: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The server sends one error event and no `[DONE]` when the worker fails after the first
    byte."""
    async with streaming(http, prompt="x") as lines:
        request = await scripted.submitted.get()
        scripted.emit(request, "half an ans")
        assert "half an ans" in await anext(lines)
        scripted.crash("device lost")
        (error,) = events("\n".join([line async for line in lines]))
    assert error["error"]["code"] == "worker_failed"
    assert "device lost" in error["error"]["message"]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_cached_tokens_count_the_first_choice_of_each_prompt(
    scripted: ScriptedBackend, http: httpx.AsyncClient, stream: bool
) -> None:
    """The usage counts cached tokens only for the first choice of each prompt."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = send_request(http, prompt=["x", "y"], n=2, max_tokens=50, **options)
    for cached in (16, 32):
        request = await scripted.submitted.get()
        scripted.emit(request, "second", last=True, choice=1, cached_tokens=500)
        scripted.emit(request, "first", last=True, cached_tokens=cached)
    body = events((await response).text)[-2] if stream else (await response).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}
    metrics = (await http.get("/metrics")).text
    assert 'draftgate_cached_prompt_tokens_total{model_name="scripted"} 48.0' in metrics


async def test_openais_client_raises_on_the_error_event(
    node: Listening, scripted: ScriptedBackend
) -> None:
    """OpenAI's client yields the chunks before the error event and then raises the error."""
    async with openai_client(node.url) as api:
        opening = asyncio.create_task(
            api.completions.create(model="scripted", prompt="x", stream=True)
        )
        request = await scripted.submitted.get()
        scripted.emit(request, "half")
        chunks = aiter(await opening)
        assert (await anext(chunks)).choices[0].text == "half"
        scripted.crash("device lost")
        with pytest.raises(APIError, match="device lost"):
            await anext(chunks)


async def test_failed_node_reports_the_reason_and_refuses_requests(
    scripted: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """A failed node reports the reason on `/health` and responds to requests with 503."""
    scripted.crash("device lost")
    health = await http.get("/health")
    assert (health.status_code, health.json()["reason"]) == (503, "device lost")
    assert (await http.get("/ready")).status_code == 503
    response = await http.post("/v1/completions", json=BODY)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "worker_failed")
    assert "retry-after" in response.headers


@pytest.mark.parametrize("fields", [{"stream": True}, {}, {"prompt": ["x", "y"]}])
async def test_failure_before_the_first_token_is_an_http_error(
    scripted: ScriptedBackend, http: httpx.AsyncClient, fields: dict[str, object]
) -> None:
    """The server responds with 503 when the worker fails before the first token, even to a
    stream."""
    response = send_request(http, **fields)
    await scripted.submitted.get()
    scripted.crash("device lost")
    assert (await response).status_code == 503
    assert (await response).json()["error"]["code"] == "worker_failed"


async def test_failing_prompt_cancels_the_other_prompts(
    node: Listening, scripted: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """A failing prompt cancels the other prompts and sends one error event."""
    async with streaming(http, prompt=["x", "y"]) as lines:
        first, second = await scripted.submitted.get(), await scripted.submitted.get()
        scripted.emit(first, "one")
        assert '"index":0' in await anext(lines)
        await anext(lines)  # the empty line after an event
        scripted.emit(second, "two")
        assert '"index":1' in await anext(lines)
        await anext(lines)
        scripted.sinks.deliver([(first.request_id, FINAL)])
        assert '"finish_reason":"stop"' in await anext(lines)
        scripted.crash("device lost")
        (error,) = events("\n".join([line async for line in lines]))
    assert error["error"]["code"] == "worker_failed"
    await until(lambda: node.node.in_flight == 0)


async def test_slow_reader_gets_merged_deltas_and_all_text(
    node: Listening, scripted: ScriptedBackend
) -> None:
    """The server merges deltas into fewer chunks while the client does not read."""
    reader, writer = await post_raw(node, "/v1/completions", {**BODY, "stream": True})
    request = await scripted.submitted.get()
    piece = "x" * 20_000
    steps = 1000
    for _ in range(steps):
        scripted.emit(request, piece)
        await asyncio.sleep(0)  # the writer gets a single iteration of the loop
    scripted.emit(request, "end", last=True)
    data = await _read_all(reader)
    writer.close()
    chunks = events(data)[:-1]
    assert "".join(c["choices"][0]["text"] for c in chunks) == piece * steps + "end"
    assert len(chunks) < steps / 2


async def _read_all(reader: asyncio.StreamReader) -> str:
    await reader.readuntil(b"\r\n\r\n")
    body = bytearray()
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    return body.decode()


async def test_queued_stream_gets_comments(
    scripted: ScriptedBackend, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sends comments to a queued stream to keep the connection open."""
    monkeypatch.setattr(stream, "KEEPALIVE_S", 0.005)
    async with streaming(http, prompt="x") as lines:
        assert await anext(lines) == ": waiting"
        scripted.emit(await scripted.submitted.get(), "done", last=True)
        rest = [line async for line in lines]
    assert rest[-2] == "data: [DONE]"
