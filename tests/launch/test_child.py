"""Tests of a worker's process without Ray: its notices and its exit."""

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
from draftgate.gateway.processes.messages import Notice, Order
from tests.gateway.redis_server import RedisServer

PATIENCE_S = 60.0


@asynccontextmanager
async def child(secret: str | None = None, **settings: Any) -> AsyncIterator[Process]:
    """Start a process with an order, and kill the process at the end."""
    order = Order(config=ServeConfig(**{"port": 0, "backend": "sim", **settings}), secret=secret)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "draftgate.gateway.processes.child",
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
    """Return the next notice of the process."""
    return msgspec.json.decode(await process.stdout.readline(), type=Notice)


async def joined(process: Process) -> Notice:
    """Wait for the notice that reports the membership in the pool."""
    last_notice = await notice(process)
    while not last_notice.joined:
        assert not last_notice.failure
        last_notice = await notice(process)
    return last_notice


async def test_notices_report_the_url_and_the_membership_in_the_pool(
    redis_server: RedisServer,
) -> None:
    """The notice contains the URL and reports `joined` only when Redis lists the worker."""
    async with child(join=redis_server.url, pool="blue") as process:
        last_notice = await joined(process)
        (worker,) = redis_server.command("ZRANGE", "draftgate:{blue}:hb", 0, -1)
        assert last_notice.url == f"http://{worker.removesuffix('-0')}"
        process.terminate()
        assert await process.wait() == 0
        assert redis_server.command("ZRANGE", "draftgate:{blue}:hb", 0, -1) == []


async def test_a_process_without_its_actor_leaves_the_pool_and_exits(
    redis_server: RedisServer,
) -> None:
    """A process without its actor exits without waiting for streams, because Ray reassigns its
    GPU."""
    async with child(join=redis_server.url, drain_timeout_s=1e6, profile="h100-8b") as process:
        last_notice = await joined(process)
        body = {"prompt": "x", "max_tokens": 8000, "stream": True, "ignore_eos": True}
        async with (
            httpx.AsyncClient(base_url=last_notice.url, verify=False, timeout=PATIENCE_S) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            process.stdin.close()
            rest = []
            with suppress(httpx.RemoteProtocolError):  # the last lines may take 2 s
                rest += [line async for line in lines if line]
        assert not any(line.endswith("[DONE]") for line in rest) or "error" in "".join(rest)
        assert await process.wait() == 0
        assert redis_server.command("ZRANGE", "draftgate:{default}:hb", 0, -1) == []


async def test_a_failed_start_is_reported_with_its_reason(redis_server: RedisServer) -> None:
    """The notice and stderr contain the reason of a failed start, and the exit status is 1."""
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
    """The worker uses the secret of its order if the machine's environment has none."""
    secret = "a secret of the cluster"
    async with child(secret, join=redis_server.url, peer_secret_env="HANDED") as process:
        assert (await joined(process)).url
