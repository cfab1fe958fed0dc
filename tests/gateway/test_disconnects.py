"""Tests of disconnects: the gateway frees everything that the request of a lost client holds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvloop

from draftgate.gateway.app import Listening
from draftgate.gateway.http.stream import EventStream
from tests.gateway.harness import (
    JOIN,
    ScriptedBackend,
    is_idle,
    leased,
    load_of,
    post_raw,
    running,
    until,
)

LONG = {"prompt": "def f(x):", "max_tokens": 4000, "ignore_eos": True}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_disconnect_while_decoding_frees_the_kv(sim: Listening, stream: bool, n: int) -> None:
    """A disconnect during decoding frees the KV blocks of every choice."""
    _, writer = await post_raw(sim, "/v1/completions", {**LONG, "stream": stream, "n": n})
    await until(lambda: load_of(sim.node).running == n)
    assert not is_idle(sim.node)
    writer.close()
    await until(lambda: is_idle(sim.node))


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_disconnect_while_queued_removes_the_request(stream: bool) -> None:
    """A disconnect removes a queued request that never ran."""
    async with running(max_num_seqs=1) as gateway:
        _, first = await post_raw(gateway, "/v1/completions", LONG)
        await until(lambda: load_of(gateway.node).running == 1)
        _, second = await post_raw(gateway, "/v1/completions", {**LONG, "stream": stream})
        queue = gateway.node.dispatcher.queue
        await until(lambda: len(queue) == 1)
        second.close()
        await until(lambda: len(queue) == 0)
        assert load_of(gateway.node).running == 1
        first.close()
        await until(lambda: is_idle(gateway.node))


async def test_disconnect_cancels_all_prompts(sim: Listening) -> None:
    """A disconnect cancels every prompt of a list."""
    body = {**LONG, "prompt": ["a", "b", "c"], "stream": True}
    _, writer = await post_raw(sim, "/v1/completions", body)
    await until(lambda: load_of(sim.node).running == 3)
    writer.close()
    await until(lambda: is_idle(sim.node))


async def test_connection_reset_frees_the_request(sim: Listening) -> None:
    """A connection reset frees the request like a normal disconnect."""
    _, writer = await post_raw(sim, "/v1/completions", {**LONG, "stream": True})
    await until(lambda: load_of(sim.node).running == 1)
    writer.transport.abort()
    await until(lambda: is_idle(sim.node))


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_half_closed_connection_counts_as_a_disconnect(loop: Any, stream: bool) -> None:
    """A client that closes its sending direction loses its request, although it could still
    read."""

    async def scenario() -> bytes:
        async with running() as gateway:
            reader, writer = await post_raw(gateway, "/v1/completions", {**LONG, "stream": stream})
            await until(lambda: load_of(gateway.node).running == 1)
            writer.write_eof()
            await until(lambda: is_idle(gateway.node))
            response = await reader.read()
            writer.close()
        return response

    with asyncio.Runner(loop_factory=loop) as runner:
        assert b"[DONE]" not in runner.run(scenario())


async def test_disconnect_releases_the_lease() -> None:
    """A disconnect releases the request's lease in the store."""
    async with running(join=JOIN) as sim:
        node = sim.node
        await node.heartbeat.beat()
        _, writer = await post_raw(sim, "/v1/completions", {**LONG, "stream": True})
        await until(lambda: load_of(node).running == 1)
        assert await leased(node) == LONG["max_tokens"] + 5
        writer.close()
        await until(lambda: is_idle(sim.node))
        assert await leased(node) == 0


async def test_disconnect_is_noticed_without_a_write(scripted: ScriptedBackend) -> None:
    """The gateway cancels the request after a disconnect even if the stream has sent nothing."""
    async with running(backends=[scripted]) as gateway:
        body = {"prompt": "x", "stream": True}
        _, writer = await post_raw(gateway, "/v1/completions", body)
        request = await scripted.submitted.get()
        writer.close()
        async with asyncio.timeout(60):
            assert await scripted.abandoned.get() == request.request_id


async def test_write_to_a_departed_client_is_not_an_error(
    scripted: ScriptedBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The gateway frees the request and logs no traceback when a write to a closed connection
    fails."""

    async def fail(_stream: EventStream, _events: bytes) -> None:
        raise ConnectionResetError("Cannot write to closing transport")

    async with running(backends=[scripted]) as gateway:
        body = {"prompt": "x", "stream": True}
        _, writer = await post_raw(gateway, "/v1/completions", body)
        request = await scripted.submitted.get()
        monkeypatch.setattr(EventStream, "write", fail)
        scripted.emit(request, "gone")
        async with asyncio.timeout(60):
            assert await scripted.abandoned.get() == request.request_id
        await until(lambda: gateway.node.in_flight == 0)
        writer.close()
    assert [record for record in caplog.records if record.name.startswith("aiohttp")] == []
