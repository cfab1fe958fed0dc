"""Tests of quotas in memory and in a real Redis server, which must give the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from draftgate.gateway.state.commands import (
    ReadTotals,
    RenewLeases,
    RenewQuotas,
    ReserveQuota,
    SettleQuotas,
)
from draftgate.gateway.state.redis.store import RedisStore
from draftgate.gateway.state.store import RemoteStore
from draftgate.gateway.state.values import Lease
from draftgate.policies.quotas import Quota, QuotaReservation, Settlement
from tests.examples import examples
from tests.gateway.quota_contract import QuotaContract, reservation
from tests.gateway.redis_server import RedisServer
from tests.gateway.stores import OnLocal, OnMemory, OnRedis, Timed, TimedMemory, TimedRedis

T = TypeVar("T")

TTL_S = 10.0
TENANTS = ["a", "b"]
REQUESTS = [f"r{index}" for index in range(8)]

tenants = st.sampled_from(TENANTS)
requests = st.sampled_from(REQUESTS)


class TestMemoryQuotas(OnMemory, QuotaContract):
    """The quotas of a node without a pool."""


class TestLocalQuotas(OnLocal, QuotaContract):
    """The quotas that the processes of a node share."""


class TestRedisQuotas(OnRedis, QuotaContract):
    """The quotas of a pool."""


class QuotaMachine(RuleBasedStateMachine):
    """Requests that reserve, renew and settle in several stores, which must agree."""

    def __init__(self, opened: Callable[[], list[Timed]]) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.timed = self.runner.run(self._open(opened))
        self.quotas = dict.fromkeys(TENANTS, Quota(60, 300))
        self.held: dict[str, QuotaReservation] = {}

    async def _open(self, opened: Callable[[], list[Timed]]) -> list[Timed]:
        found = opened()
        for timed in found:
            await timed.begin()
        return found

    def teardown(self) -> None:
        for timed in self.timed:
            self.runner.run(timed.close())
        self.runner.close()

    def run_on_all(self, call: Callable[[RemoteStore], Awaitable[T]]) -> T:
        """Execute a step on every store and assert that all results are equal."""

        async def done(store: RemoteStore) -> T:
            return await call(store)

        first, *others = [self.runner.run(done(timed.store)) for timed in self.timed]
        assert all(other == first for other in others)
        return first

    @rule(
        tenant=tenants,
        requests_per_minute=st.none() | st.integers(1, 120),
        tokens_per_minute=st.none() | st.integers(1, 10**8),
        burst=st.none() | st.integers(1, 500),
    )
    def change(self, tenant, requests_per_minute, tokens_per_minute, burst) -> None:
        tokens_burst = burst if tokens_per_minute else None
        self.quotas[tenant] = Quota(
            requests_per_minute, tokens_per_minute, burst_tokens=tokens_burst
        )

    @rule(request=requests, tenant=tenants, tokens=st.integers(0, 150))
    def reserve(self, request: str, tenant: str, tokens: int) -> None:
        made = QuotaReservation(request, tenant, tokens, self.quotas[tenant])
        if self.run_on_all(lambda store: store.call(ReserveQuota(made, TTL_S))) is None:
            self.held.setdefault(request, made)

    @rule(request=requests, used=st.integers(0, 200), counted=st.integers(0, 1))
    def settle(self, request: str, used: int, counted: int) -> None:
        self.held.pop(request, None)
        self.run_on_all(
            lambda store: store.call(SettleQuotas([Settlement(request, used, counted)]))
        )

    @rule(skipped=st.sets(requests, max_size=4))
    def renew(self, skipped: set[str]) -> None:
        kept = [made for request, made in self.held.items() if request not in skipped]
        assert self.run_on_all(lambda store: store.call(RenewQuotas(kept, TTL_S))) == 1

    @rule(seconds=st.sampled_from([1e-6, 0.25, 1.0, 3.700001, TTL_S, 60.0]))
    def pass_time(self, seconds: float) -> None:
        for timed in self.timed:
            self.runner.run(timed.pass_time(seconds))

    @rule()
    def flush(self) -> None:
        for timed in self.timed:
            self.runner.run(timed.flush())

    @invariant()
    def check_totals(self) -> None:
        """Check that the totals of each tenant agree and balance."""
        for tenant in TENANTS:
            totals = self.run_on_all(lambda store, tenant=tenant: store.call(ReadTotals(tenant)))
            assert totals.reserved == totals.settled + totals.released + totals.open
            assert min(totals) >= 0


def test_quotas_in_redis(redis_server: RedisServer) -> None:
    """The Redis scripts return the same results as the ledger in memory, call by call."""
    run_state_machine_as_test(
        lambda: QuotaMachine(lambda: [TimedMemory(), TimedRedis(redis_server.url)]),
        settings=settings(max_examples=examples(60), stateful_step_count=40),
    )


@pytest.fixture
async def pool(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    """A Redis store as nodes use it."""
    store = RedisStore.at(redis_server.url, "p", "g1")
    yield store
    await store.close()


async def test_a_reservation_is_one_round_trip(pool: RedisStore, redis_server: RedisServer) -> None:
    """Each reservation of quota is exactly one Redis command."""
    assert await pool.call(ReserveQuota(reservation("before"), 30.0)) is None
    redis_server.command("CONFIG", "RESETSTAT")
    for index in range(5):
        assert await pool.call(ReserveQuota(reservation(f"r{index}"), 30.0)) is None
    stats = redis_server.command("INFO", "commandstats")
    assert stats["cmdstat_evalsha"]["calls"] == 5
    assert not {"cmdstat_eval", "cmdstat_script|load", "cmdstat_ping"} & set(stats)


async def test_settled_reservations_leave_only_the_account(
    pool: RedisStore, redis_server: RedisServer
) -> None:
    """The store keeps only the account of a tenant that has released all reservations."""
    quota = Quota(60, 600)
    for index in range(3):
        assert await pool.call(ReserveQuota(reservation(f"r{index}", 9, quota), 30.0)) is None
    keys = {key.rpartition("}:")[2] for key in redis_server.command("KEYS", "*")}
    assert keys == {
        "quota-reservations",
        "quota-reservation-ends",
        "open-reservations:t",
        "quota:t",
        "used-requests:t",
        "used-tokens:t",
    }
    await pool.call(SettleQuotas([Settlement(f"r{index}", 0, 0) for index in range(3)]))
    keys = {key.rpartition("}:")[2] for key in redis_server.command("KEYS", "*")}
    assert keys == {"quota:t"}


async def test_nodes_with_quotas_share_them(pool: RedisStore, redis_server: RedisServer) -> None:
    """The store counts every node that renews quotas, and no node that only has leases."""
    other = RedisStore.at(redis_server.url, "p", "g2")
    await other.call(RenewLeases((Lease("r", "w", "1", 5, 7),), 30.0))
    assert await pool.call(RenewQuotas((), 30.0)) == 1
    assert await other.call(RenewQuotas((), 30.0)) == 2
    assert await pool.call(RenewQuotas((), 30.0)) == 2
    await other.close()


async def test_only_open_reservations_use_memory(
    pool: RedisStore, redis_server: RedisServer
) -> None:
    """The stack of a busy tenant has one entry more than the tenant has open reservations."""
    quota = Quota(tokens_per_minute=60, burst_tokens=10_000)
    for index in range(100):
        assert await pool.call(ReserveQuota(reservation(f"r{index}", 10, quota), 30.0)) is None
        await pool.call(SettleQuotas([Settlement(f"r{index - 3}", 3)]))
        assert redis_server.command("ZCARD", "draftgate:{p}:used-tokens:t") <= 4
