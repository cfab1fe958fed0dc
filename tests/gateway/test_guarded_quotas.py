"""Tests of quotas that several gateways share, whatever their store does.

All tests run in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from draftgate.gateway.dispatch.quotas import Quotas, quota_account
from draftgate.gateway.state.commands import ReadTotals, RenewLeases, ReserveLease
from draftgate.gateway.state.guarded.calls import DEADLINE_S, MOST_CALLS, PATIENCE, QUOTA_DEADLINE_S
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.policies.quotas import Limit, Quota, Shortage, Totals
from tests.gateway.flaky_store import FlakyStore, guarded
from tests.gateway.test_guarded_store import in_virtual_time, now_s

ACCOUNT = quota_account("t", "")
SIXTY = Quota(requests_per_minute=60)
TOKENS = Quota(tokens_per_minute=600)
BACK_S = 2 * PATIENCE.longest_pause_s
"""Time in which a gateway notices a recovered server, in seconds."""


class Gateway:
    """A gateway with its own connection to a store that it shares.

    Attributes:
        remote: the connection.
        quotas: the quotas, by which `t` is limited and `free` is not.
        sent: the number of requests so far.
    """

    def __init__(self, name: str, inner: MemoryStore, gateways: int, quota: Quota) -> None:
        self.name = name
        self.remote = FlakyStore()
        self.remote.inner, self.remote.gateways = inner, gateways
        self.store = guarded(self.remote)
        self.quotas = Quotas(self.store, {"t": quota}, now_s)
        self.sent = 0

    async def reserve(self, tokens: int = 1, tenant: str = "t") -> str | None:
        """Return the id of a new request if its reservation is granted.

        Every second request takes a lease in the same call, which no worker grants.
        """
        self.sent += 1
        request_id = f"{self.name}{self.sent}"
        shortage = await self.shortage(request_id, tokens, tenant, leases=self.sent % 2 == 0)
        return None if shortage else request_id

    async def shortage(
        self, request_id: str, tokens: int, tenant: str = "t", *, leases: bool = False
    ) -> Shortage | None:
        """Reserve the quota of a request, and return the shortage."""
        needed = self.quotas.needed(tenant, request_id, tokens)
        if needed is None:
            return None
        if not leases:
            return await self.quotas.reserve(needed)
        found = await self.store.call(ReserveLease(f"{request_id}-0", 1, (), 30.0, needed))
        return self.quotas.record(needed, found.shortage)

    async def grants(self, count: int, tokens: int = 1) -> int:
        """Send requests, and return the number of granted requests."""
        return sum([await self.reserve(tokens) is not None for _ in range(count)])

    async def beat(self) -> None:
        await self.store.call(RenewLeases((), 30.0))
        await self.quotas.renew()

    async def lose_store(self, failure: str = "refused") -> None:
        """Let every call fail until the breaker opens."""
        self.remote.failure = failure
        while self.store.outage is None or self.store.quotas.outage is None:
            await self.beat()

    async def end(self) -> None:
        """Close the connection as a crash does, without settling anything."""
        self.remote.failure = "dead"
        await self.store.close()


@asynccontextmanager
async def pool(gateways: int = 2, quota: Quota = SIXTY) -> AsyncIterator[list[Gateway]]:
    """Run gateways that share a store."""
    inner = MemoryStore(asyncio.get_running_loop().time)
    found = [Gateway("abcd"[index], inner, gateways, quota) for index in range(gateways)]
    for gateway in found:
        await gateway.beat()
    yield found
    for gateway in found:
        await gateway.store.close()


async def pass_time(gateways: list[Gateway], seconds: float) -> None:
    """Let time pass, with a heartbeat of every gateway each second."""
    for _ in range(round(seconds)):
        await asyncio.sleep(1.0)
        for gateway in gateways:
            await gateway.beat()


async def totals(gateway: Gateway) -> Totals:
    """Return the totals of the shared store."""
    return await gateway.remote.call(ReadTotals(ACCOUNT))


@in_virtual_time
async def test_two_gateways_grant_exactly_the_quota_at_one_time() -> None:
    """Two gateways together grant exactly 60 requests of a quota of 60 at one time."""
    async with pool() as (first, second):
        found = [await gateway.grants(1) for _ in range(100) for gateway in (first, second)]
        assert sum(found) == 60
        assert now_s() == 0.0


@in_virtual_time
async def test_two_gateways_grant_the_rate_over_time() -> None:
    """Two gateways together grant 60 + t requests in t seconds."""
    async with pool() as gateways:
        granted = 0
        for _ in range(31):
            for gateway in gateways:
                granted += await gateway.grants(70)
            await pass_time(gateways, 1.0)
        assert granted == 60 + 30


@in_virtual_time
async def test_tenants_without_a_quota_cost_no_call() -> None:
    """A request of a tenant without a quota reserves nothing, and ends without a call."""
    async with pool() as (gateway, _):
        gateway.remote.calls.clear()
        request_id = await gateway.reserve(5, "free")
        assert request_id is not None
        gateway.quotas.settle(request_id, 3)
        await gateway.quotas.renew()
        await asyncio.sleep(1.0)
        assert set(gateway.remote.calls) <= {"RenewQuotas"}


@in_virtual_time
async def test_a_request_costs_one_call_and_settles_in_the_background() -> None:
    """A reservation is one call. Simultaneous settlements take few calls, and no caller waits."""
    async with pool() as (gateway, _):
        gateway.remote.calls.clear()
        names = [await gateway.reserve(2) for _ in range(50)]
        assert gateway.remote.calls == {"ReserveQuota": 25, "ReserveLease": 25}
        gateway.remote.delay_s = 0.001
        begin_s = now_s()
        for name in names:
            gateway.quotas.settle(name, 1)
        assert now_s() == begin_s
        await asyncio.sleep(1.0)
        assert gateway.remote.calls["SettleQuotas"] <= 2
        assert await totals(gateway) == Totals(100, 50, 50, 0)


@in_virtual_time
async def test_no_reservation_waits_longer_than_the_deadline() -> None:
    """A reservation takes at most the deadline, and then the gateway decides alone."""
    async with pool() as (gateway, _):
        gateway.remote.delay_s = 1.0
        begin_s = now_s()
        assert await gateway.reserve() is not None
        assert now_s() - begin_s == pytest.approx(QUOTA_DEADLINE_S)


@in_virtual_time
@pytest.mark.parametrize("delay_s", [2 * DEADLINE_S, 0.9 * QUOTA_DEADLINE_S])
async def test_a_slow_store_decides_about_quotas(delay_s: float) -> None:
    """Two gateways grant exactly the quota although the store is too slow for leases."""
    async with pool() as gateways:
        for gateway in gateways:
            gateway.remote.delay_s = delay_s
        await pass_time(gateways, 10.0)
        assert None not in {gateway.store.outage for gateway in gateways}
        calls = (gateway.reserve() for gateway in gateways * 25)
        found = await asyncio.gather(*calls)
        assert len(found) - found.count(None) == 50
        granted = [await gateway.grants(12) for gateway in gateways]
        assert sum(granted) <= 10 + now_s() - 10.0


@in_virtual_time
async def test_a_burst_of_reservations_takes_turns() -> None:
    """A burst of more requests than calls in flight is granted exactly the quota."""
    async with pool() as gateways:
        for gateway in gateways:
            gateway.remote.delay_s = QUOTA_DEADLINE_S / 8
        found = await asyncio.gather(
            *(gateway.reserve() for gateway in gateways for _ in range(3 * MOST_CALLS))
        )
        assert len(found) - found.count(None) == 60


@in_virtual_time
async def test_a_burst_at_a_hung_store_waits_for_one_deadline() -> None:
    """No request of a burst waits longer than the deadline, and late turns make no call."""
    async with pool() as (gateway, _):
        gateway.remote.delay_s = 10.0
        begin_s = now_s()
        found = await asyncio.gather(*(gateway.reserve() for _ in range(3 * MOST_CALLS)))
        assert len(found) - found.count(None) == 30
        assert now_s() - begin_s == pytest.approx(QUOTA_DEADLINE_S)
        gateway.remote.calls.clear()
        await asyncio.sleep(60.0)
        assert gateway.remote.calls["ReserveLease"] == gateway.remote.calls["ReserveQuota"] == 0


@in_virtual_time
async def test_grants_of_an_outage_are_charged_when_it_ends() -> None:
    """The end of an outage itself charges what a gateway granted alone, before any heartbeat."""
    async with pool(quota=TOKENS) as (first, second):
        await first.lose_store()
        ended, opened = await first.reserve(120), await first.reserve(150)
        assert None not in {ended, opened}
        first.quotas.settle(ended, 100)
        first.remote.failure = None
        await asyncio.sleep(1.5 * PATIENCE.longest_pause_s)
        found = await totals(second)
        assert found.open == 150
        assert found.settled == pytest.approx(100, abs=5 * PATIENCE.longest_pause_s)


@in_virtual_time
async def test_gateways_share_the_quota_during_an_outage() -> None:
    """Each of two gateways grants half of the quota and of its rate during an outage."""
    async with pool() as gateways:
        for gateway in gateways:
            await gateway.lose_store()
        assert [await gateway.grants(100) for gateway in gateways] == [30, 30]
        await pass_time(gateways, 10.0)
        assert [await gateway.grants(100) for gateway in gateways] == [5, 5]


@in_virtual_time
async def test_a_single_gateway_grants_exactly_its_quota_during_an_outage() -> None:
    """The only gateway of a pool continues without any overshoot when its store fails."""
    async with pool(1) as (gateway,):
        assert await gateway.grants(40) == 40
        await gateway.lose_store()
        assert await gateway.grants(40) == 20


@in_virtual_time
async def test_a_request_larger_than_the_share_fits_alone() -> None:
    """During an outage, a request larger than the share fits if nothing else is in use."""
    async with pool(quota=TOKENS) as (gateway, _):
        await gateway.lose_store()
        assert await gateway.reserve(500) is not None
        assert await gateway.reserve(1) is None
        shortage = await gateway.shortage("large", 500)
        never = await gateway.shortage("larger", 601, leases=True)
        assert (shortage.limit, shortage.retry_after_s) == (Limit.TOKENS, pytest.approx(100.0, 0.1))
        assert (never.retry_after_s, never.most) == (None, 600)


@in_virtual_time
async def test_an_outage_is_put_back_into_the_store() -> None:
    """After an outage, the store knows open reservations and what ended requests still use."""
    async with pool(quota=TOKENS) as (first, second):
        for gateway in (first, second):
            await gateway.lose_store()
        begin_s = now_s()
        ended = await first.reserve(300)
        opened = await second.reserve(200)
        assert None not in {ended, opened}
        first.quotas.settle(ended, 250)
        for gateway in (first, second):
            gateway.remote.failure = None
        await pass_time([first, second], BACK_S)
        assert first.store.outage is second.store.outage is None
        drained = 5 * (now_s() - begin_s)  # the first gateway's share of the rate
        found = await totals(first)
        assert found.open == 200
        assert 250 - drained <= found.settled <= 250
        free = 600 - 200 - found.settled
        assert await first.reserve(int(free) + 1 + 10 * round(BACK_S)) is None
        second.quotas.settle(opened, 50)
        await asyncio.sleep(0.1)
        found = await totals(first)
        assert (found.open, found.released) == (0, 150)


@in_virtual_time
async def test_reservations_are_restored_after_a_flush() -> None:
    """The store has every open reservation again after the next heartbeat."""
    async with pool(quota=TOKENS) as gateways:
        for gateway in gateways:
            assert await gateway.reserve(100) is not None
        inner = MemoryStore(asyncio.get_running_loop().time)
        for gateway in gateways:
            gateway.remote.inner = inner
        assert await totals(gateways[0]) == Totals()
        await pass_time(gateways, 1.0)
        assert await totals(gateways[0]) == Totals(200, 0, 0, 200)


@in_virtual_time
async def test_reservations_of_a_killed_gateway_are_charged_in_full() -> None:
    """The store charges the reservations of a dead gateway in full after 30 s."""
    async with pool(quota=TOKENS) as (first, second):
        assert await first.reserve(100) is not None
        alive = await second.reserve(50)
        await first.end()
        await pass_time([second], 31.0)
        assert await totals(second) == Totals(150, 100, 0, 50)
        second.quotas.settle(alive, 20)
        await asyncio.sleep(0.1)
        assert await totals(second) == Totals(150, 120, 30, 0)


@in_virtual_time
async def test_a_cancelled_reservation_leaves_nothing_open() -> None:
    """A client that disconnects during a reservation leaves nothing reserved."""
    async with pool() as (gateway, _):
        for ticks in range(12):
            gateway.remote.delay_s = (0.0, 0.01, 0.1)[ticks % 3]
            call = asyncio.create_task(gateway.reserve(5))
            for _ in range(ticks):
                await asyncio.sleep(0)
            if ticks == 11:
                await asyncio.sleep(0.05)
            call.cancel()
            await asyncio.wait({call})
            if not call.cancelled():
                gateway.quotas.release(call.result())
            await asyncio.sleep(1.0)
            assert (await totals(gateway)).open == 0
            assert (await gateway.store.call(ReadTotals(ACCOUNT))).open == 0


@in_virtual_time
async def test_a_late_grant_of_a_refused_request_is_released() -> None:
    """The store keeps no reservation that it granted after the gateway had refused the request."""
    async with pool() as (gateway, _):
        assert await gateway.grants(30) == 30
        gateway.remote.delay_s = 1.0
        assert await gateway.reserve() is None
        await asyncio.sleep(5.0)
        assert (await totals(gateway)).open == 30


@in_virtual_time
@pytest.mark.parametrize("ended_s", [0.0, 1.0])
async def test_a_late_grant_is_charged_once(ended_s: float) -> None:
    """A reservation that the store granted late is charged once, whenever its request ends."""
    async with pool(quota=TOKENS) as gateways:
        gateway = gateways[0]
        gateway.remote.delay_s = 1.0
        request_id = await gateway.reserve(100)
        assert request_id is not None
        gateway.remote.delay_s = 0.0
        await asyncio.sleep(ended_s)
        gateway.quotas.settle(request_id, 60)
        await asyncio.sleep(1.0)
        await gateway.beat()
        await asyncio.sleep(1.0)
        found = await totals(gateway)
        assert (found.open, found.settled) == (0, pytest.approx(60, abs=10))


@in_virtual_time
async def test_a_gateway_counts_its_open_reservations() -> None:
    """A gateway counts its open requests of tenants with a quota."""
    async with pool() as (gateway, other):
        assert await gateway.reserve(tenant="free") is not None
        request_id = await gateway.reserve()
        assert (gateway.quotas.open, other.quotas.open) == (1, 0)
        gateway.quotas.settle(request_id, 1)
        assert gateway.quotas.open == 0


@in_virtual_time
async def test_close_sends_pending_settlements() -> None:
    """A gateway that closes has settled all of its ended requests."""
    async with pool() as (gateway, _):
        request_id = await gateway.reserve(5)
        gateway.quotas.settle(request_id, 2)
        await gateway.store.close()
        assert await totals(gateway) == Totals(5, 2, 3, 0)


@in_virtual_time
async def test_settlements_of_a_long_outage_are_bounded() -> None:
    """The gateway forgets settlements whose reservations have expired in the store."""
    async with pool() as (gateway, _):
        await gateway.lose_store()
        for _ in range(500):
            request_id = await gateway.reserve()
            if request_id is not None:
                gateway.quotas.settle(request_id, 1)
            await asyncio.sleep(1.0)
            await gateway.beat()
        assert len(gateway.store.quotas._pending) <= 31
