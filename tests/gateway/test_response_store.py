"""Tests of the store of responses: memory and Redis keep the same values for the same tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgate.gateway.state.guarded.calls import PATIENCE
from draftgate.gateway.state.guarded.responses import GuardedResponseStore
from draftgate.gateway.state.redis.client import open_client
from draftgate.gateway.state.redis.responses import RedisResponseStore
from draftgate.gateway.state.response_store import MemoryResponseStore, ResponseStore
from draftgate.gateway.state.store import StoreError
from draftgate.lab.sim.virtual_time import run_virtual
from tests.examples import examples
from tests.gateway.redis_server import RedisServer
from tests.gateway.stores import BEGIN_US, CLOCK, CLOCK_KEY, POOL

CAPACITY_BYTES = 100
TTL_S = 60.0


class TimedMemory:
    """A memory store and its clock."""

    store: ResponseStore

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._now_s = 0.0
        self.store = MemoryResponseStore(capacity_bytes, TTL_S, lambda: self._now_s)

    async def pass_time(self, seconds: float) -> None:
        """Advance the clock by this number of seconds."""
        self._now_s += seconds


class TimedRedis:
    """A Redis store that takes its time from the test."""

    store: ResponseStore

    def __init__(self, url: str, capacity_bytes: int = CAPACITY_BYTES) -> None:
        connected = open_client(url, decode=False)
        self.client = connected.client
        self.store = RedisResponseStore(connected, POOL, capacity_bytes, TTL_S, CLOCK)

    async def begin(self) -> None:
        """Delete all data and set the clock to `BEGIN_US`."""
        await self.client.flushall()
        await self.client.set(CLOCK_KEY, BEGIN_US)

    async def pass_time(self, seconds: float) -> None:
        """Advance the clock by this number of seconds."""
        await self.client.incrby(CLOCK_KEY, round(seconds * 1e6))


Timed = TimedMemory | TimedRedis


class ResponseStoreContract:
    """The behaviour of every store of responses. Subclasses have the fixture `timed`."""

    async def test_value_belongs_to_its_tenant(self, timed: Timed) -> None:
        """Only the tenant that has stored a value can read and delete the value."""
        value = '{"text": "ä\\n☃"}'.encode()
        assert await timed.store.put("a", "r", value)
        assert await timed.store.get("b", "r") is None
        assert not await timed.store.delete("b", "r")
        assert await timed.store.get("a", "r") == value
        assert await timed.store.delete("a", "r")
        assert await timed.store.get("a", "r") is None
        assert not await timed.store.delete("a", "r")

    async def test_values_are_not_decoded(self, timed: Timed) -> None:
        """A value may be any bytes, because decoding a long text would hold the event loop."""
        value = bytes(range(256 - CAPACITY_BYTES, 256))
        assert await timed.store.put("a", "r", value)
        assert await timed.store.get("a", "r") == value

    async def test_value_ends_after_its_time(self, timed: Timed) -> None:
        """A value ends after the lifetime, also if the client reads the value meanwhile."""
        await timed.store.put("a", "r", b"x" * 90)
        await timed.pass_time(TTL_S - 0.5)
        assert await timed.store.get("a", "r") == b"x" * 90
        await timed.pass_time(0.5)
        assert await timed.store.get("a", "r") is None
        assert not await timed.store.delete("a", "r")

    async def test_values_that_have_ended_occupy_no_capacity(self, timed: Timed) -> None:
        """A value that has ended does not displace a new value of a larger tenant."""
        await timed.store.put("a", "old", b"x" * 60)
        await timed.pass_time(TTL_S / 2)
        await timed.store.put("b", "r1", b"x" * 20)
        await timed.pass_time(TTL_S / 2)
        assert await timed.store.put("b", "r2", b"x" * 80)
        assert await timed.store.get("b", "r1") == b"x" * 20

    async def test_largest_tenant_loses_its_oldest_values(self, timed: Timed) -> None:
        """A tenant with many values does not displace the older values of another tenant."""
        await timed.store.put("small", "s", b"x" * 30)
        for index in range(20):
            assert await timed.store.put("large", f"r{index}", b"x" * 20)
            await timed.pass_time(0.5)
        kept = [i for i in range(20) if await timed.store.get("large", f"r{i}") is not None]
        assert kept == [17, 18, 19]
        assert await timed.store.get("small", "s") == b"x" * 30

    async def test_large_value_does_not_displace_smaller_tenants(self, timed: Timed) -> None:
        """A value gets no place if room for the value would be at the cost of smaller tenants."""
        await timed.store.put("a", "a", b"x" * 45)
        assert not await timed.store.put("b", "b", b"x" * 60)
        assert await timed.store.get("b", "b") is None
        assert await timed.store.get("a", "a") == b"x" * 45

    async def test_value_above_the_capacity_is_not_stored(self, timed: Timed) -> None:
        """A value may fill the capacity, and a larger value displaces nothing."""
        assert await timed.store.put("a", "r", b"x" * CAPACITY_BYTES)
        assert not await timed.store.put("b", "large", b"x" * (CAPACITY_BYTES + 1))
        assert await timed.store.get("b", "large") is None
        assert await timed.store.get("a", "r") is not None

    async def test_usage_counts_values_that_have_not_ended(self, timed: Timed) -> None:
        """The usage has the values and bytes of all tenants, without those that have ended."""
        assert await timed.store.usage() == (0, 0)
        await timed.store.put("a", "r", b"x" * 30)
        await timed.pass_time(TTL_S / 2)
        await timed.store.put("b", "s", b"x" * 20)
        assert await timed.store.usage() == (2, 50)
        await timed.pass_time(TTL_S / 2)
        assert await timed.store.usage() == (1, 20)
        await timed.store.delete("b", "s")
        assert await timed.store.usage() == (0, 0)

    async def test_displaced_values_are_counted(self, timed: Timed) -> None:
        """Values that another value displaces count as evicted. Replaced, deleted and ended values
        do not, nor does a value without a place."""
        for index in range(4):  # the capacity holds three
            await timed.store.put("a", f"r{index}", b"x" * 30)
            await timed.pass_time(0.5)
        assert timed.store.evicted == 1
        await timed.store.put("a", "r3", b"y" * 30)
        await timed.store.delete("a", "r3")
        await timed.store.put("b", "large", b"x" * (CAPACITY_BYTES + 1))
        assert not await timed.store.put("b", "no place", b"x" * 70)
        assert timed.store.evicted == 1
        await timed.pass_time(TTL_S)
        await timed.store.put("c", "whole", b"x" * CAPACITY_BYTES)
        assert timed.store.evicted == 1
        assert await timed.store.usage() == (1, CAPACITY_BYTES)

    async def test_second_value_of_an_id_replaces_the_first(self, timed: Timed) -> None:
        """A repeated call replaces the value, and the value counts once."""
        for letter in (b"x", b"y", b"z"):
            assert await timed.store.put("a", "r", letter * 60)
        assert await timed.store.put("a", "s", b"s" * 40)
        assert await timed.store.get("a", "r") == b"z" * 60


class TestMemoryResponseStore(ResponseStoreContract):
    """The store of a node without a pool."""

    @pytest.fixture
    async def timed(self) -> Timed:
        """A memory store."""
        return TimedMemory()


class TestRedisResponseStore(ResponseStoreContract):
    """The store of a pool."""

    @pytest.fixture
    async def timed(self, redis_server: RedisServer) -> AsyncIterator[Timed]:
        """A store in a Redis server whose time the test sets."""
        opened = TimedRedis(redis_server.url)
        await opened.begin()
        yield opened
        await opened.store.close()


TENANTS = ["a", "b", "a b"]
IDS = [f"r{index}" for index in range(6)]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(TENANTS), st.sampled_from(IDS),
                  st.integers(0, 60)),
        st.tuples(st.just("delete"), st.sampled_from(TENANTS), st.sampled_from(IDS)),
        st.tuples(st.just("wait"), st.integers(0, 40)),
    ),
    max_size=30,
)  # fmt: skip


async def run_steps(timed: Timed, chosen: Sequence[tuple]) -> list[object]:
    """Execute steps on a store, and return every result with all values after each step."""
    seen: list[object] = []
    for kind, *args in chosen:
        if kind == "wait":
            await timed.pass_time(args[0])
        elif kind == "put":
            tenant, response_id, size = args
            value = response_id[-1:].encode() * size
            seen.append(await timed.store.put(tenant, response_id, value))
            await timed.pass_time(0.5)  # the age orders the values
        else:
            seen.append(await timed.store.delete(*args))
        values = {
            (tenant, one): found
            for tenant in TENANTS
            for one in IDS
            if (found := await timed.store.get(tenant, one)) is not None
        }
        assert len({one for _, one in values}) == len(values)  # one owner for each
        assert sum(map(len, values.values())) <= CAPACITY_BYTES
        seen.append(values)
    return seen


@settings(max_examples=examples(60), deadline=None)
@given(steps)
def test_redis_behaves_as_the_memory_store(shared_redis: RedisServer, chosen: list[tuple]) -> None:
    """Redis returns what the memory store returns, for any sequence of calls."""

    async def compare() -> None:
        redis = TimedRedis(shared_redis.url)
        await redis.begin()
        try:
            assert await run_steps(redis, chosen) == await run_steps(TimedMemory(), chosen)
        finally:
            await redis.store.close()

    asyncio.run(compare())


async def test_every_key_in_redis_expires(redis_server: RedisServer) -> None:
    """A pool without gateways leaves no key behind after the lifetime of its last response."""
    timed = TimedRedis(redis_server.url)
    await timed.begin()
    for index in range(4):
        await timed.store.put(f"t{index}", f"r{index}", b"x" * 30)
    keys = [key for key in redis_server.command("KEYS", "*") if key != CLOCK_KEY]
    assert len(keys) >= 8
    assert all(0 < redis_server.command("PTTL", key) <= TTL_S * 1000 for key in keys)
    await timed.store.close()


async def test_displacement_survives_the_expiry_of_a_tenants_keys(
    redis_server: RedisServer,
) -> None:
    """A put finds ended values of a tenant whose own keys have expired."""
    timed = TimedRedis(redis_server.url)
    await timed.begin()
    await timed.store.put("a", "old", b"x" * 90)
    redis_server.command("DEL", f"draftgate:{{{POOL}}}:responses:a")
    await timed.pass_time(0.5)
    assert await timed.store.put("b", "new", b"x" * 80)
    assert await timed.store.get("b", "new") == b"x" * 80
    await timed.store.close()


class BrokenStore(MemoryResponseStore):
    """A store whose server is unreachable while `broken`."""

    broken = True
    calls = 0

    async def put(self, tenant: str, response_id: str, value: bytes) -> bool:
        self._check()
        return await super().put(tenant, response_id, value)

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        self._check()
        return await super().get(tenant, response_id)

    def _check(self) -> None:
        self.calls += 1
        if self.broken:
            raise StoreError("unreachable")


async def end_an_outage() -> None:
    """Use a guarded store during and after an outage."""
    clock = asyncio.get_running_loop().time
    remote = BrokenStore(1000, TTL_S, clock)
    guarded = GuardedResponseStore(remote, clock=clock, uniform=lambda: 0.0)
    for _ in range(PATIENCE.failures):
        assert not await guarded.put("a", "r", b"x")
    asked = remote.calls
    for call in (guarded.get("a", "r"), guarded.delete("a", "r"), guarded.usage()):
        with pytest.raises(StoreError):
            await call
    assert remote.calls == asked  # the breaker is open
    remote.broken = False
    await asyncio.sleep(2 * PATIENCE.first_pause_s)
    assert await guarded.put("a", "r", b"x")
    assert await guarded.get("a", "r") == b"x"
    assert await guarded.usage() == (1, 1)
    assert await guarded.delete("a", "r")
    await guarded.close()


def test_outage_fails_calls_at_once_and_ends_by_itself() -> None:
    """During an outage, no call waits for the server. Afterwards, all calls work again."""
    run_virtual(end_an_outage())
