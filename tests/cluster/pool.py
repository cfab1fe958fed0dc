"""The keys of a pool in Redis, read in a single step and checked for consistency."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tests.cluster.nodes import Cluster, eventually
from tests.gateway.redis_server import RedisServer

PREFIX = "draftgate:{default}:"

REQUEST_KEYS = ("lease:", "moves", "worker-claim")
"""Beginnings of the keys that exist only while requests run."""

SNAPSHOT_SCRIPT = """
local P = ARGV[1]
local now = redis.call('TIME')
local workers, capacities = redis.call('ZRANGE', P .. 'hb', 0, -1), {}
for _, worker in ipairs(workers) do
  capacities[#capacities + 1] = redis.call('HGET', P .. 'w:' .. worker, 'capacity_tokens') or '0'
end
return {
  now[1] * 1000000 + now[2], workers, capacities, redis.call('HGETALL', P .. 'leased'),
  redis.call('HGETALL', P .. 'leases'), redis.call('ZRANGE', P .. 'expiry', 0, -1, 'WITHSCORES'),
  redis.call('ZRANGE', P .. 'nodes', 0, -1), redis.call('KEYS', P .. '*'),
}
"""
"""A script that returns a consistent snapshot and writes nothing."""


@dataclass(frozen=True)
class Pool:
    """A snapshot of a pool in Redis.

    Attributes:
        workers: the capacity of each offered worker, in tokens.
        leases: tokens and worker of each request's lease.
        leased: tokens by worker, as counted by the store.
        left_s: remaining time of each lease in seconds, negative after its expiry.
        nodes: nodes that have renewed recently.
        keys: keys of the pool, without the prefix.
    """

    workers: dict[str, int]
    leases: dict[str, tuple[int, str]]
    leased: dict[str, int]
    left_s: dict[str, float]
    nodes: tuple[str, ...]
    keys: frozenset[str]

    @property
    def is_empty(self) -> bool:
        """Whether the pool has no lease, claim or move slot."""
        return not (self.leases or self.leased or self.left_s or self._request_keys)

    @property
    def usage(self) -> float:
        """The largest leased share of a worker's capacity."""
        shares = (self.leased.get(w, 0) / c for w, c in self.workers.items() if c)
        return max(shares, default=0.0)

    @property
    def sums_differ(self) -> bool:
        """Whether the counted tokens differ from the sums of the leases."""
        sums: dict[str, int] = {}
        for tokens, worker in self.leases.values():
            sums[worker] = sums.get(worker, 0) + tokens
        return sums != self.leased or set(self.leases) != set(self.left_s)

    @property
    def _request_keys(self) -> set[str]:
        return {key for key in self.keys if key.startswith(REQUEST_KEYS)}


def read_pool(redis: RedisServer) -> Pool:
    """Return a snapshot of the pool.

    Raises:
        redis.RedisError: the server does not respond.
    """
    now_us, workers, capacities, leased, leases, expiry, nodes, keys = redis.command(
        "EVAL", SNAPSHOT_SCRIPT, 0, PREFIX
    )
    return Pool(
        {worker: int(tokens) for worker, tokens in zip(workers, capacities, strict=True)},
        {request: _lease(text) for request, text in _pairs(leases)},
        {worker: int(tokens) for worker, tokens in _pairs(leased)},
        {request: (float(at_us) - now_us) / 1e6 for request, at_us in _pairs(expiry)},
        tuple(nodes),
        frozenset(key.removeprefix(PREFIX) for key in keys),
    )


async def until_settled(nodes: Cluster, redis: RedisServer) -> None:
    """Wait until the pool is empty and lists only living nodes."""
    workers = {worker.worker_id for worker in nodes.workers}

    async def lists_only_living_nodes() -> bool:
        pool = await asyncio.to_thread(read_pool, redis)
        known = {key.removeprefix("w:") for key in pool.keys if key.startswith("w:")}
        joined = len(pool.nodes) == len(nodes.nodes)
        return pool.is_empty and pool.workers.keys() == known == workers and joined

    await eventually(nodes.at_rest)
    await eventually(lists_only_living_nodes)


def _pairs(flat: list[str]) -> list[tuple[str, str]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _lease(text: str) -> tuple[int, str]:
    _, tokens, worker = text.split(" ", 2)
    return int(tokens), worker
