"""What processes and Redis still hold after all requests have ended, and the growth of memory."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import redis
from numpy.typing import NDArray

from tests.chaos.node import ChaosNode
from tests.chaos.pool import ChaosPool
from tests.chaos.usage import open_files, resident_mb
from tests.cluster.nodes import START_S
from tests.cluster.pool import read_pool

SAMPLE_S = 5.0
SETTLED_S = 120.0
"""Time in which a process starts and fills its bounded memory. The start of an engine takes a
minute on a busy machine."""

LEAST_SAMPLES = 24

GAUGES = ("running_sequences", "waiting_sequences", "kv_cache_usage_ratio")


@dataclass
class Usage:
    """Samples of one process, each with time in seconds, memory in MB and open files."""

    name: str
    pid: int
    samples: list[tuple[float, float, int]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any] | None:
        """Return the first and last settled samples, and the slopes of the memory in all of them
        and in the later half, or None for a short life."""
        settled = [one for one in self.samples if one[0] > self.samples[0][0] + SETTLED_S]
        if len(settled) < LEAST_SAMPLES:
            return None
        at_s, mb, files = np.array(settled).T
        return {
            "node": self.name,
            "seconds": round(at_s[-1] - at_s[0]),
            "rss_mb": [round(mb[0], 1), round(mb[-1], 1)],
            "open_files": [int(files[0]), int(files[-1])],
            "growth_mb_per_minute": _slope(at_s / 60, mb),
            "late_growth_mb_per_minute": _slope(at_s[len(mb) // 2 :] / 60, mb[len(mb) // 2 :]),
        }


def _slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    return round(float(np.polyfit(x, y, 1)[0]), 3)


class Sampler:
    """Samples of all processes of a pool, by process id."""

    def __init__(self, pool: ChaosPool) -> None:
        self._pool = pool
        self._usages: dict[int, Usage] = {}

    async def run(self) -> None:
        """Take samples until cancelled."""
        now_s = asyncio.get_running_loop().time
        while True:
            for node in self._pool.all_nodes:
                with suppress(OSError, AssertionError, IndexError):
                    usage = self._usages.setdefault(node.pid, Usage(node.name, node.pid))
                    sample = resident_mb(node.pid), open_files(node.pid)
                    if node.is_running:
                        usage.samples.append((now_s(), *sample))
            await asyncio.sleep(SAMPLE_S)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the settled usage of processes with a long life, the longest first."""
        found = [used for one in self._usages.values() if one.samples and (used := one.to_json())]
        return sorted(found, key=lambda used: -used["seconds"])


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
