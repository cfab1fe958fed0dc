"""A shared store costs its processes few messages, and outlives neither them nor their parent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from draftgate.backends.framing import FrameChannel
from draftgate.gateway.state.commands import (
    ListWorkers,
    PublishReport,
    ReleaseLeases,
    RenewLeases,
    ReserveLease,
    ReserveQuota,
    SettleQuotas,
)
from draftgate.gateway.state.local.server import SharedStores, serving_stores
from draftgate.gateway.state.local.store import LocalStore
from draftgate.gateway.state.memory.responses import MemoryResponses
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.state.values import Reservation
from draftgate.policies.quotas import Quota, QuotaReservation
from tests.gateway.harness import until
from tests.gateway.store_contract import report

QUOTA = QuotaReservation("r", "t", 5, Quota(requests_per_minute=1))


@asynccontextmanager
async def shared(path: Path) -> AsyncIterator[tuple[MemoryStore, LocalStore]]:
    """Yield the store of a parent, and the client of a process."""
    memory = MemoryStore()
    async with serving_stores(SharedStores(memory, MemoryResponses(1000, 60)), path):
        client = LocalStore(path)
        await client.call(PublishReport(report()))
        yield memory, client
        await client.close()


async def test_calls_of_one_iteration_wake_the_parent_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that arrive together reserve their leases in one message."""
    received: list[int] = []
    receive = FrameChannel.buffer_updated

    def record(channel: FrameChannel, nbytes: int) -> None:
        if channel is not client._channel:
            received.append(nbytes)
        receive(channel, nbytes)

    async with shared(tmp_path / "stores") as (_, client):
        monkeypatch.setattr(FrameChannel, "buffer_updated", record)
        names = [f"r{number}" for number in range(8)]
        found = await asyncio.gather(
            *(client.call(ReserveLease(name, 1, (), 30.0)) for name in names)
        )
        assert [one.refusal for one in found] == ["unknown"] * 8
        assert len(received) == 1


async def test_cancelled_reservation_returns_its_quota(tmp_path: Path) -> None:
    """The parent releases what a request reserves while its client leaves."""
    async with shared(tmp_path / "stores") as (memory, client):
        for reserve in (
            lambda: client.call(ReserveLease("r", 1, (), 30.0, QUOTA)),
            lambda: client.call(ReserveQuota(QUOTA, 30.0)),
        ):
            task = asyncio.create_task(reserve())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await client.call(ReserveQuota(QUOTA, 30.0)) is None
        await client.call(SettleQuotas(()))
        await until(lambda: memory.quotas._ledger.holds("r"))


async def test_requests_run_without_leases_when_the_parent_has_ended(tmp_path: Path) -> None:
    """Calls that wait for the parent return when it ends, and so do all later calls."""
    async with shared(tmp_path / "stores") as (_, client):
        pass
    client = LocalStore(tmp_path / "stores")
    assert await client.call(ReserveLease("r", 1, (), 30.0)) == Reservation(None, degraded=True)
    assert (await client.call(ListWorkers())).degraded
    assert await client.call(RenewLeases((), 30.0)) == frozenset()
    assert await client.call(ReserveQuota(QUOTA, 30.0)) is None
    await client.call(ReleaseLeases(("r",)))
    await client.call(SettleQuotas(()))
