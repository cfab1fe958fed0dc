"""Tests of quotas that gateways share through a real Redis server that is slow.

The server has a clock that the test sets, so that no quota refills during a burst.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

from draftgate.gateway.dispatch.quotas import Quotas
from draftgate.gateway.state.commands import ListWorkers, ReserveLease
from draftgate.gateway.state.guarded.calls import DEADLINE_S
from draftgate.gateway.state.guarded.store import GuardedStore
from draftgate.gateway.state.redis.client import open_client
from draftgate.gateway.state.redis.store import WARM_CONNECTIONS, RedisStore
from draftgate.policies.quotas import Quota
from tests.gateway.harness import PATIENCE_S
from tests.gateway.redis_server import RedisServer
from tests.gateway.stores import CLOCK, POOL, TimedRedis
from tests.gateway.tcp_proxy import TcpProxy, proxied

SIXTY = Quota(requests_per_minute=60)
SLOW_S = 2 * DEADLINE_S


class SlowGateway:
    """A gateway with its own slow connection to the store."""

    def __init__(self, name: str, proxy: TcpProxy) -> None:
        self.name = name
        self.proxy = proxy
        address = f"redis://{urlsplit(proxy.url).netloc}/0"
        remote = RedisStore(open_client(address), POOL, name, CLOCK)
        self.store = GuardedStore(remote, quota_deadline_s=PATIENCE_S)
        loop = asyncio.get_running_loop()
        self.quotas = Quotas(self.store, {"t": SIXTY}, loop.time)

    async def reserve(self, number: int) -> bool:
        """Send a request, and return whether it is granted. Every second one takes a lease."""
        needed = self.quotas.needed("t", f"{self.name}-{number}", 1)
        assert needed is not None
        if number % 2:
            return await self.quotas.reserve(needed) is None
        found = await self.store.call(ReserveLease(f"{needed.request_id}-0", 1, (), 30.0, needed))
        return found.shortage is None


@asynccontextmanager
async def slow_gateways(redis: RedisServer, delay_s: float) -> AsyncIterator[list[SlowGateway]]:
    """Run two gateways that have just started, with a delay of the network in each direction."""
    async with AsyncExitStack() as stack:
        timed = TimedRedis(redis.url)
        stack.push_async_callback(timed.close)
        await timed.begin()
        gateways = []
        for name in ("g1", "g2"):
            proxy = await stack.enter_async_context(proxied(redis.url))
            gateway = SlowGateway(name, proxy)
            stack.push_async_callback(gateway.store.close)
            await gateway.store.warm_up()
            await gateway.quotas.renew()
            proxy.delay_s = delay_s
            gateways.append(gateway)
        yield gateways


async def burst(gateways: list[SlowGateway], count: int) -> int:
    """Send requests to all gateways at the same time, and return the number of grants."""
    calls = [gateway.reserve(number) for gateway in gateways for number in range(count)]
    return sum(await asyncio.gather(*calls))


async def test_a_slow_network_does_not_exceed_a_quota(redis_server: RedisServer) -> None:
    """Two gateways grant exactly 60 requests over a network that is too slow for leases."""
    async with slow_gateways(redis_server, SLOW_S) as gateways:
        assert await burst(gateways, 100) == 60


async def test_a_paused_server_does_not_exceed_a_quota(redis_server: RedisServer) -> None:
    """Two gateways grant exactly 60 requests although the server pauses during the burst."""
    async with slow_gateways(redis_server, 0.0) as gateways:
        redis_server.command("CLIENT", "PAUSE", round(SLOW_S * 5000), "ALL")
        assert await burst(gateways, 50) == 60


async def test_an_outage_of_leases_leaves_quotas_exact(redis_server: RedisServer) -> None:
    """Two gateways grant exactly 60 requests while the breaker of leases is open."""
    async with slow_gateways(redis_server, SLOW_S) as gateways:
        for gateway in gateways:
            while gateway.store.outage is None:
                await gateway.store.call(ListWorkers())
        assert await burst(gateways, 50) == 60


async def test_the_first_burst_needs_no_new_connection(redis_server: RedisServer) -> None:
    """After `warm_up`, a burst opens no connection and loads no script."""
    async with slow_gateways(redis_server, 0.0) as gateways:

        def opened() -> tuple[int, int]:
            commands = redis_server.command("INFO", "commandstats")
            scripts = [one for name, one in commands.items() if name.startswith("cmdstat_script")]
            stats = redis_server.command("INFO", "stats")  # Redis 6 has no entry of `script|load`
            return stats["total_connections_received"], sum(int(one["calls"]) for one in scripts)

        connections, loads = opened()
        await burst(gateways, WARM_CONNECTIONS)
        used, loaded = opened()
        assert used - connections <= 2  # of `opened` itself
        assert (loads > 0, loaded) == (True, loads)


async def test_warm_up_without_a_server_fails_silently(redis_server: RedisServer) -> None:
    """A gateway starts although the server is unavailable."""
    async with proxied(redis_server.url) as proxy:
        proxy.cut(refuse=True)
        gateway = SlowGateway("g", proxy)
        await gateway.store.warm_up()
        assert await gateway.reserve(1)
        await gateway.store.close()
