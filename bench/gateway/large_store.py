"""The cost of the state store's scripts for a large pool, and of the messages on its links.

The workers of a pool have reported, and its gateways hold leases on them. Redis itself measures the
time of its scripts (`INFO commandstats`). The study uses its own pool, and removes the keys at the
end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Final

import msgspec

from draftgate.backends.remote_worker import Update as WorkerUpdate
from draftgate.backends.types import Delta
from draftgate.gateway.state.exchange import Update
from draftgate.gateway.state.guarded import AT_ONCE
from draftgate.gateway.state.redis.client import Connected, open_client
from draftgate.gateway.state.redis.store import RedisStore
from draftgate.gateway.state.store import Lease, LeaseCandidate, WorkerReport, new_epoch
from draftgate.policies.types import WorkerLoad, WorkerSpeed

OFFERS: Final = 8
"""Workers that a reservation chooses from (`gateway.dispatch.leases.MOST_OFFERS`)."""

TOKENS: Final = 600
TTL_S: Final = 60.0
REPEATS: Final = 50


async def measure_store(address: str, workers: int, leases: int) -> dict[str, Any]:
    """Return the server's time of each script in microseconds, and the size of a snapshot.

    Args:
        workers: number of workers of the pool.
        leases: number of leases on each worker.
    """
    connected, pool = open_client(address), f"bench-{os.getpid()}"
    store = RedisStore(connected, pool, "g")
    epoch = new_epoch(time.time(), "bench")
    names = [f"w-{number:08x}-0" for number in range(workers)]
    reports = [
        WorkerReport(name, epoch, 1, 10**9, 0, f"http://10.0.{i >> 8}.{i & 255}:8000", "model", 8192)
        for i, name in enumerate(names)
    ]
    offers = [LeaseCandidate(name, epoch, 1.0, 0.01) for name in names]
    held = list[Lease]()

    async def report() -> None:
        for one in reports[:REPEATS]:
            reports[reports.index(one)] = newer = replace(one, seq=one.seq + 1)
            await store.publish(newer)

    async def reserve(count: int) -> None:
        for number in range(count):
            some = [offers[(number * OFFERS + i) % workers] for i in range(OFFERS)]
            found = await store.reserve(f"{len(held):032x}-0", TOKENS, some, TTL_S)
            assert found.lease is not None
            held.append(found.lease)
            at = names.index(found.lease.worker_id)
            offers[at] = replace(offers[at], watermark=found.lease.number)

    async def exchange() -> None:
        start = 0
        for number in range(1, REPEATS + 1):
            news = await store.exchange(Update("g", number, start, 0))
            start = news.start

    try:
        for one in reports:
            await store.publish(one)
        await reserve(workers * leases)
        for index, one in enumerate(reports):  # reports contain the watermarks of all leases
            reports[index] = replace(one, seq=2, watermark=offers[index].watermark)
            await store.publish(reports[index])
        snapshot_bytes = sum(
            len(msgspec.json.encode(view.report)) for view in (await store.snapshot()).workers
        )
        released = [lease.request_id for lease in held[-AT_ONCE:]]
        slots = [(f"{n:016x}", names[2 * n % workers : 2 * n % workers + 2]) for n in range(REPEATS)]
        parts: dict[str, tuple[int, Callable[[], Awaitable[object]]]] = {
            "reserve": (REPEATS, lambda: reserve(REPEATS)),
            "report": (REPEATS, report),
            "snapshot": (5, lambda: _repeat(5, store.snapshot)),
            "renew": (5, lambda: _repeat(5, lambda: store.renew(held[:AT_ONCE], TTL_S))),
            "exchange": (REPEATS, exchange),
            "begin_move": (REPEATS, lambda: _each(slots, store.begin_move)),
            "end_move": (REPEATS, lambda: _each_end(slots, store)),
            "release": (1, lambda: store.release(released)),
        }
        found = {name: await _server_us(connected, *part) for name, part in parts.items()}
        memory = await connected.client.info("memory")
        return {
            "workers": workers,
            "leases": len(held),
            "server_us": found,
            "leases_per_call": AT_ONCE,
            "reports_bytes": snapshot_bytes,
            "memory_bytes": int(memory["used_memory"]),
        }
    finally:
        keys = [key async for key in connected.client.scan_iter(match=f"draftgate:{{{pool}}}:*")]
        for begin in range(0, len(keys), 1000):
            await connected.client.delete(*keys[begin : begin + 1000])
        await store.close()


async def _server_us(
    connected: Connected, calls: int, work: Callable[[], Awaitable[object]]
) -> float:
    """Return the server's time of a call of the only script that some work runs."""
    await connected.client.config_resetstat()
    await work()
    stats = (await connected.client.info("commandstats"))["cmdstat_evalsha"]
    assert stats["calls"] == calls
    return float(stats["usec"]) / calls


async def _repeat(times: int, call: Callable[[], Awaitable[object]]) -> None:
    for _ in range(times):
        await call()


async def _each(slots: Sequence[tuple[str, Sequence[str]]], call: Any) -> None:
    for move_id, ends in slots:
        assert await call(move_id, ends, TTL_S)


async def _each_end(slots: Sequence[tuple[str, Sequence[str]]], store: RedisStore) -> None:
    for move_id, ends in slots:
        await store.end_move(move_id, ends)


def measure_link() -> dict[str, float]:
    """Return the size of updates in bytes, and the CPU time to encode and decode them."""
    speed = WorkerSpeed(0.0251, 2.2e-4, 1.1e-5, 0.0241, 1.2e-5, 2.2e-4, 6.5e-9)
    load = WorkerLoad(
        *(23, 1, 4012, 8000, 0.31, 0.72, ("ngram", "draft_model"), 0.021),
        max_sequences=256,
        prompt_tokens=1311,
        step_tokens=512,
        speed=speed,
        steps=1234567,
        head_tokens=611,
    )
    deltas = [(str(100_000 + number), Delta(0, (1234,), " token")) for number in range(4)]
    updates = {
        "load": WorkerUpdate([], load, sent_s=12345.678, watermark=1764000000000000),
        "deltas": WorkerUpdate(deltas, sent_s=12345.678),
    }
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(WorkerUpdate)
    return {
        key: value
        for name, update in updates.items()
        for key, value in _message_costs(name, update, encoder, decoder)
    }


def _message_costs(
    name: str, update: WorkerUpdate, encoder: msgspec.msgpack.Encoder, decoder: Any
) -> Iterator[tuple[str, float]]:
    data = encoder.encode(update)
    yield f"{name}_bytes", float(len(data))
    yield f"{name}_encode_us", _cpu_us(lambda: encoder.encode(update))
    yield f"{name}_decode_us", _cpu_us(lambda: decoder.decode(data))


def _cpu_us(call: Callable[[], object], repeats: int = 2000) -> float:
    """Return the mean CPU time of a call in microseconds, the least of five."""
    found = []
    for _ in range(5):
        begun_s = time.thread_time()
        for _ in range(repeats):
            call()
        found.append((time.thread_time() - begun_s) / repeats * 1e6)
    return min(found)
