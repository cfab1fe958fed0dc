"""The clients of the shared memory stores of leases and of responses."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final, cast

from draftgate.gateway.state.exchange import News, Update
from draftgate.gateway.state.flow_store import FlowHop, FlowKey, HopArrival, HopLengths
from draftgate.gateway.state.local.client import Client
from draftgate.gateway.state.response_store import StoreUsage
from draftgate.gateway.state.store import (
    Lease,
    LeaseCandidate,
    Reservation,
    Snapshot,
    WorkerReport,
)
from draftgate.policies.flows.types import HopRecord
from draftgate.policies.quotas import (
    Levels,
    QuotaReservation,
    Settlement,
    Shortage,
    Totals,
    release_of,
)

SCHEME: Final = "local://"
"""The scheme of the address of shared stores, which the path of their socket follows."""


def socket_path(address: str) -> Path:
    """Return the path of the socket in the address of shared stores."""
    return Path(address.removeprefix(SCHEME))


class LocalStore:
    """A `Store` in the parent of this process (`gateway.state.local.server`).

    Calls fail only if the parent has ended. This process then ends too (`processes.child`), and
    meanwhile runs requests without leases.

    Attributes:
        quotas: the quotas of tenants.
        flows: the flows of tenants.
    """

    outage = None

    def __init__(self, path: Path) -> None:
        """Use the store at a socket, without connecting yet."""
        self._client = Client(path)
        self.quotas = LocalQuotas(self._client)
        self.flows = LocalFlows(self._client)

    async def warm_up(self) -> None:
        """Do nothing, because a connection on this machine takes no time."""

    async def publish(self, report: WorkerReport) -> bool:
        """Replace a worker's report, as `Store.publish` describes."""
        return bool(await self._client.call_or(True, "leases.publish", report))

    async def withdraw(self, worker_id: str, epoch: str, seq: int) -> None:
        """Remove a worker from the pool, as `Store.withdraw` describes."""
        await self._client.call_or(None, "leases.withdraw", worker_id, epoch, seq)

    async def snapshot(self) -> Snapshot:
        """Return the live workers, as `Store.snapshot` describes."""
        alone = Snapshot((), degraded=True)
        return cast(Snapshot, await self._client.call_or(alone, "leases.snapshot"))

    async def reserve(
        self,
        request_id: str,
        tokens: int,
        offers: Sequence[LeaseCandidate],
        ttl_s: float,
        quota: QuotaReservation | None = None,
    ) -> Reservation:
        """Lease tokens of an offered worker, as `Store.reserve` describes."""
        arguments = request_id, tokens, tuple(offers), ttl_s, quota
        alone = Reservation(None, degraded=True)
        try:
            found = await self._client.call_or(alone, "leases.reserve", *arguments)
        except asyncio.CancelledError:
            if quota is not None:
                await self.quotas.settle((release_of(quota.request_id),))
            raise
        return cast(Reservation, found)

    async def claim(
        self, request_id: str, tokens: int, offers: Sequence[LeaseCandidate], ttl_s: float
    ) -> Lease | None:
        """Claim the next room of an offered worker, as `Store.claim` describes."""
        arguments = request_id, tokens, tuple(offers), ttl_s
        return cast(Lease | None, await self._client.call_or(None, "leases.claim", *arguments))

    async def renew(self, leases: Collection[Lease], ttl_s: float) -> frozenset[str]:
        """Extend leases, as `Store.renew` describes."""
        found = await self._client.call_or(frozenset(), "leases.renew", tuple(leases), ttl_s)
        return cast(frozenset[str], found)

    async def release(self, request_ids: Collection[str]) -> None:
        """End the leases and claims of requests, as `Store.release` describes."""
        await self._client.notify("leases.release", tuple(request_ids))

    async def begin_move(self, move_id: str, worker_ids: Sequence[str], ttl_s: float) -> bool:
        """Take the move slots of workers, as `Store.begin_move` describes."""
        arguments = move_id, tuple(worker_ids), ttl_s
        return bool(await self._client.call_or(False, "leases.begin_move", *arguments))

    async def end_move(self, move_id: str, worker_ids: Sequence[str]) -> None:
        """Free the move slots of workers, as `Store.end_move` describes."""
        await self._client.notify("leases.end_move", move_id, tuple(worker_ids))

    async def exchange(self, update: Update) -> News | None:
        """Tell the other gateways, as `Store.exchange` describes."""
        return cast(News | None, await self._client.call_or(None, "leases.exchange", update))

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()


