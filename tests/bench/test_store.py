"""Tests of `draftgate bench store`: its counts, and the removal of its pool."""

from __future__ import annotations

from bench.gateway.store import LANES, Subject, measure, measure_commands, script_totals
from draftgate.gateway.state.commands import ReleaseLeases, ReserveLease
from draftgate.gateway.state.redis.client import open_client
from draftgate.gateway.state.redis.store import RedisStore
from tests.gateway.redis_server import RedisServer


async def test_a_reservation_is_one_round_trip(redis_server: RedisServer) -> None:
    """The server runs one script per reservation, and one script to release many requests."""
    connected = open_client(redis_server.url)
    store = RedisStore.at(redis_server.url, "p", "g")
    await store.call(ReserveLease("none", 1, Subject(store).offers, 1.0))  # This loads the scripts.
    await store.call(ReleaseLeases(("none",)))
    before, _ = await script_totals(connected)
    counts = await measure_commands(Subject(store), connected, 50)
    after, _ = await script_totals(connected)
    assert counts["commands_per_reservation"] == 1.0
    assert counts["commands_per_release"] == 1 / 50
    assert counts["server_us_per_reservation"] > 0
    reports = len(Subject(store).offers)
    assert after - before >= 50 + reports
    for close in connected.closing:
        await close()


async def test_rounds_are_measured_and_the_pool_is_removed(redis_server: RedisServer) -> None:
    """The benchmark measures each kind of reservation on each store, and leaves no key."""
    found = await measure(redis_server.url, rounds=2, requests=40)
    assert [(row["reserves"], row["lanes"], row["store"]) for row in found["rows"]] == [
        (kind, lanes, store)
        for kind in ("lease", "quota", "lease and quota")
        for lanes in LANES
        for store in ("processes", "redis")
    ]
    assert all(row["degraded_share"] < 1 for row in found["rows"])
    assert all(row["requests_per_s"] > 0 for row in found["rows"])
    assert redis_server.command("DBSIZE") == 0
