"""Tests of the exchange between gateways over memory stores and over a real Redis server."""

from __future__ import annotations

import asyncio

import pytest

from draftgate.gateway.assembly import loop_time_s
from draftgate.gateway.dispatch.sharing import SOON_S, Sharing
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.state.redis.store import RedisStore
from draftgate.policies.admission.appointments import Appointments, Booking
from draftgate.policies.speculation.acceptance_history import AcceptanceHistory
from tests.gateway.exchange_contract import ExchangeContract
from tests.gateway.redis_server import RedisServer
from tests.gateway.sharing_gateways import SharingGateway
from tests.gateway.stores import OnLocal, OnMemory, OnRedis
from tests.gateway.test_guarded_store import in_virtual_time


class TestMemoryExchange(OnMemory, ExchangeContract):
    """The exchange of a node without a pool."""


class TestLocalExchange(OnLocal, ExchangeContract):
    """The exchange of the processes of a node."""


class TestRedisExchange(OnRedis, ExchangeContract):
    """The exchange of a pool."""


async def test_an_exchange_is_one_round_trip(redis_server: RedisServer) -> None:
    """A heartbeat without news costs one command, even if tallies are sent."""
    store, history = RedisStore.at(redis_server.url, "exchange", "g"), AcceptanceHistory()
    sharing = Sharing(store, history, Appointments(), loop_time_s)
    await sharing.exchange()
    redis_server.command("CONFIG", "RESETSTAT")
    history.add_choice("t", "m", greedy=True, drafted=40, histogram=(0, 0, 5))
    await sharing.exchange()
    stats = redis_server.command("INFO", "commandstats")
    assert stats["cmdstat_evalsha"]["calls"] == 1
    await store.close()


async def test_gateways_share_what_they_know_in_redis(redis_server: RedisServer) -> None:
    """Two gateways that exchange in any order have the same counts and appointments, also after a
    flush."""
    stores = [RedisStore.at(redis_server.url, "shared", name) for name in "ab"]
    histories = [AcceptanceHistory(), AcceptanceHistory()]
    appointments = [Appointments(), Appointments()]
    parts = zip(stores, histories, appointments, strict=True)
    sharing = [Sharing(*one, loop_time_s) for one in parts]

    async def exchange() -> None:
        for _ in range(2):
            await asyncio.gather(*(one.exchange() for one in sharing))

    def learn(index: int) -> None:
        histories[index].add_choice("t", "m", greedy=True, drafted=40, histogram=(0, 0, 5))

    for _ in range(5):
        learn(0)
        learn(1)
        await exchange()
    first, second = (one.counts("t", "m", greedy=True) for one in histories)
    assert first == second
    assert first[0].accepted > 9 * 10 * 0.9
    booking = Booking((1 << 64) - 1, -1, "t", 0.5, loop_time_s() + 60.0, loop_time_s())
    appointments[0].book(booking)
    redis_server.command("FLUSHALL")
    learn(1)
    await exchange()
    after = [one.counts("t", "m", greedy=True) for one in histories]
    assert after[0] == after[1]
    assert after[0][0].accepted == pytest.approx(first[0].accepted * 0.99 + 10)
    found = appointments[1].find(booking.fingerprint, booking.due_s, 1)
    assert found is not None
    assert found.due_s == pytest.approx(booking.due_s, abs=1.0)
    appointments[1].close(found)
    await exchange()
    assert len(appointments[0]) == 0
    for store in stores:
        await store.close()


@in_virtual_time
async def test_refusals_are_shared_before_the_next_heartbeat() -> None:
    """Gateways that refuse requests know each other's bookings soon, and exchange no more often."""
    inner = MemoryStore(loop_time_s)
    gateways = [SharingGateway(inner) for _ in range(2)]
    pauses = [asyncio.create_task(one.sharing.pause(1.0)) for one in gateways]
    for refusals in range(3):
        await asyncio.sleep(0.01)
        for index, gateway in enumerate(gateways):
            now_s = loop_time_s()
            name = 1 + 2 * refusals + index
            gateway.appointments.book(Booking(name, 0, "t", 0.5, now_s + 9.0, now_s))
            gateway.sharing.note_refusal()
    await asyncio.sleep(SOON_S)
    for gateway in gateways:
        gateway.sharing.note_refusal()
    await asyncio.sleep(2 * SOON_S)
    for gateway in gateways:
        assert all(gateway.appointments.find(name, loop_time_s(), 1) for name in range(1, 7))
        assert gateway.remote.calls["ExchangeNews"] == 3  # the first one finds the store
    await asyncio.gather(*pauses)
    assert loop_time_s() == pytest.approx(1.0)
    assert [gateway.remote.calls["ExchangeNews"] for gateway in gateways] == [3, 3]