class LocalQuotas:
    """A `QuotaStore` in the parent of this process, without limits if the parent has ended."""

    def __init__(self, client: Client) -> None:
        """Use a client, which the owner of these quotas closes."""
        self._client = client

    async def reserve(self, reservation: QuotaReservation, ttl_s: float) -> Shortage | None:
        """Reserve what a request may use, as `QuotaStore.reserve` describes."""
        try:
            found = await self._client.call_or(None, "quotas.reserve", reservation, ttl_s)
        except asyncio.CancelledError:
            await self.settle((release_of(reservation.request_id),))
            raise
        return cast(Shortage | None, found)

    async def renew(self, reservations: Collection[QuotaReservation], ttl_s: float) -> int:
        """Extend reservations, as `QuotaStore.renew` describes."""
        return int(await self._client.call_or(1, "quotas.renew", tuple(reservations), ttl_s))

    async def settle(self, settlements: Collection[Settlement]) -> None:
        """End reservations, as `QuotaStore.settle` describes."""
        await self._client.notify("quotas.settle", tuple(settlements))

    async def totals(self, tenant: str) -> Totals:
        """Return the totals of a tenant, as `QuotaStore.totals` describes."""
        return cast(Totals, await self._client.call("quotas.totals", tenant))

    async def levels(self, tenant: str) -> Levels:
        """Return what a tenant uses now, as `QuotaStore.levels` describes."""
        return cast(Levels, await self._client.call("quotas.levels", tenant))


class LocalFlows:
    """A `FlowStore` in the parent of this process, which knows no flow if the parent has ended."""

    def __init__(self, client: Client) -> None:
        """Use a client, which the owner of these flows closes."""
        self._client = client

    async def begin_hop(self, key: FlowKey, arrival: HopArrival) -> FlowHop | None:
        """Add a hop to a flow, as `FlowStore.begin_hop` describes."""
        found = await self._client.call_or(None, "flows.begin_hop", key, arrival)
        return cast(FlowHop | None, found)

    async def end_hop(self, key: FlowKey, hop: FlowHop, lengths: HopLengths) -> None:
        """Record the end of a hop, as `FlowStore.end_hop` describes."""
        await self._client.call_or(None, "flows.end_hop", key, hop, lengths)

    async def cancel(self, key: FlowKey, hop: FlowHop) -> bool:
        """End a flow, as `FlowStore.cancel` describes."""
        return bool(await self._client.call_or(True, "flows.cancel", key, hop))

    async def take(self, key: FlowKey, hop: FlowHop) -> tuple[HopRecord, ...] | None:
        """End a flow and return its hops, as `FlowStore.take` describes."""
        found = await self._client.call_or(None, "flows.take", key, hop)
        return cast(tuple[HopRecord, ...] | None, found)


class LocalResponseStore:
    """A `ResponseStore` in another process of this machine."""

    def __init__(self, path: Path) -> None:
        """Use the store at a socket, without connecting yet."""
        self.evicted = 0
        self._client = Client(path)

    async def put(self, tenant: str, response_id: str, value: bytes) -> bool:
        """Store a value, as `ResponseStore.put` describes."""
        stored, displaced = await self._client.call(
            "responses.put_counted", tenant, response_id, value
        )
        self.evicted += displaced
        return bool(stored)

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """Return a value, as `ResponseStore.get` describes."""
        found = await self._client.call("responses.get", tenant, response_id)
        return cast(bytes | None, found)

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a value, as `ResponseStore.delete` describes."""
        return bool(await self._client.call("responses.delete", tenant, response_id))

    async def usage(self) -> StoreUsage:
        """Return the usage, as `ResponseStore.usage` describes."""
        return cast(StoreUsage, await self._client.call("responses.usage"))

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()
