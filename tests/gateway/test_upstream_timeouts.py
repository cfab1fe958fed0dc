"""Tests of upstreams that accept requests and do not respond in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from aiohttp import web

from draftgate.backends.openai import connections
from draftgate.backends.worker_config import UpstreamSettings
from draftgate.gateway.config import effective_config
from tests.gateway.harness import client
from tests.gateway.upstreams import (
    DONE,
    LAST,
    SSE,
    TOKEN,
    WHOLE,
    Clock,
    ScriptedUpstream,
    after,
    forwarding,
    held,
    stream_of,
    upstream,
    whole,
)

PATH = "/v1/completions"
BODY = {"model": "theirs", "prompt": "x"}
STREAM = {**BODY, "stream": True}
LIMIT_S = 0.05
STREAMED = {"first_byte_timeout_s": LIMIT_S}
UNSTREAMED = {"response_timeout_s": LIMIT_S}
answers = stream_of(TOKEN, LAST, DONE)


def limited(server: ScriptedUpstream, settings: dict[str, Any]) -> ScriptedUpstream:
    server.settings = settings
    return server


async def head_only(request: web.Request) -> web.StreamResponse:
    """Send the head of a stream, as vLLM does before it computes, and nothing else."""
    await web.StreamResponse(headers=SSE).prepare(request)
    return await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("hung", [held(), head_only], ids=["nothing", "head"])
async def test_late_stream_goes_to_another_upstream(hung: Any) -> None:
    """A stream without a byte in time is cancelled, counted as a retry, and sent elsewhere."""
    async with (
        upstream(hung) as a,
        upstream(answers) as b,
        forwarding(limited(a, STREAMED), b) as gateway,
        client(gateway) as http,
    ):
        response = await http.post(PATH, json=STREAM)
        assert (response.status_code, response.content) == (200, TOKEN + LAST + DONE)
        assert (len(a.requests), len(b.requests)) == (1, 1)
        assert await a.disconnected.get()
        assert (
            'cause="late",model_name="theirs",outcome="allowed"} 1.0'
            in (await http.get("/metrics")).text
        )


async def test_late_response_goes_to_another_upstream() -> None:
    """A response that is not streamed has a limit of its own."""
    async with (
        upstream(held()) as a,
        upstream(whole) as b,
        forwarding(limited(a, UNSTREAMED), b) as gateway,
        client(gateway) as http,
    ):
        response = await http.post(PATH, json=BODY)
        assert (response.status_code, response.content) == (200, WHOLE)


@pytest.mark.parametrize(
    ("settings", "body"), [(STREAMED, STREAM), (UNSTREAMED, BODY)], ids=["stream", "whole"]
)
async def test_lone_late_upstream_gets_a_request_once(
    settings: dict[str, Any], body: dict[str, Any]
) -> None:
    """Without another upstream, the client gets status 504, and the request is not repeated."""
    async with (
        upstream(held()) as engine,
        forwarding(limited(engine, settings)) as gateway,
        client(gateway) as http,
    ):
        response = await http.post(PATH, json=body)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "upstream_timeout"
        assert len(engine.requests) == 1


async def test_late_request_without_budget_gets_the_error() -> None:
    """The budget of retries bounds the requests that leave a hung upstream."""
    async with (
        upstream(held()) as a,
        upstream(answers) as b,
        forwarding(
            limited(a, STREAMED), b, upstream_retry_share=0.0, upstream_retries_per_s=0.0
        ) as gateway,
        client(gateway) as http,
    ):
        assert (await http.post(PATH, json=STREAM)).status_code == 504
        assert not b.requests


async def delayed(sending: Awaitable[Any], event: asyncio.Event) -> Any:
    """Set an event after twice the limit, and return the result of sending a request."""
    asyncio.get_running_loop().call_later(2 * LIMIT_S, event.set)
    return await sending


@pytest.mark.parametrize(
    ("settings", "body", "content"),
    [(STREAMED, BODY, WHOLE), (UNSTREAMED, STREAM, TOKEN + LAST + DONE)],
    ids=["whole", "stream"],
)
async def test_limits_concern_their_kind_of_response(
    settings: dict[str, Any], body: dict[str, Any], content: bytes
) -> None:
    """The first byte of a whole response arrives with its last token, so it may be late."""
    ready = asyncio.Event()
    handler = after(ready, answers if body is STREAM else whole)
    async with (
        upstream(handler) as engine,
        forwarding(limited(engine, settings)) as gateway,
        client(gateway) as http,
    ):
        response = await delayed(http.post(PATH, json=body), ready)
        assert (response.status_code, response.content) == (200, content)


async def test_begun_stream_has_no_limit() -> None:
    """After the first byte, a stream may take any time."""
    ready = asyncio.Event()

    async def pausing(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        await response.write(TOKEN)
        await ready.wait()
        await response.write(LAST + DONE)
        return response

    async with (
        upstream(pausing) as engine,
        forwarding(limited(engine, STREAMED)) as gateway,
        client(gateway) as http,
    ):
        response = await delayed(http.post(PATH, json=STREAM), ready)
        assert (response.status_code, response.content) == (200, TOKEN + LAST + DONE)


async def test_hung_upstream_gets_one_request_at_a_time() -> None:
    """After three late responses in a row, a hung upstream gets one request after each pause,
    whatever its probes say, and all requests again after a response."""
    clock = Clock()
    async with (
        upstream(held()) as a,
        upstream(answers) as b,
        forwarding(limited(a, STREAMED), b, clock=clock, upstream_retries_per_s=1000.0) as gateway,
        client(gateway) as http,
    ):
        first = gateway.node.fleet.workers[0].backend

        async def send(number: int) -> None:
            sent = await asyncio.gather(*(http.post(PATH, json=STREAM) for _ in range(number)))
            assert {one.status_code for one in sent} == {200}

        await send(6)
        assert len(a.requests) == 3
        for pause_s in (1.0, 2.0, 4.0):
            before = len(a.requests)
            await first.probe()
            await send(4)
            assert len(a.requests) == before
            (paused,) = (await http.get("/ready")).json()["workers"]
            assert paused["status"] == "paused"
            assert "did not respond in time" in paused["reason"]
            assert f"{pause_s} s" in paused["reason"]
            clock.now_s += pause_s
            await send(6)
            assert len(a.requests) == before + 1
        a.handler = answers
        clock.now_s += 8.0
        await send(1)
        await send(1)
        before = len(a.requests)
        await send(6)
        assert len(a.requests) == before + 3


async def test_connection_is_opened_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that accepts no connection within `connect_timeout_s` is a failed upstream."""

    async def never(*_: Any, **__: Any) -> Any:
        await asyncio.get_running_loop().create_future()

    async with (
        upstream(whole) as a,
        upstream(whole) as b,
        forwarding(limited(a, {"connect_timeout_s": LIMIT_S}), b) as gateway,
        client(gateway) as http,
    ):
        pools = [one.backend._connections for one in gateway.node.fleet.workers]
        for idle in (pools[0]._idle, pools[1]._idle):
            assert idle  # of the first probes
        pools[0]._idle.clear()
        monkeypatch.setattr(connections, "start_connection", never)
        response = await http.post(PATH, json=BODY)
        assert (response.status_code, len(b.requests)) == (200, 1)


def test_own_timeouts_precede_the_shared_ones() -> None:
    """An upstream has the timeouts of its own settings, also 0 for no limit, or the shared ones."""
    servers = [
        {"url": "http://a", "connect_timeout_s": 1.0, "first_byte_timeout_s": 0},
        {"url": "http://b", "response_timeout_s": 7},
    ]
    flags = {
        "upstream": servers,
        "upstream_connect_timeout_s": 2.0,
        "upstream_first_byte_timeout_s": 30.0,
    }
    a, b = effective_config(flags, {}).config.upstreams()

    def timeouts(one: UpstreamSettings) -> tuple[float | None, ...]:
        return one.connect_timeout_s, one.first_byte_timeout_s, one.response_timeout_s

    assert timeouts(a) == (1.0, 0.0, 0.0)
    assert timeouts(b) == (2.0, 30.0, 7.0)
