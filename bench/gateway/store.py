"""Measure the latency of reservations in the state store, and the maximum rate.

    draftgate bench store --redis redis://127.0.0.1:6379 --json OUT

Each lane runs a single request at a time. A request reserves one of eight workers through a
gateway's guarded store and releases it. Other measurements reserve a part of a quota and settle it,
or reserve both in one call. Each round runs with memory, with the shared store of a node's
processes, and with Redis in turn.

The study measures the time that a request waits for its reservation. A request does not wait for a
release or settlement. The study also measures requests per second of this process, and commands per
lease in the server's own count (`INFO commandstats`). The server's time per script limits the rate
of all gateways together. The study uses its own pool, and removes the pool at the end.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import uvloop

from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from draftgate.gateway.cli.environment import collect_environment
from draftgate.gateway.state.commands import (
    PublishReport,
    ReleaseLeases,
    ReserveLease,
    ReserveQuota,
    SettleQuotas,
)
from draftgate.gateway.state.guarded.store import GuardedStore
from draftgate.gateway.state.local.server import SharedStores, serving_stores
from draftgate.gateway.state.local.store import LocalStore
from draftgate.gateway.state.memory.responses import MemoryResponses
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.state.redis.client import Connected, open_client
from draftgate.gateway.state.redis.store import RedisStore
from draftgate.gateway.state.store import Store
from draftgate.gateway.state.values import LeaseCandidate, WorkerReport, new_epoch
from draftgate.policies.quotas import Quota, QuotaReservation, Settlement

LANES: Final = (1, 4, 16)
WORKERS: Final = 8
"""Number of workers that a reservation chooses from (`gateway.dispatch.leases.MOST_OFFERS`)."""

TOKENS: Final = 300
LEASE_S: Final = 30.0
REPORT_S: Final = 1.0

QUOTA: Final = Quota(requests_per_minute=10**7, tokens_per_minute=10**8)
"""A quota of requests and of tokens that no measurement exhausts."""

RESERVATIONS: Final = ("lease", "quota", "lease and quota")
"""What a request reserves."""


@dataclass
class Waits:
    """The results of a set of requests.

    Attributes:
        seconds: time that each request waited for its reservation.
        degraded: number of reservations that were made without the store.
        took_s: duration of all requests, in seconds.
    """

    seconds: list[float] = field(default_factory=list)
    degraded: int = 0
    took_s: float = 0.0

    def summary(self) -> dict[str, float]:
        """Return the metrics of a part of a round."""
        ranked = sorted(self.seconds)
        return {
            "p50_us": ranked[len(ranked) // 2] * 1e6,
            "p99_us": ranked[int(len(ranked) * 0.99)] * 1e6,
            "requests_per_s": len(ranked) / self.took_s,
            "degraded": self.degraded / len(ranked),
        }


class Subject:
    """A store and the workers that report to it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._epoch = new_epoch(time.time(), "bench")
        self._seq = 0
        self.offers = tuple(
            LeaseCandidate(f"w{n}", self._epoch, float(n % 3), 0.01) for n in range(WORKERS)
        )

    async def report(self) -> None:
        """Report every worker once."""
        self._seq += 1
        for offer in self.offers:
            report = WorkerReport(offer.worker_id, self._epoch, self._seq, 10**9)
            await self.store.call(PublishReport(report))

    async def request(self, name: str, kind: str, waits: Waits) -> None:
        """Reserve capacity, a part of a quota or both for a request, and release or settle it.

        Raises:
            ValueError: the quota is exhausted.
        """
        quota = None if kind == "lease" else QuotaReservation(name, "t", TOKENS, QUOTA)
        begun_s = time.perf_counter()
        if quota is not None and kind == "quota":
            shortage = await self.store.call(ReserveQuota(quota, LEASE_S))
            degraded = self.store.outage is not None
        else:
            command = ReserveLease(name, TOKENS, self.offers, LEASE_S, quota)
            found = await self.store.call(command)
            shortage, degraded = found.shortage, found.degraded
        waits.seconds.append(time.perf_counter() - begun_s)
        waits.degraded += degraded
        if shortage is not None:
            raise ValueError("the quota of the benchmark is exhausted")
        if kind != "quota":
            self.store.post(ReleaseLeases((name,)))
        if quota is not None:
            self.store.post(SettleQuotas((Settlement(name, TOKENS),)))

    @asynccontextmanager
    async def reporting(self) -> AsyncIterator[None]:
        """Report every second while the context lasts."""

        async def beat() -> None:
            while True:
                await asyncio.sleep(REPORT_S)
                await self.report()

        await self.report()
        beating = asyncio.create_task(beat())
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.wait({beating})


async def send_requests(subject: Subject, kind: str, lanes: int, requests: int) -> Waits:
    """Send requests over the lanes, and return their results."""
    waits, names = Waits(), iter(range(requests))

    async def lane() -> None:
        for name in names:
            await subject.request(f"r{name}", kind, waits)

    async with subject.reporting():
        begun_s = time.perf_counter()
        await asyncio.gather(*(lane() for _ in range(lanes)))
        waits.took_s = time.perf_counter() - begun_s
    return waits


