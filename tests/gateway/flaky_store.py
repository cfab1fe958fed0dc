"""A store that can be slow, stuck or unreachable, and a guarded store that uses it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence

from draftgate.gateway.state.guarded import GuardedStore
from draftgate.gateway.state.memory import MemoryStore
from draftgate.gateway.state.store import (
    Lease,
    LeaseCandidate,
    Reservation,
    Snapshot,
    StoreError,
    WorkerReport,
)


class FlakyStore:
    """A `Store` that keeps its data in memory and simulates an unreliable connection.

    Attributes:
        inner: the memory store.
        delay_s: the delay of each call, in seconds. A call takes effect after the delay.
        failure: the message of the error that each call raises, or None.
        gateways: the number of gateways that a snapshot reports.
        calls: the number of calls by name.
    """

    outage = None

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self.inner = MemoryStore(self._clock)
        self.delay_s = 0.0
        self.failure: str | None = None
        self.gateways = 1
        self.calls = Counter[str]()

    def forget(self) -> None:
        """Delete all data."""
        self.inner = MemoryStore(self._clock)

    async def publish(self, report: WorkerReport) -> bool:
        await self._trouble("publish")
        return await self.inner.publish(report)

    async def withdraw(self, worker_id: str, epoch: str, seq: int) -> None:
        await self._trouble("withdraw")
        await self.inner.withdraw(worker_id, epoch, seq)

    async def snapshot(self) -> Snapshot:
        await self._trouble("snapshot")
        return Snapshot((await self.inner.snapshot()).workers, self.gateways)

    async def reserve(
        self, request_id: str, tokens: int, offers: Sequence[LeaseCandidate], ttl_s: float
    ) -> Reservation:
        await self._trouble("reserve")
        return await self.inner.reserve(request_id, tokens, offers, ttl_s)

    async def renew(self, leases: Collection[Lease], ttl_s: float) -> frozenset[str]:
        await self._trouble("renew")
        return await self.inner.renew(leases, ttl_s)

    async def release(self, request_ids: Collection[str]) -> None:
        await self._trouble("release")
        await self.inner.release(request_ids)

    async def close(self) -> None:
        self.calls["close"] += 1

    async def _trouble(self, name: str) -> None:
        self.calls[name] += 1
        if self.failure is not None:
            raise StoreError(self.failure)
        await asyncio.sleep(self.delay_s)


def guarded(remote: FlakyStore) -> GuardedStore:
    """Return a guarded store that uses the running loop's clock and no jitter."""
    return GuardedStore(remote, clock=asyncio.get_running_loop().time, uniform=lambda: 0.0)
