"""Tests of a guarded store with a real Redis server that is paused, stopped, killed and emptied.

All waits end on events, so the tests do not depend on the speed of the machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop

from draftgate.gateway.app import Listening
from draftgate.gateway.dispatch.quotas import Quotas, quota_account
from draftgate.gateway.state.commands import (
    ListWorkers,
    PublishReport,
    ReadTotals,
    ReleaseLeases,
    RenewLeases,
    ReserveLease,
)
from draftgate.gateway.state.guarded.calls import DEADLINE_S
from draftgate.gateway.state.guarded.store import GuardedStore
from draftgate.gateway.state.redis.store import RedisStore
from draftgate.gateway.state.values import Lease, Reservation
from draftgate.policies.quotas import Quota, Totals
from draftgate.policies.resilience.breaker import Patience
from tests.gateway.harness import PATIENCE_S, client, eventually, running
from tests.gateway.redis_server import RedisServer
from tests.gateway.stores import leased_tokens, offer, report, reserve
from tests.gateway.tcp_proxy import proxied

ACCOUNT = quota_account("t", "")
QUICK = Patience(failures=3, timeouts_span_s=0.1, first_pause_s=0.02, longest_pause_s=0.1)


def guard(redis: RedisServer, name: str, deadline_s: float) -> GuardedStore:
    remote = RedisStore.at(redis.url, "p", name)
    return GuardedStore(remote, patience=QUICK, deadline_s=deadline_s)


class Gateway:
    """A gateway that sends heartbeats to a store and reserves tokens with short leases."""

    def __init__(self, redis: RedisServer, name: str, deadline_s: float) -> None:
        self.store = guard(redis, name, deadline_s)
        self.name = name
        self.seq = 0
        self.held: dict[str, Lease] = {}

    async def beat(self) -> None:
        self.seq += 1
        worker_report = report(self.name, seq=self.seq, capacity_tokens=10**6)
        await self.store.call(PublishReport(worker_report))
        await self.store.call(RenewLeases(tuple(self.held.values()), 30.0))

    async def reserve(self, name: str, tokens: int = 10) -> Reservation:
        """Reserve tokens of this gateway's own worker and assert that the store grants a lease."""
        found = await reserve(self.store, f"{self.name}-{name}", tokens, offer(self.name))
        assert found.lease is not None, found
        self.held[found.lease.request_id] = found.lease
        return found

    async def end(self, found: Reservation) -> None:
        assert found.lease is not None
        del self.held[found.lease.request_id]
        await self.store.call(ReleaseLeases((found.lease.request_id,)))

    async def serve_until(self, over: Callable[[Reservation], bool]) -> None:
        """Send heartbeats and serve requests until a reservation satisfies the condition."""
        async with asyncio.timeout(PATIENCE_S):
            for index in range(10**9):
                await self.beat()
                found = await self.reserve(f"short{index}")
                await self.end(found)
                if over(found):
                    return
                await asyncio.sleep(0.005)

    async def wait_for_agreement(self) -> None:
        """Wait until the server has exactly this gateway's leases."""
        tokens = sum(lease.tokens for lease in self.held.values())

        async def same() -> bool:
            await self.beat()
            found = await self.store.call(ListWorkers())
            leased = {view.worker_id: view.leased_tokens for view in found.workers}
            return not found.degraded and leased.get(self.name) == tokens

        await eventually(same)


@asynccontextmanager
async def holding(redis: RedisServer, deadline_s: float) -> AsyncIterator[Gateway]:
    """Run a gateway with two leases, and restore the server at the end."""
    made = Gateway(redis, "w", deadline_s)
    await made.serve_until(is_normal)
    for name in ("long1", "long2"):
        await made.reserve(name, 500)
    await made.wait_for_agreement()
    yield made
    redis.start_again()
    await made.store.close()


@pytest.fixture
async def gateway(own_redis: RedisServer) -> AsyncIterator[Gateway]:
    """A gateway with the production deadline."""
    async with holding(own_redis, DEADLINE_S) as made:
        yield made


@pytest.fixture
async def patient(own_redis: RedisServer) -> AsyncIterator[Gateway]:
    """A gateway with a deadline that also suits slow machines."""
    async with holding(own_redis, PATIENCE_S) as made:
        yield made


