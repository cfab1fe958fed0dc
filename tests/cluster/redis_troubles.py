"""Failures of a cluster's Redis, each of which lasts some seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import redis

from tests.cluster.nodes import NodeProcess, eventually
from tests.gateway.redis_server import RedisServer
from tests.gateway.tcp_proxy import TcpProxy

DELAY_S = 0.05
"""Delay per direction, above a gateway's deadline (20 ms) and below its connection timeout."""

FLUSH_EVERY_S = 0.25


@dataclass(frozen=True)
class RedisBehindProxy:
    """A Redis server and the proxy through which nodes connect to it."""

    server: RedisServer
    proxy: TcpProxy

    @property
    def url(self) -> str:
        """The URL that nodes use."""
        return f"redis://{self.proxy.url.partition('://')[2]}/0"

    async def command(self, *words: object) -> None:
        """Send a command directly to the server."""
        await asyncio.to_thread(self.server.command, *words)


async def paused(store: RedisBehindProxy, hold_s: float) -> None:
    """Pause Redis for all clients (`CLIENT PAUSE`)."""
    await store.command("CLIENT", "PAUSE", round(hold_s * 1e3), "ALL")
    await asyncio.sleep(hold_s)


async def killed(store: RedisBehindProxy, hold_s: float) -> None:
    """Kill Redis and restart it with an empty memory."""
    await asyncio.to_thread(store.server.kill)
    await asyncio.sleep(hold_s)
    await asyncio.to_thread(store.server.start)


async def delayed(store: RedisBehindProxy, hold_s: float) -> None:
    """Delay every response of Redis."""
    store.proxy.delay_s = DELAY_S
    await asyncio.sleep(hold_s)
    store.proxy.delay_s = 0.0


async def flushed(store: RedisBehindProxy, hold_s: float) -> None:
    """Flush the memory of Redis repeatedly."""
    for _ in range(round(hold_s / FLUSH_EVERY_S)):
        await store.command("FLUSHALL")
        await asyncio.sleep(FLUSH_EVERY_S)


async def cut(store: RedisBehindProxy, hold_s: float) -> None:
    """Reset the connections to Redis repeatedly."""
    for _ in range(round(hold_s / FLUSH_EVERY_S)):
        store.proxy.cut()
        await asyncio.sleep(FLUSH_EVERY_S)


RedisFailure = Callable[[RedisBehindProxy, float], Awaitable[None]]

REDIS_FAILURES: Mapping[str, RedisFailure] = MappingProxyType(
    {trouble.__name__: trouble for trouble in (paused, killed, delayed, flushed, cut)}
)


async def uses_redis(node: NodeProcess) -> bool:
    """Return whether a node currently uses Redis instead of deciding alone."""
    return await node.metric_sum("draftgate_state_store_out") == 0


async def recovered(nodes: list[NodeProcess], server: RedisServer) -> None:
    """Wait until every node uses Redis again and has reported its state."""

    async def all_reported() -> bool:
        with suppress(redis.RedisError):
            reported = await asyncio.to_thread(server.command, "ZCARD", "draftgate:{default}:nodes")
            return reported == len(nodes)
        return False

    await eventually(all_reported)
    for node in nodes:  # in sequence, because a busy machine may delay any node
        await eventually(partial(uses_redis, node))
