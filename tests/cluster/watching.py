"""Who watches a cluster while it is in trouble: the pool in Redis, and whether nodes are alive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import redis

from tests.cluster.nodes import NodeProcess
from tests.cluster.pool import Pool, look
from tests.gateway.redis_server import RedisServer

LOOK_S = 0.5


@dataclass
class Watch:
    """What was seen, twice a second.

    Attributes:
        looks: how often Redis was looked at, and answered.
        capacity_tokens: the least of a worker.
        usage: the largest share of a worker's capacity that was leased.
        overdue_s: the longest that a lease was there after its end.
        wrong: looks at which the leases' sums were not those of the leases.
        asked: how often nodes were asked for their health.
        unhealthy: answers that were not 200, by node.
        slowest_s: the longest that such an answer took.
    """

    looks: int = 0
    capacity_tokens: int = 0
    usage: float = 0.0
    overdue_s: float = 0.0
    wrong: list[Pool] = field(default_factory=list)
    asked: int = 0
    unhealthy: list[tuple[str, int]] = field(default_factory=list)
    slowest_s: float = 0.0

    async def watch_pool(self, server: RedisServer) -> None:
        """Look until cancelled; it may be Redis that is in trouble."""
        while True:
            with suppress(redis.RedisError):
                self.see(await asyncio.to_thread(look, server))
            await asyncio.sleep(LOOK_S)

    async def watch_health(self, node: NodeProcess) -> None:
        """Ask until cancelled."""
        now_s = asyncio.get_running_loop().time
        while True:
            begun_s = now_s()
            status = await node.status("/health")
            self.asked += 1
            self.slowest_s = max(self.slowest_s, now_s() - begun_s)
            if status != 200:
                self.unhealthy.append((node.name, status))
            await asyncio.sleep(LOOK_S)

    def see(self, pool: Pool) -> None:
        """Take note of what lies there."""
        self.looks += 1
        self.capacity_tokens = min(pool.workers.values(), default=self.capacity_tokens)
        self.usage = max(self.usage, pool.usage)
        self.overdue_s = max(self.overdue_s, *(-left_s for left_s in pool.left_s.values()), 0.0)
        if pool.sums_differ:
            self.wrong.append(pool)


@asynccontextmanager
async def watching(server: RedisServer, *alive: NodeProcess) -> AsyncIterator[Watch]:
    """Watch a pool, and nodes that have to stay alive, while the context lasts."""
    watch = Watch()
    tasks = [
        asyncio.create_task(watch.watch_pool(server)),
        *(asyncio.create_task(watch.watch_health(node)) for node in alive),
    ]
    try:
        yield watch
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
