"""Failures of a cluster's Redis; each lasts some seconds, and Redis works again afterwards."""

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
"""Delay in each direction: above a gateway's deadline (20 ms), below its connection timeout."""

FLUSH_EVERY_S = 0.25


@dataclass(frozen=True)
class RedisBehindProxy:
    """A Redis server, and the proxy through which nodes reach it."""

    server: RedisServer
    proxy: TcpProxy

    @property
    def url(self) -> str:
        """The URL that nodes use."""
        return f"redis://{self.proxy.url.partition('://')[2]}/0"

    async def command(self, *words: object) -> None:
        """Send the server a command, past the proxy."""
        await asyncio.to_thread(self.server.command, *words)


async def paused(store: RedisBehindProxy, hold_s: float) -> None:
    """Pause it: it answers no client (`CLIENT PAUSE`)."""
    await store.command("CLIENT", "PAUSE", round(hold_s * 1e3), "ALL")
    await asyncio.sleep(hold_s)


async def killed(store: RedisBehindProxy, hold_s: float) -> None:
    """Kill it, and restart it with an empty memory."""
    await asyncio.to_thread(store.server.kill)
    await asyncio.sleep(hold_s)
    await asyncio.to_thread(store.server.start)


async def delayed(store: RedisBehindProxy, hold_s: float) -> None:
    """Delay every answer."""
    store.proxy.delay_s = DELAY_S
    await asyncio.sleep(hold_s)
    store.proxy.delay_s = 0.0


async def flushed(store: RedisBehindProxy, hold_s: float) -> None:
    """Flush its memory again and again."""
    for _ in range(round(hold_s / FLUSH_EVERY_S)):
        await store.command("FLUSHALL")
        await asyncio.sleep(FLUSH_EVERY_S)


async def cut(store: RedisBehindProxy, hold_s: float) -> None:
    """Reset its connections again and again."""
    for _ in range(round(hold_s / FLUSH_EVERY_S)):
        store.proxy.cut()
        await asyncio.sleep(FLUSH_EVERY_S)


RedisTrouble = Callable[[RedisBehindProxy, float], Awaitable[None]]

TROUBLES: Mapping[str, RedisTrouble] = MappingProxyType(
    {one.__name__: one for one in (paused, killed, delayed, flushed, cut)}
)


async def asks_it(node: NodeProcess) -> bool:
    """Whether a node uses Redis now instead of deciding alone."""
    return await node.figure("draftgate_state_store_out") == 0


async def recovered(nodes: list[NodeProcess], server: RedisServer) -> None:
    """Wait until every node uses Redis again and has reported to it."""

    async def told() -> bool:
        with suppress(redis.RedisError):
            there = await asyncio.to_thread(server.command, "ZCARD", "draftgate:{default}:gateways")
            return there == len(nodes)
        return False

    await eventually(told)
    for node in nodes:  # one after another, because a busy machine may delay any of them
        await eventually(partial(asks_it, node))