def is_normal(found: Reservation) -> bool:
    return not found.degraded


def degraded(found: Reservation) -> bool:
    return found.degraded


async def test_a_paused_server(gateway: Gateway, own_redis: RedisServer) -> None:
    """The gateway serves every request while the server is paused and keeps no ended lease."""
    own_redis.command("CLIENT", "PAUSE", 700, "ALL")
    await gateway.serve_until(lambda found: gateway.store.outage is not None)
    await gateway.serve_until(is_normal)
    await gateway.wait_for_agreement()


async def test_a_stopped_server(gateway: Gateway, own_redis: RedisServer) -> None:
    """The gateway serves requests while the server process is stopped and recovers afterwards."""
    own_redis.freeze()
    await gateway.serve_until(lambda found: gateway.store.outage is not None)
    await gateway.serve_until(degraded)
    own_redis.thaw()
    await gateway.serve_until(is_normal)
    await gateway.wait_for_agreement()


async def test_a_server_restarted_empty(gateway: Gateway, own_redis: RedisServer) -> None:
    """The gateway restores its leases exactly after the server restarts without data."""
    own_redis.kill()
    await gateway.serve_until(lambda found: gateway.store.outage is not None)
    assert (await gateway.reserve("taken alone", 7)).degraded
    own_redis.start()
    await gateway.serve_until(is_normal)
    await gateway.wait_for_agreement()
    assert await leased_tokens(gateway.store) == 1007


async def test_a_flushed_server(patient: Gateway, own_redis: RedisServer) -> None:
    """The gateway refuses no request and restores its leases after a flush without an outage."""
    for _ in range(5):
        own_redis.command("FLUSHALL")
        await patient.reserve("in the moment")
        await patient.beat()
    await patient.wait_for_agreement()
    assert patient.store.outage is None


async def test_connections_that_the_server_closes(patient: Gateway, own_redis: RedisServer) -> None:
    """The next call uses a new connection after the server closes an idle connection."""
    for index in range(5):
        own_redis.command("CLIENT", "KILL", "TYPE", "normal")
        assert not (await patient.reserve(f"r{index}")).degraded


def test_broken_connections_under_uvloop(own_redis: RedisServer) -> None:
    """The store repeats a call on a broken connection under uvloop, which raises its own errors."""

    async def scenario() -> None:
        async with proxied(own_redis.url) as proxy:
            url = f"redis://{proxy.url.partition('://')[2]}"
            store = RedisStore.at(url, "p", "g")
            for turns in range(50):
                calls = (store.call(RenewLeases((), 30.0)) for _ in range(3))
                await asyncio.gather(*calls)
                proxy.cut()
                for _ in range(turns % 4):
                    await asyncio.sleep(0)
            await store.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


async def test_separated_gateways_recover(gateway: Gateway, own_redis: RedisServer) -> None:
    """Two separated gateways see each other's workers and leases again after an outage."""
    other = Gateway(own_redis, "v", DEADLINE_S)
    await other.serve_until(is_normal)
    own_redis.kill()
    for member in (gateway, other):
        await member.serve_until(lambda found, member=member: member.store.outage is not None)
        await member.reserve("alone", 11)
    own_redis.start()
    for member in (gateway, other):
        await member.serve_until(is_normal)
        await member.wait_for_agreement()

    async def both() -> bool:
        found = await other.store.call(ListWorkers())
        leased = {view.worker_id: view.leased_tokens for view in found.workers}
        return (leased, found.gateways, found.degraded) == ({"v": 11, "w": 1011}, 2, False)

    await eventually(both)
    await other.store.close()


@asynccontextmanager
async def joined(redis: RedisServer) -> AsyncIterator[tuple[GuardedStore, Listening]]:
    """Run a node of a pool on this server, without the node's own heartbeat."""
    store = guard(redis, "g", PATIENCE_S)
    async with running(store=store, join=redis.url) as server:
        yield store, server
    await store.close()


