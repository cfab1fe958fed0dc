"""A store that can be slow, stuck or unreachable, and a guarded store that uses it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence

from draftgate.gateway.state.exchange import News, Update
from draftgate.gateway.state.flow_store import (
    FlowHop,
    FlowKey,
    FlowStore,
    HopArrival,
    HopLengths,
)
from draftgate.gateway.state.guarded.store import GuardedStore
from draftgate.gateway.state.memory import MemoryStore
from draftgate.gateway.state.quota_store import QuotaStore
from draftgate.gateway.state.store import (
    Lease,
    LeaseCandidate,
    Reservation,
    Snapshot,
    StoreError,
    WorkerReport,
)
from draftgate.policies.flows.types import HopRecord
from draftgate.policies.quotas import Levels, QuotaReservation, Settlement, Shortage, Totals


class FlakyStore:
    """A `Store` that keeps its data in memory and simulates an unreliable connection.

    Attributes:
        inner: the memory store, which other flaky stores may share.
        quotas, flows: those of the memory store, over the same connection.
        delay_s: the delay of each call, in seconds. A call takes effect after the delay.
        failure: the message of the error that each call raises, or None.
        gateways: the number of gateways that a snapshot reports.
        calls: the number of calls by name.
    """

    outage = None

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self.inner = MemoryStore(self._clock)
        self.quotas = FlakyQuotas(self)
        self.flows = FlakyFlows(self)
        self.delay_s = 0.0
        self.failure: str | None = None
        self.gateways = 1
        self.calls = Counter[str]()

    def forget(self) -> None:
        """Delete all data."""
        self.inner = MemoryStore(self._clock)

    async def warm_up(self) -> None:
        await self.trouble("warm_up")

    async def publish(self, report: WorkerReport) -> bool:
        await self.trouble("publish")
        return await self.inner.publish(report)

    async def withdraw(self, worker_id: str, epoch: str, seq: int) -> None:
        await self.trouble("withdraw")
        await self.inner.withdraw(worker_id, epoch, seq)

    async def snapshot(self) -> Snapshot:
        await self.trouble("snapshot")
        return Snapshot((await self.inner.snapshot()).workers, self.gateways)

    async def reserve(
        self,
        request_id: str,
        tokens: int,
        offers: Sequence[LeaseCandidate],
        ttl_s: float,
        quota: QuotaReservation | None = None,
    ) -> Reservation:
        await self.trouble("reserve")
        return await self.inner.reserve(request_id, tokens, offers, ttl_s, quota)

    async def claim(
        self, request_id: str, tokens: int, offers: Sequence[LeaseCandidate], ttl_s: float
    ) -> Lease | None:
        await self.trouble("claim")
        return await self.inner.claim(request_id, tokens, offers, ttl_s)

    async def renew(self, leases: Collection[Lease], ttl_s: float) -> frozenset[str]:
        await self.trouble("renew")
        return await self.inner.renew(leases, ttl_s)

    async def release(self, request_ids: Collection[str]) -> None:
        await self.trouble("release")
        await self.inner.release(request_ids)

    async def begin_move(self, move_id: str, worker_ids: Sequence[str], ttl_s: float) -> bool:
        await self.trouble("begin_move")
        return await self.inner.begin_move(move_id, worker_ids, ttl_s)

    async def end_move(self, move_id: str, worker_ids: Sequence[str]) -> None:
        await self.trouble("end_move")
        await self.inner.end_move(move_id, worker_ids)

    async def exchange(self, update: Update) -> News:
        await self.trouble("exchange")
        return await self.inner.exchange(update)

    async def close(self) -> None:
        self.calls["close"] += 1

    async def trouble(self, name: str) -> None:
        """Count a call, and delay it or let it fail."""
        self.calls[name] += 1
        if self.failure is not None:
            raise StoreError(self.failure)
        await asyncio.sleep(self.delay_s)


class FlakyQuotas:
    """The quotas of a flaky store."""

    def __init__(self, store: FlakyStore) -> None:
        self._store = store

    @property
    def _inner(self) -> QuotaStore:
        return self._store.inner.quotas

    async def reserve(self, reservation: QuotaReservation, ttl_s: float) -> Shortage | None:
        await self._store.trouble("reserve_quota")
        return await self._inner.reserve(reservation, ttl_s)

    async def renew(self, reservations: Collection[QuotaReservation], ttl_s: float) -> int:
        await self._store.trouble("renew_quota")
        await self._inner.renew(reservations, ttl_s)
        return self._store.gateways

    async def settle(self, settlements: Collection[Settlement]) -> None:
        await self._store.trouble("settle_quota")
        await self._inner.settle(settlements)

    async def totals(self, tenant: str) -> Totals:
        return await self._inner.totals(tenant)

    async def levels(self, tenant: str) -> Levels:
        await self._store.trouble("quota_levels")
        return await self._inner.levels(tenant)


class FlakyFlows:
    """The flows of a flaky store."""

    def __init__(self, store: FlakyStore) -> None:
        self._store = store

    @property
    def _inner(self) -> FlowStore:
        return self._store.inner.flows

    async def begin_hop(self, key: FlowKey, arrival: HopArrival) -> FlowHop | None:
        await self._store.trouble("begin_hop")
        return await self._inner.begin_hop(key, arrival)

    async def end_hop(self, key: FlowKey, hop: FlowHop, lengths: HopLengths) -> None:
        await self._store.trouble("end_hop")
        await self._inner.end_hop(key, hop, lengths)

    async def cancel(self, key: FlowKey, hop: FlowHop) -> bool:
        await self._store.trouble("cancel_flow")
        return await self._inner.cancel(key, hop)

    async def take(self, key: FlowKey, hop: FlowHop) -> tuple[HopRecord, ...] | None:
        await self._store.trouble("take_flow")
        return await self._inner.take(key, hop)


def guarded(remote: FlakyStore) -> GuardedStore:
    """Return a guarded store that uses the running loop's clock and no jitter."""
    return GuardedStore(remote, clock=asyncio.get_running_loop().time, uniform=lambda: 0.0)
