"""The cost of the state store's scripts for a large pool, and of the messages on its links.

The workers of a pool have reported, and its gateways hold leases on them. Redis measures the time
of each script (`SLOWLOG`). The study uses its own pool, and removes the keys at the end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
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
REPEATS: Final = 200


async def measure_store(address: str, workers: int, leases: int) -> dict[str, Any]:
    """Return the server's time of each script in microseconds, and the size of its data.

    Args:
        workers: number of workers of the pool.
        leases: number of leases on each worker.
    """
    connected, pool = open_client(address), f"bench-{os.getpid()}"
    begun = round(time.time() * 1e6)
    # The store's time stands still. The preparation may take seconds on a busy machine, and workers
    # without a report would become stale.
    store = RedisStore(connected, pool, "g", f"local function now_us() return {begun} end")
    epoch = new_epoch(time.time(), "bench")
    names = [f"w-{number:08x}-0" for number in range(workers)]
    reports = [
        WorkerReport(
            name, epoch, 1, 10**9, 0, f"http://10.0.{i >> 8}.{i & 255}:8000", "model", 8192
        )
        for i, name in enumerate(names)
    ]
    held = [
        Lease(f"{number:032x}-0", names[number % workers], epoch, TOKENS, begun + number)
        for number in range(workers * leases)
    ]
    # A report includes all leases of its worker, as at low rates.
    reports = [replace(one, watermark=begun + workers * leases) for one in reports]

    async def report(seq: int, some: Sequence[WorkerReport]) -> None:
        for one in some:
            await store.publish(replace(one, seq=seq))

    async def reserve() -> None:
        offers = [LeaseCandidate(one, epoch, 1.0, 0.01, held[-1].number) for one in names[:OFFERS]]
        for number in range(REPEATS):
            found = await store.reserve(f"new-{number}", TOKENS, offers, TTL_S)
            assert found.lease is not None
            last = found.lease.number
            offers = [replace(one, watermark=last) for one in offers]

    async def exchange() -> None:
        start = 0
        for number in range(1, REPEATS + 1):
            news = await store.exchange(Update("g", number, start, 0))
            start = news.start

    try:
        for begin in range(0, len(held), AT_ONCE):
            await store.renew(held[begin : begin + AT_ONCE], TTL_S)
        await report(1, reports)
        snapshot_bytes = sum(
            len(msgspec.json.encode(view.report)) for view in (await store.snapshot()).workers
        )
        released = [
            [lease.request_id for lease in held[begin : begin + AT_ONCE]]
            for begin in range(0, len(held) // 2, AT_ONCE)
        ]
        slots = [
            (f"{n:016x}", names[2 * n % workers : 2 * n % workers + 2]) for n in range(REPEATS)
        ]
        parts: dict[str, Callable[[], Awaitable[object]]] = {
            "reserve": reserve,
            "report": lambda: report(2, reports[:REPEATS]),
            "snapshot": lambda: _repeat(store.snapshot),
            "renew": lambda: _repeat(lambda: store.renew(held[:AT_ONCE], TTL_S)),
            "exchange": exchange,
            "begin_move": lambda: _each(slots, store.begin_move),
            "end_move": lambda: _each_end(slots, store),
            "release": lambda: _each_release(released, store),
        }
        found = {name: await _server_us(connected, work) for name, work in parts.items()}
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


async def _server_us(connected: Connected, work: Callable[[], Awaitable[object]]) -> float:
    """Return the server's time of the only script that some work runs, in microseconds.

    The result is the tenth percentile of the calls, because other processes interrupt some of them.
    """
    client = connected.client
    await client.config_set("slowlog-log-slower-than", 0)
    await client.config_set("slowlog-max-len", 2 * REPEATS)
    await client.slowlog_reset()
    await work()
    calls = await client.slowlog_get(2 * REPEATS)
    await client.config_set("slowlog-log-slower-than", 10_000)
    times = sorted(one["duration"] for one in calls if str(one["command"]).find("EVALSHA") >= 0)
    return float(times[len(times) // 10])


async def _repeat(call: Callable[[], Awaitable[object]]) -> None:
    for _ in range(20):
        await call()


async def _each(slots: Sequence[tuple[str, Sequence[str]]], call: Any) -> None:
    for move_id, ends in slots:
        assert await call(move_id, ends, TTL_S)


async def _each_end(slots: Sequence[tuple[str, Sequence[str]]], store: RedisStore) -> None:
    for move_id, ends in slots:
        await store.end_move(move_id, ends)


async def _each_release(batches: Sequence[Sequence[str]], store: RedisStore) -> None:
    for one in batches:
        await store.release(one)


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
