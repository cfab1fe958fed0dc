"""Observation of a cluster during failures: the pool in Redis and the health of nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import redis

from tests.cluster.nodes import NodeProcess
from tests.cluster.pool import Pool, read_pool
from tests.gateway.redis_server import RedisServer

INTERVAL_S = 0.5


@dataclass
class Watch:
    """Observations of a pool and its nodes, made twice a second.

    Attributes:
        num_reads: number of successful reads of Redis.
        capacity_tokens: the smallest capacity of a worker, in tokens.
        usage: the largest leased share of a worker's capacity.
        overdue_s: the longest time that a lease existed after its expiry, in seconds.
        wrong: snapshots in which the sums of the leases were wrong.
        health_checks: number of health checks.
        unhealthy: responses other than 200, by node.
        slowest_s: the duration of the slowest health check, in seconds.
    """

    num_reads: int = 0
    capacity_tokens: int = 0
    usage: float = 0.0
    overdue_s: float = 0.0
    wrong: list[Pool] = field(default_factory=list)
    health_checks: int = 0
    unhealthy: list[tuple[str, int]] = field(default_factory=list)
    slowest_s: float = 0.0

    async def watch_pool(self, server: RedisServer) -> None:
        """Read the pool until cancelled, and skip reads that fail."""
        while True:
            with suppress(redis.RedisError):
                self.record_snapshot(await asyncio.to_thread(read_pool, server))
            await asyncio.sleep(INTERVAL_S)

    async def watch_health(self, node: NodeProcess) -> None:
        """Check the health of a node until cancelled."""
        now_s = asyncio.get_running_loop().time
        while True:
            begun_s = now_s()
            status = await node.status("/health")
            self.health_checks += 1
            self.slowest_s = max(self.slowest_s, now_s() - begun_s)
            if status != 200:
                self.unhealthy.append((node.name, status))
            await asyncio.sleep(INTERVAL_S)

    def record_snapshot(self, pool: Pool) -> None:
        """Record a snapshot of the pool."""
        self.num_reads += 1
        self.capacity_tokens = min(pool.workers.values(), default=self.capacity_tokens)
        self.usage = max(self.usage, pool.usage)
        self.overdue_s = max(self.overdue_s, *(-left_s for left_s in pool.left_s.values()), 0.0)
        if pool.sums_differ:
            self.wrong.append(pool)


@asynccontextmanager
async def watching(server: RedisServer, *alive: NodeProcess) -> AsyncIterator[Watch]:
    """Observe a pool and its nodes within this context."""
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
