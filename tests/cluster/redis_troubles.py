"""What befalls the Redis of a cluster, each for some seconds; afterwards it is well."""

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
"""Each way: more than a gateway waits for an answer (20 ms), less than it gives a connection."""

FLUSH_EVERY_S = 0.25


@dataclass(frozen=True)
class RedisBehindProxy:
    """A Redis server, and the proxy through which nodes reach it."""

    server: RedisServer
    proxy: TcpProxy

    @property
    def url(self) -> str:
        """Where nodes find it."""
        return f"redis://{self.proxy.url.partition('://')[2]}/0"

    async def command(self, *words: object) -> None:
        """Ask the server something, past the proxy."""
        await asyncio.to_thread(self.server.command, *words)


async def paused(store: RedisBehindProxy, hold_s: float) -> None:
    """It answers nobody (`CLIENT PAUSE`)."""
    await store.command("CLIENT", "PAUSE", round(hold_s * 1e3), "ALL")
    await asyncio.sleep(hold_s)


async def killed(store: RedisBehindProxy, hold_s: float) -> None:
    """It dies, and comes back with an empty memory."""
    await asyncio.to_thread(store.server.kill)
    await asyncio.sleep(hold_s)
    await asyncio.to_thread(store.server.start)


async def delayed(store: RedisBehindProxy, hold_s: float) -> None:
    """Every answer comes late."""
    store.proxy.delay_s = DELAY_S
    await asyncio.sleep(hold_s)
    store.proxy.delay_s = 0.0


async def flushed(store: RedisBehindProxy, hold_s: float) -> None:
    """It loses its memory again and again."""
    for _ in range(round(hold_s / FLUSH_EVERY_S)):
        await store.command("FLUSHALL")
        await asyncio.sleep(FLUSH_EVERY_S)


async def cut(store: RedisBehindProxy, hold_s: float) -> None:
    """Connections are reset again and again."""
    for _ in range(round(hold_s / FLUSH_EVERY_S)):
        store.proxy.cut()
        await asyncio.sleep(FLUSH_EVERY_S)


RedisTrouble = Callable[[RedisBehindProxy, float], Awaitable[None]]

TROUBLES: Mapping[str, RedisTrouble] = MappingProxyType(
    {one.__name__: one for one in (paused, killed, delayed, flushed, cut)}
)


async def asks_it(node: NodeProcess) -> bool:
    """Whether a node asks Redis now, instead of deciding alone."""
    return await node.figure("draftgate_state_store_out") == 0


async def recovered(nodes: list[NodeProcess], server: RedisServer) -> None:
    """Wait until every node has asked Redis again, and all have told it of themselves."""

    async def told() -> bool:
        with suppress(redis.RedisError):
            there = await asyncio.to_thread(server.command, "ZCARD", "draftgate:{default}:gateways")
            return there == len(nodes)
        return False

    await eventually(told)
    for node in nodes:  # one by one: a busy machine may hold one up at any time
        await eventually(partial(asks_it, node))
