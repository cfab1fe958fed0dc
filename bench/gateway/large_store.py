"""The cost of the state store's scripts for a large pool, and of the messages on its links.

The workers of a pool have reported, and its gateways hold leases on them. Redis reports its own
CPU time (`INFO cpu`). The study uses its own pool, and removes the keys at the end.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
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
REPEATS: Final = 400
TOGETHER: Final = 8
"""Calls at the same time, as of many gateways."""

Call = Callable[[], Awaitable[object]]


async def measure_store(address: str, workers: int, leases: int) -> dict[str, Any]:
    """Return the server's CPU time of each call in microseconds, and the size of its data.

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

    offers = [LeaseCandidate(one, epoch, 1.0, 0.01, 2 * held[-1].number) for one in names[:OFFERS]]

    def report(seq: int, some: Sequence[WorkerReport]) -> Iterator[Call]:
        return (partial(store.publish, replace(one, seq=seq)) for one in some)

    try:
        for begin in range(0, len(held), AT_ONCE):
            await store.renew(held[begin : begin + AT_ONCE], TTL_S)
        await _run(report(1, reports))
        snapshot_bytes = sum(
            len(msgspec.json.encode(view.report)) for view in (await store.snapshot()).workers
        )
        slots = [(f"{n:016x}", names[2 * n : 2 * n + 2]) for n in range(workers // 2)]
        start = (await store.exchange(Update("g", 1, 0, 0))).start
        parts: dict[str, list[Call]] = {
            "reserve": [
                partial(store.reserve, f"new-{number}", TOKENS, offers, TTL_S)
                for number in range(REPEATS)
            ],
            "report": list(report(2, reports)),
            "snapshot": [store.snapshot] * 20,
            "renew": [partial(store.renew, held[:AT_ONCE], TTL_S)] * 20,
            "exchange": [partial(store.exchange, Update("g", 2, start, 0))] * REPEATS,
            "begin_move": [partial(store.begin_move, *slot, TTL_S) for slot in slots],
            "end_move": [partial(store.end_move, *slot) for slot in slots],
            "release": [
                partial(store.release, [one.request_id for one in held[begin : begin + AT_ONCE]])
                for begin in range(0, len(held), AT_ONCE)
            ],
        }
        memory = await connected.client.info("memory")
        found = {name: await _server_us(connected, calls) for name, calls in parts.items()}
        return {
            "workers": workers,
            "leases": len(held),
            "server_cpu_us": found,
            "leases_per_call": AT_ONCE,
            "reports_bytes": snapshot_bytes,
            "memory_bytes": int(memory["used_memory"]),
        }
    finally:
        keys = [key async for key in connected.client.scan_iter(match=f"draftgate:{{{pool}}}:*")]
        for begin in range(0, len(keys), 1000):
            await connected.client.delete(*keys[begin : begin + 1000])
        await store.close()


async def _server_us(connected: Connected, calls: Sequence[Call]) -> float:
    """Return the server's CPU time of a call in microseconds, including its messages."""
    await calls[0]()  # loads the script
    begun_us = await _cpu_time_us(connected)
    await _run(iter(calls[1:]))
    return (await _cpu_time_us(connected) - begun_us) / (len(calls) - 1)


async def _cpu_time_us(connected: Connected) -> float:
    used = await connected.client.info("cpu")
    return 1e6 * sum(float(used[f"used_cpu_{kind}_main_thread"]) for kind in ("user", "sys"))


async def _run(calls: Iterator[Call]) -> None:
    """Run calls, many at a time, so that the server need not wait for the next one."""
    while some := list(islice(calls, TOGETHER)):
        await asyncio.gather(*(call() for call in some))


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
