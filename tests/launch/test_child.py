"""A worker's process, without Ray: what it tells, and when it ends."""

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
    """The next thing it tells."""
    return msgspec.json.decode(await process.stdout.readline(), type=Notice)


async def joined(process: Process) -> Notice:
    """What it tells once the pool has it."""
    told = await notice(process)
    while not told.joined:
        assert not told.failure
        told = await notice(process)
    return told


async def test_it_tells_where_it_is_and_that_the_pool_has_it(redis_server: RedisServer) -> None:
    """Only what Redis answers counts as joined; SIGTERM ends it as it ends any node."""
    async with child(join=redis_server.url, pool="blue") as process:
        told = await joined(process)
        (worker,) = redis_server.command("ZRANGE", "draftgate:{blue}:hb", 0, -1)
        assert told.url == f"http://{worker.removesuffix('-0')}"
        process.terminate()
        assert await process.wait() == 0
        assert redis_server.command("ZRANGE", "draftgate:{blue}:hb", 0, -1) == []


async def test_an_orphan_leaves_the_pool_and_ends_at_once(redis_server: RedisServer) -> None:
    """When its actor is gone it waits for no stream: its cores and GPU are somebody else's."""
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
            with suppress(httpx.RemoteProtocolError):  # it has 2 s for a last word
                rest += [line async for line in lines if line]
        assert not any(line.endswith("[DONE]") for line in rest) or "error" in "".join(rest)
        assert await process.wait() == 0
        assert redis_server.command("ZRANGE", "draftgate:{default}:hb", 0, -1) == []


async def test_it_says_why_it_cannot_start(redis_server: RedisServer) -> None:
    """The reason is told to the actor and stands on stderr, too; the status is 1."""
    for settings, why in (
        ({"model": "/nowhere/model"}, "/nowhere/model"),
        ({"host": "0.0.0.0"}, "no other node may use this worker: set --peer-secret-env NAME"),
        ({"peer_secret_env": "NOT_THERE"}, "NOT_THERE"),
    ):
        async with child(join=redis_server.url, **settings) as process:
            assert why in (await notice(process)).failure
            assert why in (await process.stderr.read()).decode()
            assert await process.wait() == 1


async def test_the_secret_that_it_is_handed_counts(redis_server: RedisServer) -> None:
    """It need not be in the environment of the machine."""
    secret = "a secret of the cluster"
    async with child(secret, join=redis_server.url, peer_secret_env="HANDED") as process:
        assert (await joined(process)).url
