"""A worker's process without Ray: its notices and its end."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import msgspec

from draftgate.gateway.config import ServeConfig
from draftgate.gateway.launch.messages import Notice, Order
from tests.gateway.redis_server import RedisServer

PATIENCE_S = 60.0


@asynccontextmanager
async def child(secret: str | None = None, **settings: Any) -> AsyncIterator[Process]:
    """A process with an order, killed at the end."""
    order = Order(config=ServeConfig(**{"port": 0, "backend": "sim", **settings}), secret=secret)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "draftgate.gateway.launch.child",
        stdin=PIPE, stdout=PIPE, stderr=PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    process.stdin.write(order.encoded() + b"\n")
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def notice(process: Process) -> Notice:
    """The next notice of the process."""
    return msgspec.json.decode(await process.stdout.readline(), type=Notice)


async def joined(process: Process) -> Notice:
    """The notice that the process sends when the pool lists it."""
    told = await notice(process)
    while not told.joined:
        assert not told.failure
        told = await notice(process)
    return told


async def test_notices_report_the_url_and_the_membership_in_the_pool(
    redis_server: RedisServer,
) -> None:
    """The notice has the URL, and `joined` only once Redis lists the worker; SIGTERM drains it."""
    async with child(join=redis_server.url, pool="blue") as process:
        told = await joined(process)
        (worker,) = redis_server.command("ZRANGE", "draftgate:{blue}:hb", 0, -1)
        assert told.url == f"http://{worker.removesuffix('-0')}"
        process.terminate()
        assert await process.wait() == 0
        assert redis_server.command("ZRANGE", "draftgate:{blue}:hb", 0, -1) == []


async def test_a_process_without_its_actor_leaves_the_pool_and_exits_at_once(
    redis_server: RedisServer,
) -> None:
    """Without its actor, a process waits for no stream: its cores and GPU are reassigned."""
    async with child(join=redis_server.url, drain_timeout_s=1e6, profile="h100-8b") as process:
        told = await joined(process)
        body = {"prompt": "x", "max_tokens": 8000, "stream": True, "ignore_eos": True}
        async with (
            httpx.AsyncClient(base_url=told.url, timeout=PATIENCE_S) as http,
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            process.stdin.close()
            rest = []
            with suppress(httpx.RemoteProtocolError):  # its last lines may take 2 s
                rest += [line async for line in lines if line]
        assert not any(line.endswith("[DONE]") for line in rest) or "error" in "".join(rest)
        assert await process.wait() == 0
        assert redis_server.command("ZRANGE", "draftgate:{default}:hb", 0, -1) == []


async def test_a_failed_start_is_reported_with_its_reason(redis_server: RedisServer) -> None:
    """The reason is in the notice and on stderr, and the exit status is 1."""
    for settings, why in (
        ({"model": "/nowhere/model"}, "/nowhere/model"),
        ({"host": "0.0.0.0"}, "no other node may use this worker: set --peer-secret-env NAME"),
        ({"peer_secret_env": "NOT_THERE"}, "NOT_THERE"),
    ):
        async with child(join=redis_server.url, **settings) as process:
            assert why in (await notice(process)).failure
            assert why in (await process.stderr.read()).decode()
            assert await process.wait() == 1


async def test_the_secret_of_the_order_is_used(redis_server: RedisServer) -> None:
    """The secret of the order is used although the machine's environment does not have it."""
    secret = "a secret of the cluster"
    async with child(secret, join=redis_server.url, peer_secret_env="HANDED") as process:
        assert (await joined(process)).url
