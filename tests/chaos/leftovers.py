"""What processes and Redis still hold after all requests have ended, and the growth of memory."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import redis

from tests.chaos.node import ChaosNode
from tests.chaos.pool import ChaosPool
from tests.cluster.nodes import START_S
from tests.cluster.pool import read_pool

SAMPLE_S = 5.0
SETTLED_S = 60.0
"""Time after a start in which bounded memory fills."""

GAUGES = ("running_sequences", "waiting_sequences", "kv_cache_usage_ratio")


@dataclass
class Usage:
    """Samples of one process, each with time in seconds, memory in MB and open files."""

    name: str
    pid: int
    samples: list[tuple[float, float, int]] = field(default_factory=list)

    @property
    def growth_mb_per_minute(self) -> float | None:
        """The slope of settled memory, or None for a short life."""
        settled = [(s, mb) for s, mb, _ in self.samples if s > self.samples[0][0] + SETTLED_S]
        if len(settled) < 12:
            return None
        at_s, mb = np.array(settled).T
        return round(float(np.polyfit(at_s / 60, mb, 1)[0]), 3)

    def to_json(self) -> dict[str, Any]:
        """Return the first and last samples, and the slope."""
        first, last = self.samples[0], self.samples[-1]
        return {
            "node": self.name,
            "seconds": round(last[0] - first[0]),
            "rss_mb": [round(first[1], 1), round(last[1], 1)],
            "open_files": [first[2], last[2]],
            "growth_mb_per_minute": self.growth_mb_per_minute,
        }


class Sampler:
    """Samples of all processes of a pool, by process id."""

    def __init__(self, pool: ChaosPool) -> None:
        """Start without samples."""
        self._pool = pool
        self._usages: dict[int, Usage] = {}

    async def run(self) -> None:
        """Take samples until cancelled."""
        now_s = asyncio.get_running_loop().time
        while True:
            for node in self._pool.all_nodes:
                with suppress(OSError, AssertionError, IndexError):
                    usage = self._usages.setdefault(node.pid, Usage(node.name, node.pid))
                    usage.samples.append((now_s(), node.rss_mb, node.open_files))
            await asyncio.sleep(SAMPLE_S)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the usage of processes that lived for two samples."""
        return [one.to_json() for one in self._usages.values() if len(one.samples) > 1]


async def until_clean(pool: ChaosPool) -> dict[str, Any]:
    """Wait until nothing remains, and return what remains after `START_S`."""
    found: dict[str, Any] = {"unknown": True}
    with suppress(TimeoutError):
        async with asyncio.timeout(START_S):
            while found:
                await asyncio.sleep(1.0)
                found = await leftovers(pool)
    return found


async def leftovers(pool: ChaosPool) -> dict[str, Any]:
    """Return the requests, sequences, blocks, leases, claims and moves that remain, by place."""
    found: dict[str, Any] = {}
    for node in pool.all_nodes:
        try:
            if values := await _held(node, has_worker=node in pool.workers):
                found[node.name] = values
        except (httpx.HTTPError, ValueError, KeyError) as error:
            found[node.name] = {"error": repr(error)}
    try:
        state = await asyncio.to_thread(read_pool, pool.redis.primary)
    except redis.RedisError as error:
        return {**found, "redis": {"error": repr(error)}}
    if not state.is_empty:
        found["redis"] = {"leases": state.leases, "leased": state.leased}
    if state.workers.keys() != pool.worker_ids:
        found["workers"] = {"listed": sorted(state.workers), "expected": sorted(pool.worker_ids)}
    return found


async def _held(node: ChaosNode, *, has_worker: bool) -> dict[str, float]:
    values: dict[str, float] = {"in_flight": await node.in_flight()}
    if has_worker:
        for name in GAUGES:
            values[name] = await node.metric_sum(f"draftgate_{name}")
    return {name: value for name, value in values.items() if value}
