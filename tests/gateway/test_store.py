"""Contract tests of the memory store, alone and shared, and of the Redis store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from draftgate.backends.framing import FrameChannel
from draftgate.gateway.state.commands import (
    ListWorkers,
    PublishReport,
    ReleaseLeases,
    RenewLeases,
    RenewQuotas,
    ReserveLease,
    ReserveQuota,
)
from draftgate.gateway.state.guarded.store import GuardedStore
from draftgate.gateway.state.local.store import LocalStore
from draftgate.gateway.state.redis.client import open_client
from draftgate.gateway.state.redis.store import RedisStore
from draftgate.gateway.state.store import StoreError
from draftgate.gateway.state.values import LeaseCandidate, Refusal, new_epoch
from draftgate.policies.quotas import Quota, QuotaReservation
from draftgate.policies.values import replace
from tests.gateway.harness import eventually
from tests.gateway.redis_server import RedisServer, free_port
from tests.gateway.store_contract import StoreContract
from tests.gateway.stores import (
    OnLocal,
    OnMemory,
    OnRedis,
    TimedLocal,
    granted,
    leased_tokens,
    report,
    reserve,
    views,
)


class TestMemoryStore(OnMemory, StoreContract):
    """The store of a node without a pool."""


class TestLocalStore(OnLocal, StoreContract):
    """The store that the processes of a node share."""


class TestRedisStore(OnRedis, StoreContract):
    """The store of a pool."""


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[tuple[LocalStore, LocalStore]]:
    """The shared store as two processes of a node use it."""
    opened = TimedLocal(tmp_path / "store")
    await opened.begin()
    clients = LocalStore(tmp_path / "store"), LocalStore(tmp_path / "store")
    for client in clients:
        await client.call(RenewLeases((), 30.0))
    yield clients
    for client in clients:
        await client.close()
    await opened.close()


async def test_processes_lease_the_whole_capacity(
    processes: tuple[LocalStore, LocalStore],
) -> None:
    """Processes that share a store lease the whole capacity of a worker together, and no more."""
    one, other = processes
    await one.call(PublishReport(report(capacity_tokens=1000)))
    await granted(one, "a", 600)
    await granted(other, "b", 400)
    assert (await reserve(one, "c", 1)).refusal is Refusal.FULL
    assert (await one.call(ListWorkers())).gateways == 2


async def has_no_leases(store: LocalStore) -> bool:
    """Return whether no worker of a store is leased."""
    return await leased_tokens(store) == 0


async def test_released_leases_end_without_a_later_call(
    processes: tuple[LocalStore, LocalStore],
) -> None:
    """A release reaches the shared store even if its process makes no further call."""
    one, other = processes
    await one.call(PublishReport(report()))
    await granted(one, "r", 5)
    await one.call(ReleaseLeases(("r",)))
    await eventually(lambda: has_no_leases(other))


async def test_closing_sends_releases(processes: tuple[LocalStore, LocalStore]) -> None:
    """A process that stops releases its leases first."""
    one, other = processes
    await one.call(PublishReport(report()))
    await granted(one, "r", 5)
    await one.call(ReleaseLeases(("r",)))
    await one.close()
    await eventually(lambda: has_no_leases(other))


async def test_a_release_travels_with_the_next_call(
    processes: tuple[LocalStore, LocalStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server wakes once for a release and the reservation after it, in this order."""
    one, _ = processes
    await one.call(PublishReport(report(capacity_tokens=1000)))
    await granted(one, "a", 1000)
    received: list[int] = []
    receive = FrameChannel.buffer_updated

    def record(channel: FrameChannel, nbytes: int) -> None:
        if channel is not one._channel:
            received.append(nbytes)
        receive(channel, nbytes)

    monkeypatch.setattr(FrameChannel, "buffer_updated", record)
    await one.call(ReleaseLeases(("a",)))
    await granted(one, "b", 1000)
    assert len(received) == 1


