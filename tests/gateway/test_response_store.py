"""Tests of the store of responses: memory and Redis keep the same values for the same tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgate.gateway.state.commands import (
    DeleteResponse,
    GetResponse,
    PutResponse,
    ReadUsage,
    StoreCommand,
    T,
)
from draftgate.gateway.state.guarded.calls import PATIENCE
from draftgate.gateway.state.guarded.store import guarded_responses
from draftgate.gateway.state.memory.responses import MemoryResponses
from draftgate.gateway.state.redis.client import open_client
from draftgate.gateway.state.redis.scripts import ResponseBounds
from draftgate.gateway.state.redis.store import RedisStore
from draftgate.gateway.state.store import RemoteStore, StoreError
from draftgate.lab.sim.virtual_time import run_virtual
from tests.examples import examples
from tests.gateway.redis_server import RedisServer
from tests.gateway.stores import BEGIN_US, CLOCK, CLOCK_KEY, POOL

CAPACITY_BYTES = 100
TTL_S = 60.0


class TimedMemory:
    """A memory store and its clock."""

    store: RemoteStore

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._now_s = 0.0
        self.store = MemoryResponses(capacity_bytes, TTL_S, lambda: self._now_s)

    async def pass_time(self, seconds: float) -> None:
        """Advance the clock by this number of seconds."""
        self._now_s += seconds


class TimedRedis:
    """A Redis store that takes its time from the test."""

    store: RemoteStore

    def __init__(self, url: str, capacity_bytes: int = CAPACITY_BYTES) -> None:
        connected = open_client(url, decode=False)
        self.client = connected.client
        self.store = RedisStore(connected, POOL, "", CLOCK, ResponseBounds(capacity_bytes, TTL_S))

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
        assert (await timed.store.call(PutResponse("a", "r", value))).kept
        assert await timed.store.call(GetResponse("b", "r")) is None
        assert not await timed.store.call(DeleteResponse("b", "r"))
        assert await timed.store.call(GetResponse("a", "r")) == value
        assert await timed.store.call(DeleteResponse("a", "r"))
        assert await timed.store.call(GetResponse("a", "r")) is None
        assert not await timed.store.call(DeleteResponse("a", "r"))

    async def test_values_are_not_decoded(self, timed: Timed) -> None:
        """A value may be any bytes, because decoding a long text would hold the event loop."""
        value = bytes(range(256 - CAPACITY_BYTES, 256))
        assert (await timed.store.call(PutResponse("a", "r", value))).kept
        assert await timed.store.call(GetResponse("a", "r")) == value

    async def test_value_ends_after_its_time(self, timed: Timed) -> None:
        """A value ends after the lifetime, also if the client reads the value meanwhile."""
        await timed.store.call(PutResponse("a", "r", b"x" * 90))
        await timed.pass_time(TTL_S - 0.5)
        assert await timed.store.call(GetResponse("a", "r")) == b"x" * 90
        await timed.pass_time(0.5)
        assert await timed.store.call(GetResponse("a", "r")) is None
        assert not await timed.store.call(DeleteResponse("a", "r"))

    async def test_values_that_have_ended_occupy_no_capacity(self, timed: Timed) -> None:
        """A value that has ended does not displace a new value of a larger tenant."""
        await timed.store.call(PutResponse("a", "old", b"x" * 60))
        await timed.pass_time(TTL_S / 2)
        await timed.store.call(PutResponse("b", "r1", b"x" * 20))
        await timed.pass_time(TTL_S / 2)
        assert (await timed.store.call(PutResponse("b", "r2", b"x" * 80))).kept
        assert await timed.store.call(GetResponse("b", "r1")) == b"x" * 20

    async def test_largest_tenant_loses_its_oldest_values(self, timed: Timed) -> None:
        """A tenant with many values does not displace the older values of another tenant."""
        await timed.store.call(PutResponse("small", "s", b"x" * 30))
        for index in range(20):
            assert (await timed.store.call(PutResponse("large", f"r{index}", b"x" * 20))).kept
            await timed.pass_time(0.5)
        kept = [
            i
            for i in range(20)
            if await timed.store.call(GetResponse("large", f"r{i}")) is not None
        ]
        assert kept == [17, 18, 19]
        assert await timed.store.call(GetResponse("small", "s")) == b"x" * 30

    async def test_large_value_does_not_displace_smaller_tenants(self, timed: Timed) -> None:
        """A value gets no place if room for the value would be at the cost of smaller tenants."""
        await timed.store.call(PutResponse("a", "a", b"x" * 45))
        assert not (await timed.store.call(PutResponse("b", "b", b"x" * 60))).kept
        assert await timed.store.call(GetResponse("b", "b")) is None
        assert await timed.store.call(GetResponse("a", "a")) == b"x" * 45

    async def test_value_above_the_capacity_is_not_stored(self, timed: Timed) -> None:
        """A value may fill the capacity, and a larger value displaces nothing."""
        assert (await timed.store.call(PutResponse("a", "r", b"x" * CAPACITY_BYTES))).kept
        assert not (
            await timed.store.call(PutResponse("b", "large", b"x" * (CAPACITY_BYTES + 1)))
        ).kept
        assert await timed.store.call(GetResponse("b", "large")) is None
        assert await timed.store.call(GetResponse("a", "r")) is not None

    async def test_usage_counts_values_that_have_not_ended(self, timed: Timed) -> None:
        """The usage has the values and bytes of all tenants, without those that have ended."""
        assert await timed.store.call(ReadUsage()) == (0, 0)
        await timed.store.call(PutResponse("a", "r", b"x" * 30))
        await timed.pass_time(TTL_S / 2)
        await timed.store.call(PutResponse("b", "s", b"x" * 20))
        assert await timed.store.call(ReadUsage()) == (2, 50)
        await timed.pass_time(TTL_S / 2)
        assert await timed.store.call(ReadUsage()) == (1, 20)
        await timed.store.call(DeleteResponse("b", "s"))
        assert await timed.store.call(ReadUsage()) == (0, 0)

    async def test_displaced_values_are_counted(self, timed: Timed) -> None:
        """Values that another value displaces count as evicted. Replaced, deleted and ended values
        do not, nor does a value without a place."""

        async def evicted(tenant: str, response_id: str, size: int) -> int:
            put = PutResponse(tenant, response_id, b"x" * size)
            return (await timed.store.call(put)).evicted

        for index in range(4):  # the capacity holds three
            assert await evicted("a", f"r{index}", 30) == (index == 3)
            await timed.pass_time(0.5)
        assert await evicted("a", "r3", 30) == 0
        await timed.store.call(DeleteResponse("a", "r3"))
        assert await evicted("b", "large", CAPACITY_BYTES + 1) == 0
        assert await timed.store.call(PutResponse("b", "no place", b"x" * 70)) == (False, 0)
        await timed.pass_time(TTL_S)
        assert await evicted("c", "whole", CAPACITY_BYTES) == 0
        assert await timed.store.call(ReadUsage()) == (1, CAPACITY_BYTES)

    async def test_second_value_of_an_id_replaces_the_first(self, timed: Timed) -> None:
        """A repeated call replaces the value, and the value counts once."""
        for letter in (b"x", b"y", b"z"):
            assert (await timed.store.call(PutResponse("a", "r", letter * 60))).kept
        assert (await timed.store.call(PutResponse("a", "s", b"s" * 40))).kept
        assert await timed.store.call(GetResponse("a", "r")) == b"z" * 60


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
            seen.append((await timed.store.call(PutResponse(tenant, response_id, value))).kept)
            await timed.pass_time(0.5)  # the age orders the values
        else:
            seen.append(await timed.store.call(DeleteResponse(*args)))
        values = {
            (tenant, one): found
            for tenant in TENANTS
            for one in IDS
            if (found := await timed.store.call(GetResponse(tenant, one))) is not None
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
        await timed.store.call(PutResponse(f"t{index}", f"r{index}", b"x" * 30))
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
    await timed.store.call(PutResponse("a", "old", b"x" * 90))
    redis_server.command("DEL", f"draftgate:{{{POOL}}}:responses:a")
    await timed.pass_time(0.5)
    assert (await timed.store.call(PutResponse("b", "new", b"x" * 80))).kept
    assert await timed.store.call(GetResponse("b", "new")) == b"x" * 80
    await timed.store.close()


class BrokenStore(MemoryResponses):
    """A store whose server is unreachable while `broken`."""

    broken = True
    calls = 0

    async def call(self, command: StoreCommand[T]) -> T:
        self.calls += 1
        if self.broken:
            raise StoreError("unreachable")
        return self.apply(command)


async def end_an_outage() -> None:
    """Use a guarded store during and after an outage."""
    clock = asyncio.get_running_loop().time
    remote = BrokenStore(1000, TTL_S, clock)
    guarded = guarded_responses(remote, clock, uniform=lambda: 0.0)
    for _ in range(PATIENCE.failures):
        assert not (await guarded.call(PutResponse("a", "r", b"x"))).kept
    asked = remote.calls
    for call in (
        guarded.call(GetResponse("a", "r")),
        guarded.call(DeleteResponse("a", "r")),
        guarded.call(ReadUsage()),
    ):
        with pytest.raises(StoreError):
            await call
    assert remote.calls == asked  # the breaker is open
    remote.broken = False
    await asyncio.sleep(2 * PATIENCE.first_pause_s)
    assert (await guarded.call(PutResponse("a", "r", b"x"))).kept
    assert await guarded.call(GetResponse("a", "r")) == b"x"
    assert await guarded.call(ReadUsage()) == (1, 1)
    assert await guarded.call(DeleteResponse("a", "r"))
    await guarded.close()


def test_outage_fails_calls_at_once_and_ends_by_itself() -> None:
    """During an outage, no call waits for the server. Afterwards, all calls work again."""
    run_virtual(end_an_outage())