async def script_totals(connected: Connected) -> tuple[int, float]:
    """Return the number of scripts that the server has run, and their time in microseconds."""
    statistics = await connected.client.info("commandstats")
    found = statistics.get("cmdstat_evalsha", {"calls": 0, "usec": 0})
    return int(found["calls"]), float(found["usec"])


async def measure_commands(
    subject: Subject, connected: Connected, requests: int
) -> dict[str, float]:
    """Return the commands per reservation and per release, and the server's time per reservation.

    Each report includes all leases so far, as at low rates.
    """
    await subject.report()
    begun, begun_us = await script_totals(connected)
    for number in range(requests):
        command = ReserveLease(f"c{number}", TOKENS, subject.offers, LEASE_S)
        found = await subject.store.call(command)
        if found.lease is not None:
            watermark = found.lease.number
            subject.offers = tuple(replace(one, watermark=watermark) for one in subject.offers)
    reserved, reserved_us = await script_totals(connected)
    await subject.store.call(ReleaseLeases(tuple(f"c{n}" for n in range(requests))))
    await subject.store.close()
    released, _ = await script_totals(connected)
    server_us = (reserved_us - begun_us) / (reserved - begun)
    return {
        "commands_per_reservation": (reserved - begun) / requests,
        "commands_per_release": (released - reserved) / requests,
        "server_us_per_reservation": server_us,
        "reservations_per_s_of_the_server": 1e6 / server_us,
    }


async def measure(address: str, rounds: int, requests: int) -> dict[str, Any]:
    """Return rows by kind of reservation and number of lanes, and the numbers of commands."""
    pool, connected = f"bench-{os.getpid()}", open_client(address)

    def guarded() -> GuardedStore:
        return GuardedStore(RedisStore.at(address, pool, "bench"))

    async with shared_store() as socket:
        stores: dict[str, Store] = {
            "memory": MemoryStore(time.monotonic),
            "processes": GuardedStore(LocalStore(socket)),
            "redis": guarded(),
        }
        subjects = {name: Subject(store) for name, store in stores.items()}
        rows = [
            row
            for kind in RESERVATIONS
            for lanes in LANES
            for row in await measure_rows(subjects, kind, lanes, rounds, requests)
        ]
        for store in stores.values():
            await store.close()
    counted = await measure_commands(Subject(guarded()), connected, requests)
    keys = [key async for key in connected.client.scan_iter(f"draftgate:{{{pool}}}:*")]
    await connected.client.unlink(*keys)
    for close in connected.closing:
        await close()
    return {"rows": rows, "commands": {name: round(value, 3) for name, value in counted.items()}}


async def measure_rows(
    subjects: dict[str, Subject], kind: str, lanes: int, rounds: int, requests: int
) -> list[dict[str, Any]]:
    """Return a row for each store except for memory, relative to memory."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in subjects}
    for subject in subjects.values():  # load the scripts and open the connections
        await send_requests(subject, kind, 1, requests // 10)
    for _ in range(rounds):
        for name, subject in subjects.items():
            found[name].append((await send_requests(subject, kind, lanes, requests)).summary())
    memory = found.pop("memory")
    rows = [
        {"reserves": kind, "store": name, "lanes": lanes, **difference(memory, of_store)}
        for name, of_store in found.items()
    ]
    for one in rows:
        print(*(f"{name}={value}" for name, value in one.items()), flush=True)
    return rows


def difference(
    memory: Sequence[dict[str, float]], store: Sequence[dict[str, float]]
) -> dict[str, float]:
    """Return the medians over rounds, and the paired difference between a store and memory."""
    result: dict[str, float] = {}
    for name in ("p50_us", "p99_us"):
        added = [one[name] - base[name] for base, one in zip(memory, store, strict=True)]
        result[f"added_{name}"] = round(median(added), 1)
        result[f"added_{name}_worst"] = round(max(added), 1)
    result["requests_per_s"] = round(median(one["requests_per_s"] for one in store))
    result["degraded_share"] = round(max(one["degraded"] for one in store), 4)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench store`."""
    parser = bench_parser("store", __doc__)
    parser.add_argument("--redis", required=True, help="URL of a Redis server, as for --join")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--requests", type=int, default=2000, help="number of requests in each part of a round"
    )
    args = parser.parse_args(arguments)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measure(args.redis, args.rounds, args.requests))
    results = {
        **simulated_provenance("store", arguments),
        "device": collect_environment()["cpu"],
        "load_average": os.getloadavg()[0],
        **found,
    }
    print(*(f"{name}={value}" for name, value in found["commands"].items()))
    write_results(args.json, results)


# A process that serves shared memory stores on a Unix socket, as `draftgate serve --processes`.


@asynccontextmanager
async def shared_store() -> AsyncIterator[Path]:
    """Run the process until the block ends, and yield the path of its socket."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "stores")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, str(path), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        await process.stdout.readline()  # the socket exists
        try:
            yield path
        finally:
            process.terminate()
            await process.wait()


async def _serve(path: Path) -> None:
    stores = SharedStores(MemoryStore(time.monotonic), MemoryResponses(1 << 20, 60.0))
    async with serving_stores(stores, path):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(Path(sys.argv[1])))