@pytest.fixture
async def pool(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    """A Redis store as nodes use it."""
    store = RedisStore.at(redis_server.url, "p", "g1")
    yield store
    await store.close()


async def test_lease_numbers_use_the_time_of_the_server(
    pool: RedisStore, redis_server: RedisServer
) -> None:
    """The store numbers leases by the server's time, so the clocks of gateways may differ."""
    seconds, us = redis_server.command("TIME")
    await pool.call(PublishReport(report()))
    number = (await granted(pool, "r")).number
    later_s, later_us = redis_server.command("TIME")
    assert int(seconds) * 10**6 + int(us) <= number <= int(later_s) * 10**6 + int(later_us)
    assert 0 <= (await views(pool))["w"].age_s < 60


async def test_a_reservation_is_one_round_trip(pool: RedisStore, redis_server: RedisServer) -> None:
    """Each reservation is exactly one Redis command."""
    await pool.call(PublishReport(report()))
    await granted(pool, "before")
    redis_server.command("CONFIG", "RESETSTAT")
    for index in range(5):
        await granted(pool, f"r{index}")
    stats = redis_server.command("INFO", "commandstats")
    assert stats["cmdstat_evalsha"]["calls"] == 5
    assert not {"cmdstat_eval", "cmdstat_script|load", "cmdstat_ping"} & set(stats)


async def test_scripts_are_loaded_again_after_a_loss(
    pool: RedisStore, redis_server: RedisServer
) -> None:
    """The store loads its scripts again after a server has lost them."""
    await pool.call(PublishReport(report()))
    redis_server.command("SCRIPT", "FLUSH")
    await granted(pool, "r", 5)
    assert await leased_tokens(pool) == 5


async def test_all_keys_of_a_pool_share_its_tag(
    pool: RedisStore, redis_server: RedisServer
) -> None:
    """All keys of a pool share a hash tag and therefore a Cluster slot, and pools are separate."""
    await pool.call(PublishReport(report()))
    await granted(pool, "r", 5)
    await pool.call(RenewLeases((), 30.0))
    keys = redis_server.command("KEYS", "*")
    assert len(keys) == 9
    assert all(key.startswith("draftgate:{p}:") for key in keys)
    other = RedisStore.at(redis_server.url, "q", "g1")
    assert (await other.call(ListWorkers())).workers == ()
    await other.close()


async def test_ended_leases_leave_no_keys(pool: RedisStore, redis_server: RedisServer) -> None:
    """The store keeps only the last lease number after all leases end."""
    await pool.call(PublishReport(report()))
    for index in range(3):
        await granted(pool, f"r{index}", 5)
    await pool.call(ReleaseLeases(("r0",)))
    await granted(pool, "r1", 7)
    await pool.call(PublishReport(report(epoch="2")))
    keys = {key.rpartition("}:")[2] for key in redis_server.command("KEYS", "*")}
    assert keys == {"hb", "w:w", "number"}


async def test_only_nodes_with_leases_count_as_gateways(
    pool: RedisStore, redis_server: RedisServer
) -> None:
    """A node counts as a gateway after its first lease, also between two requests."""
    other = RedisStore.at(redis_server.url, "p", "g2")
    await other.call(PublishReport(report(capacity_tokens=1000)))
    await pool.call(RenewLeases((), 30.0))
    await other.call(RenewLeases((), 30.0))
    for store in (pool, other):
        found = await store.call(ListWorkers())
        assert (found.nodes, found.gateways) == (2, 1)
    await granted(other, "r", 1)
    await other.call(ReleaseLeases(("r",)))
    for _ in range(2):
        await other.call(RenewLeases((), 30.0))
    assert (await pool.call(ListWorkers())).gateways == 2
    assert (await other.call(ListWorkers())).gateways == 1
    await other.close()


async def test_nodes_without_leases_leave_their_share_of_an_outage(
    pool: RedisStore, redis_server: RedisServer
) -> None:
    """During an outage, the only gateway of a pool leases the whole capacity of its workers,
    however many nodes only have workers."""
    nodes = [RedisStore.at(redis_server.url, "p", f"worker-{number}") for number in range(3)]
    gateway = GuardedStore(RedisStore.at(redis_server.url, "p", "gateway"))
    for number, node in enumerate(nodes):
        worker = report(f"w{number}", capacity_tokens=1000)
        await node.call(PublishReport(replace(worker, address="http://w")))
        await node.call(RenewLeases((), 30.0))
    await gateway.call(ListWorkers())
    await gateway.call(RenewQuotas((), 30.0))
    redis_server.kill()
    offers = (LeaseCandidate("w0", "1"),)
    found = [
        await gateway.call(ReserveLease(f"r{number}", 500, offers, 30.0)) for number in range(3)
    ]
    quota = Quota(requests_per_minute=60)
    asked = [QuotaReservation(f"q{number}", "t", 0, quota, 1) for number in range(61)]
    fits = [await gateway.call(ReserveQuota(one, 30.0)) is None for one in asked]
    redis_server.start_again()
    assert all(one.degraded for one in found)
    assert [one.lease is not None for one in found] == [True, True, False]
    assert fits == [True] * 60 + [False]
    for store in (*nodes, gateway):
        await store.close()


async def test_reports_of_a_newer_version_are_tolerated(
    pool: RedisStore, redis_server: RedisServer
) -> None:
    """The store ignores unknown fields of reports and omits unreadable reports."""
    await pool.call(PublishReport(report("a")))
    await pool.call(PublishReport(report("b")))
    body = redis_server.command("HGET", "draftgate:{p}:w:a", "report")
    redis_server.command("HSET", "draftgate:{p}:w:a", "report", body[:-1] + ',"new": 1}')
    redis_server.command("HSET", "draftgate:{p}:w:b", "report", '{"model_id": 7}')
    assert (await views(pool))["a"].report == report("a")
    assert set(await views(pool)) == {"a"}


@pytest.mark.parametrize("key", ["leases", "expiry", "leased", "lease:w"])
async def test_leases_recover_from_the_eviction_of_a_key(
    pool: RedisStore, redis_server: RedisServer, key: str
) -> None:
    """A server that evicts a key of the leases leaves no lease behind once they have ended."""
    await pool.call(PublishReport(report()))
    leases = [await granted(pool, name, 400) for name in ("a", "b")]
    redis_server.command("DEL", f"draftgate:{{p}}:{key}")
    await pool.call(RenewLeases(leases, 30.0))
    assert await leased_tokens(pool) <= 800
    await pool.call(ReleaseLeases([lease.request_id for lease in leases]))
    assert await leased_tokens(pool) == 0
    for left in ("leases", "expiry", "leased", "lease:w"):
        assert not redis_server.command("EXISTS", f"draftgate:{{p}}:{left}")
    await granted(pool, "c", 1000)


async def test_every_failure_is_a_store_error() -> None:
    """A connection failure raises a `StoreError` that does not contain the password."""
    store = RedisStore.at(f"redis://:hush@127.0.0.1:{free_port()}", "p", "g1")
    with pytest.raises(StoreError) as caught:
        await reserve(store, "r")
    assert "hush" not in str(caught.value)
    await store.close()


async def test_server_errors_are_store_errors(pool: RedisStore, redis_server: RedisServer) -> None:
    """An error reply of the server raises a `StoreError`."""
    redis_server.command("SET", "draftgate:{p}:hb", "not a sorted set")
    with pytest.raises(StoreError):
        await pool.call(PublishReport(report()))


async def test_a_cancelled_call_keeps_the_connection_in_order(
    redis_server: RedisServer,
) -> None:
    """The next call does not receive the reply of a cancelled call."""
    connected = open_client(redis_server.url)
    store = RedisStore(connected, "p", "g1")
    await store.call(PublishReport(report()))
    for index in range(20):
        call = asyncio.create_task(granted(store, f"r{index}"))
        for _ in range(index):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
        assert set(await views(store)) == {"w"}
    await store.close()


def test_later_epochs_compare_greater() -> None:
    """A later start gives a greater epoch, and a nonce distinguishes starts at the same time."""
    now_s = time.time()
    epochs = [new_epoch(now_s, "ff"), new_epoch(now_s + 1e-5, "00"), new_epoch(now_s + 1e9, "0")]
    assert epochs == sorted(epochs)
    assert new_epoch(now_s, "a") != new_epoch(now_s, "b")