async def test_a_node_serves_without_its_redis(own_redis: RedisServer) -> None:
    """The node serves requests without Redis, stays healthy and reports the outage in its
    metrics."""
    async with joined(own_redis) as (store, server), client(server) as http:

        async def check_served() -> None:
            response = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
            assert response.status_code == 200

        async def outage_metric() -> str:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/ready")).status_code == 200
            page = (await http.get("/metrics")).text.splitlines()
            (line,) = [item for item in page if item.startswith("draftgate_state_store_out{")]
            return line.rpartition(" ")[2]

        await server.node.heartbeat.beat()
        await check_served()
        assert await outage_metric() == "0.0"
        own_redis.kill()
        async with asyncio.timeout(PATIENCE_S):
            while store.outage is None:
                await check_served()
            assert await outage_metric() == "1.0"
            own_redis.start()
            while store.outage is not None:
                await check_served()

        async def nothing_leased() -> bool:
            await server.node.heartbeat.beat()
            (view,) = (await store.call(ListWorkers())).workers
            return view.leased_tokens == 0

        await eventually(nothing_leased)


class Tenant:
    """A gateway whose tenant holds reservations on a quota in Redis."""

    def __init__(self, redis: RedisServer, name: str) -> None:
        self.store = guard(redis, name, PATIENCE_S)
        quotas = {"t": Quota(10**6, 60, burst_tokens=10**7)}
        self.quotas = Quotas(self.store, quotas, time.monotonic)
        self.name = name
        self.held: dict[str, int] = {}

    async def beat(self) -> None:
        await self.store.call(RenewLeases((), 30.0))
        await self.quotas.renew()

    async def reserve(self, name: str, tokens: int) -> None:
        request_id = f"{self.name}-{name}"
        quota = self.quotas.needed("t", request_id, tokens)
        found = await self.store.call(ReserveLease(f"{request_id}-0", 1, (), 30.0, quota))
        assert self.quotas.record(quota, found.shortage) is None
        self.held[request_id] = tokens

    async def end(self, name: str, used_tokens: int) -> None:
        request_id = f"{self.name}-{name}"
        del self.held[request_id]
        self.quotas.settle(request_id, used_tokens)


async def wait_for_reservations(redis: RedisServer, tenants: list[Tenant]) -> Totals:
    """Wait until the server has the open reservations of all gateways, and return the totals."""
    reader = RedisStore.at(redis.url, "p", "reader")

    async def same() -> bool:
        for tenant in tenants:
            await tenant.beat()
        if any(tenant.store.outage for tenant in tenants):
            return False
        totals = await reader.call(ReadTotals(ACCOUNT))
        assert totals.reserved == totals.settled + totals.released + totals.open
        return totals.open == sum(sum(tenant.held.values()) for tenant in tenants)

    await eventually(same)
    found = await reader.call(ReadTotals(ACCOUNT))
    await reader.close()
    return found


async def test_quotas_after_a_flush_and_a_restart(own_redis: RedisServer) -> None:
    """The server has the open reservations of all gateways, and the use of an outage, after a flush
    and after a restart without data."""
    tenants = [Tenant(own_redis, name) for name in ("one", "two")]
    for tenant in tenants:
        await tenant.reserve("long", 500)
        await tenant.reserve("ended", 100)
        await tenant.end("ended", 40)
    assert (await wait_for_reservations(own_redis, tenants)).settled == 80
    own_redis.command("FLUSHALL")
    await tenants[0].reserve("in the moment", 7)
    await wait_for_reservations(own_redis, tenants)
    own_redis.kill()
    for tenant in tenants:
        async with asyncio.timeout(PATIENCE_S):
            while tenant.store.outage is None:
                await tenant.beat()
        await tenant.reserve("alone", 10**6)
        await tenant.reserve("open", 11)
        await tenant.end("alone", 10**6)
    own_redis.start()
    totals = await wait_for_reservations(own_redis, tenants)
    assert totals.open == 2 * 511 + 7
    assert 1_999_000 < totals.settled <= 2 * 10**6  # a token drains in two seconds
    for tenant in tenants:
        for name in [name.partition("-")[2] for name in tenant.held]:
            await tenant.end(name, 1)
    assert (await wait_for_reservations(own_redis, tenants)).open == 0
    for tenant in tenants:
        await tenant.store.close()
