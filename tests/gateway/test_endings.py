"""Streams end exactly once: with all finish reasons and `[DONE]`, or with one error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import httpx
import pytest
from openai import APIError, AsyncOpenAI

from draftgate.backends.types import Delta, FinishReason
from draftgate.gateway.app import Listening
from draftgate.gateway.http import stream
from tests.gateway.harness import ScriptedBackend, client, events, post_raw, running, until

FINAL = Delta(0, (1,), "", (), FinishReason.STOP)
BODY = {"prompt": "x", "max_tokens": 400}


@pytest.fixture
async def node(scripted: ScriptedBackend) -> AsyncIterator[Listening]:
    """A node with a worker that the test plays."""
    async with running(backends=[scripted]) as where:
        yield where


@pytest.fixture
async def http(node: Listening) -> AsyncIterator[httpx.AsyncClient]:
    """A client of it."""
    async with client(node) as opened:
        yield opened


def ask(http: httpx.AsyncClient, **fields: object) -> asyncio.Task[httpx.Response]:
    """Send a request in the background."""
    return asyncio.create_task(http.post("/v1/completions", json={**BODY, **fields}))


@asynccontextmanager
async def streaming(
    http: httpx.AsyncClient, path: str = "/v1/completions", **fields: object
) -> AsyncIterator[AsyncIterator[str]]:
    """Send a streaming request; yields the lines of its answer."""

    async def lines() -> AsyncIterator[str]:
        async for line in (await opening).aiter_lines():
            yield line

    request = http.build_request("POST", path, json={**BODY, "stream": True, **fields})
    opening = asyncio.create_task(http.send(request, stream=True))
    try:
        async with aclosing(lines()) as found:
            yield found
    finally:
        await (await opening).aclose()


async def test_tokens_of_one_step_are_one_event(
    scripted: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """A step of several tokens is one event."""
    answer = ask(http, stream=True)
    request = await scripted.submitted.get()
    scripted.emit(request, "return self.value\n", last=True)
    chunk, done = events((await answer).text)
    assert chunk["choices"][0]["text"] == "return self.value\n"
    assert (chunk["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")
    assert (await answer).headers["x-accel-buffering"] == "no"
    assert (await answer).headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
async def test_each_step_is_one_chunk_with_the_usage_so_far(
    scripted: ScriptedBackend, http: httpx.AsyncClient, chat: bool
) -> None:
    """Steps of 1, 5 and 3 tokens are three chunks whose usage counts each token."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    path, ask = "/v1/completions", {"prompt": "x"}
    if chat:
        path, ask = "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}
    steps = ["one ", "five are in this step ", "and three more"]
    chunks = []
    async with streaming(http, path, **ask, stream_options=options) as lines:
        request = await scripted.submitted.get()
        for step in steps:
            scripted.emit(request, step, last=step is steps[-1])
            chunks += events(await anext(lines))
            await anext(lines)  # the empty line behind an event
        last, done = events("\n".join([line async for line in lines]))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [c["delta"]["content"] if chat else c["text"] for c in choices] == steps
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 6, 9]
    assert (last["choices"], last["usage"], done) == ([], chunks[-1]["usage"], "[DONE]")


async def test_failure_after_first_byte_sends_one_error_event(
    scripted: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The stream has no `[DONE]`, so clients do not take it for complete."""
    async with streaming(http) as lines:
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
    """The other choices share its KV."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = ask(http, prompt=["x", "y"], n=2, max_tokens=50, **options)
    for cached in (16, 32):
        request = await scripted.submitted.get()
        scripted.emit(request, "second", last=True, choice=1, cached_tokens=500)
        scripted.emit(request, "first", last=True, cached_tokens=cached)
    body = events((await answer).text)[-2] if stream else (await answer).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}
    metrics = (await http.get("/metrics")).text
    assert 'draftgate_cached_prompt_tokens_total{model_name="scripted"} 48.0' in metrics


async def test_openais_client_raises_on_the_error_event(
    node: Listening, scripted: ScriptedBackend
) -> None:
    """The chunks before the error event are delivered first."""
    async with AsyncOpenAI(base_url=f"{node.url}/v1", api_key="x", max_retries=0) as api:
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
    """`/health` has the reason, and requests get 503."""
    scripted.crash("device lost")
    health = await http.get("/health")
    assert (health.status_code, health.json()["reason"]) == (503, "device lost")
    assert (await http.get("/ready")).status_code == 503
    answer = await http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_failed")
    assert "retry-after" in answer.headers


@pytest.mark.parametrize("fields", [{"stream": True}, {}, {"prompt": ["x", "y"]}])
async def test_failure_before_the_first_token_is_an_http_error(
    scripted: ScriptedBackend, http: httpx.AsyncClient, fields: dict[str, object]
) -> None:
    """The same holds for streams."""
    answer = ask(http, **fields)
    await scripted.submitted.get()
    scripted.crash("device lost")
    assert (await answer).status_code == 503
    assert (await answer).json()["error"]["code"] == "worker_failed"


async def test_failing_prompt_cancels_the_other_prompts(
    node: Listening, scripted: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The answer has one error."""
    async with streaming(http, prompt=["x", "y"]) as lines:
        first, second = await scripted.submitted.get(), await scripted.submitted.get()
        scripted.emit(first, "one")
        assert '"index":0' in await anext(lines)
        await anext(lines)  # the empty line behind an event
        scripted.emit(second, "two")
        assert '"index":1' in await anext(lines)
        await anext(lines)
        scripted.streams.deliver([(first.request_id, FINAL)])
        assert '"finish_reason":"stop"' in await anext(lines)
        scripted.crash("device lost")
        (error,) = events("\n".join([line async for line in lines]))
    assert error["error"]["code"] == "worker_failed"
    await until(lambda: node.node.dispatcher.in_flight == 0)


async def test_slow_reader_gets_merged_deltas_and_all_text(
    node: Listening, scripted: ScriptedBackend
) -> None:
    """Deltas merge into few large chunks while the client does not read."""
    reader, writer = await post_raw(node, "/v1/completions", {**BODY, "stream": True})
    request = await scripted.submitted.get()
    piece = "x" * 20_000
    steps = 1000
    for _ in range(steps):
        scripted.emit(request, piece)
        await asyncio.sleep(0)  # one turn of the loop is all the writer gets
    scripted.emit(request, "end", last=True)
    data = await _read_all(reader)
    writer.close()
    chunks = events(data)[:-1]
    assert "".join(c["choices"][0]["text"] for c in chunks) == piece * steps + "end"
    assert len(chunks) < steps / 2


async def _read_all(reader: asyncio.StreamReader) -> str:
    """Return the body of a chunked response without its framing."""
    await reader.readuntil(b"\r\n\r\n")
    body = bytearray()
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    return body.decode()


async def test_queued_stream_gets_comments(
    scripted: ScriptedBackend, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients ignore comments, which keep the connection open."""
    monkeypatch.setattr(stream, "KEEPALIVE_S", 0.005)
    async with streaming(http) as lines:
        assert await anext(lines) == ": waiting"
        scripted.emit(await scripted.submitted.get(), "done", last=True)
        rest = [line async for line in lines]
    assert rest[-2] == "data: [DONE]"


async def test_missing_finish_reason_is_an_error(
    scripted: ScriptedBackend, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no `[DONE]` unless every choice has a finish reason."""

    async def short(_request: object):
        for _ in ():
            yield

    monkeypatch.setattr(scripted, "generate", short)
    answer = await http.post("/v1/completions", json={**BODY, "stream": True})
    assert answer.status_code == 503
