"""Stores with a controlled clock for the contract tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import pytest

from draftgate.gateway.state.commands import ClaimWorker, ListWorkers, ReserveLease
from draftgate.gateway.state.local.server import SharedStores, serving_stores
from draftgate.gateway.state.local.store import LocalStore
from draftgate.gateway.state.memory.responses import MemoryResponses
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.state.redis.client import open_client
from draftgate.gateway.state.redis.store import RedisStore
from draftgate.gateway.state.store import Store
from draftgate.gateway.state.values import (
    Lease,
    LeaseCandidate,
    Reservation,
    WorkerReport,
    WorkerView,
)
from tests.gateway.redis_server import RedisServer

BEGIN_US: Final = 1_763_800_000_000_000

POOL: Final = "test"
CLOCK_KEY: Final = f"draftgate:{{{POOL}}}:clock"
CLOCK: Final = "local function now_us() return tonumber(redis.call('GET', KEYS[1] .. 'clock')) end"
"""Script that replaces `clock.lua` and reads the time from a key that the test sets."""


class TimedMemory:
    """A memory store and its clock."""

    store: Store

    def __init__(self) -> None:
        self._now_us = BEGIN_US
        self.store = MemoryStore(lambda: self._now_us / 1e6)

    async def begin(self) -> None:
        """Do nothing, because the store is new."""

    async def pass_time(self, seconds: float) -> None:
        """Advance the clock by this number of seconds."""
        self._now_us += round(seconds * 1e6)

    async def flush(self) -> None:
        """Delete all data except the time."""
        self.store = MemoryStore(lambda: self._now_us / 1e6)

    async def close(self) -> None:
        await self.store.close()


class TimedLocal:
    """A client of a memory store that the same process serves on a Unix socket."""

    store: Store

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory = TimedMemory()
        self._serving = AsyncExitStack()
        self.store = LocalStore(path)

    async def begin(self) -> None:
        """Serve the store."""
        memory = self._memory.store
        assert isinstance(memory, MemoryStore)
        stores = SharedStores(memory, MemoryResponses(1 << 20, 60.0))
        await self._serving.enter_async_context(serving_stores(stores, self._path))

    async def pass_time(self, seconds: float) -> None:
        """Advance the clock by this number of seconds."""
        await self._memory.pass_time(seconds)

    async def flush(self) -> None:
        """Serve an empty store instead, as after a restart of the server."""
        await self.close()
        await self._memory.flush()
        await self.begin()

    async def close(self) -> None:
        await self.store.close()
        await self._serving.aclose()


class TimedRedis:
    """A Redis store that takes its time from the test."""

    store: Store

    def __init__(self, url: str) -> None:
        connected = open_client(url)
        self.client = connected.client
        self.store = RedisStore(connected, POOL, "g-test", CLOCK)

    async def begin(self) -> None:
        """Delete all data and set the clock to `BEGIN_US`."""
        await self.client.flushall()
        await self.flush()

    async def flush(self) -> None:
        """Delete all data except the time."""
        now_us = await self.client.get(CLOCK_KEY) or BEGIN_US
        await self.client.flushall()
        await self.client.set(CLOCK_KEY, now_us)

    async def pass_time(self, seconds: float) -> None:
        """Advance the clock by this number of seconds."""
        await self.client.incrby(CLOCK_KEY, round(seconds * 1e6))

    async def close(self) -> None:
        await self.store.close()


Timed = TimedMemory | TimedLocal | TimedRedis


class OnMemory:
    """The store of a contract is that of a node without a pool."""

    @pytest.fixture
    async def timed(self) -> Timed:
        """A memory store."""
        return TimedMemory()


class OnLocal:
    """The store of a contract is that of the processes of a node."""

    @pytest.fixture
    async def timed(self, tmp_path: Path) -> AsyncIterator[Timed]:
        """A memory store on a Unix socket."""
        opened = TimedLocal(tmp_path / "store")
        await opened.begin()
        yield opened
        await opened.close()


class OnRedis:
    """The store of a contract is that of a pool."""

    @pytest.fixture
    async def timed(self, redis_server: RedisServer) -> AsyncIterator[Timed]:
        """A store in a Redis server whose time the test sets."""
        opened = TimedRedis(redis_server.url)
        await opened.begin()
        yield opened
        await opened.close()


def report(worker_id: str = "w", epoch: str = "1", seq: int = 0, **fields: object) -> WorkerReport:
    """Return the report of an idle worker with a capacity of 1,000 tokens and an address."""
    values = {"capacity_tokens": 1000, "address": "http://w:8000", **fields}
    return WorkerReport(worker_id, epoch, seq, **values)


def offer(worker_id: str = "w", epoch: str = "1", *rest: float) -> LeaseCandidate:
    """Return an offer. `rest` contains the score, the score per token and the watermark."""
    return LeaseCandidate(worker_id, epoch, *rest)


async def reserve(
    store: Store, request_id: str, tokens: int = 1, *offers: LeaseCandidate, ttl_s: float = 30.0
) -> Reservation:
    """Reserve tokens of the given offers, by default of worker `w`."""
    return await store.call(ReserveLease(request_id, tokens, offers or (offer(),), ttl_s))


async def granted(
    store: Store, request_id: str, tokens: int = 1, *offers: LeaseCandidate, ttl_s: float = 30.0
) -> Lease:
    """Reserve tokens and assert that the store grants a lease."""
    found = await reserve(store, request_id, tokens, *offers, ttl_s=ttl_s)
    assert found.lease is not None, found.refusal
    assert found.refusal is None
    return found.lease


async def claimed(
    store: Store, request_id: str, tokens: int = 1, *offers: LeaseCandidate, ttl_s: float = 2.0
) -> str | None:
    """Claim one of the given offers, by default worker `w`, and return the claimed worker."""
    found = await store.call(ClaimWorker(request_id, tokens, offers or (offer(),), ttl_s))
    return None if found is None else found.worker_id


async def views(store: Store) -> dict[str, WorkerView]:
    """Return the view of each worker by its id."""
    return {view.worker_id: view for view in (await store.call(ListWorkers())).workers}


async def leased_tokens(store: Store, worker_id: str = "w") -> int:
    """Return the leased tokens of a known worker."""
    return (await views(store))[worker_id].leased_tokens
