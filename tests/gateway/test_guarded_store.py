"""Tests of the guarded store, which responds in time whatever the remote store does.

All tests run in virtual time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

import pytest

from draftgate.gateway.state.commands import (
    ListWorkers,
    PublishReport,
    ReleaseLeases,
    RenewLeases,
    WithdrawWorker,
)
from draftgate.gateway.state.guarded.calls import DEADLINE_S, MOST_CALLS, PATIENCE
from draftgate.gateway.state.guarded.store import AT_ONCE, GuardedStore
from draftgate.gateway.state.values import STALE_S, Refusal
from draftgate.lab.sim.virtual_time import VirtualTimeLoop, run_virtual
from tests.gateway.flaky_store import FlakyStore, guarded
from tests.gateway.stores import granted, leased_tokens, offer, report, reserve, views

BACK_S = 2 * PATIENCE.longest_pause_s
"""Time in which the guard notices a recovered server, in seconds."""


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in virtual time, in which waiting takes no real time."""

    @wraps(test)
    def run(**given: Any) -> None:
        run_virtual(test(**given))

    return run


@asynccontextmanager
async def pair(**fields: Any) -> AsyncIterator[tuple[FlakyStore, GuardedStore]]:
    """Yield a store and its guard after one worker has reported."""
    remote = FlakyStore()
    store = guarded(remote)
    await store.call(PublishReport(report(**fields)))
    yield remote, store
    await store.close()


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def duration_s(call: Awaitable[object]) -> float:
    """Return the duration of a call in seconds."""
    begin_s = now_s()
    await call
    return now_s() - begin_s


async def open_breaker(remote: FlakyStore, store: GuardedStore, failure: str = "refused") -> None:
    """Let the store fail until the guard opens its breaker."""
    remote.failure = failure
    for _ in range(PATIENCE.failures):
        await store.call(RenewLeases((), 30.0))
    assert store.outage == failure


@in_virtual_time
async def test_results_of_a_working_store_pass_unchanged() -> None:
    """The guard returns the results of a working store unchanged and not degraded."""
    async with pair() as (remote, store):
        found = await reserve(store, "r", 100)
        assert found.lease is not None
        assert not found.degraded
        assert await leased_tokens(remote.inner) == 100
        assert await store.call(ListWorkers()) == await remote.call(ListWorkers())
        assert await store.call(RenewLeases((found.lease,), 30.0)) == frozenset()
        assert store.outage is None


@in_virtual_time
async def test_a_snapshot_lists_no_worker_before_the_remote_store() -> None:
    """A worker whose first report is still on its way is not listed, so nobody relies on it."""
    remote = FlakyStore()
    store = guarded(remote)
    remote.delay_s = DEADLINE_S / 2
    publishing = asyncio.create_task(store.call(PublishReport(report())))
    await asyncio.sleep(DEADLINE_S / 4)
    remote.delay_s = 0.0
    assert (await store.call(ListWorkers())).workers == ()
    assert await publishing
    (listed,) = (await store.call(ListWorkers())).workers
    assert listed.report == report()
    await store.close()


@in_virtual_time
async def test_no_call_waits_longer_than_the_deadline() -> None:
    """Each call to a slow store takes at most the deadline, and the guard returns a degraded
    result."""
    async with pair() as (remote, store):
        remote.delay_s = 0.5
        for call in (
            store.call(PublishReport(report(seq=1))),
            store.call(ListWorkers()),
            store.call(RenewLeases((), 30.0)),
            store.call(WithdrawWorker("x", "1", 0)),
            reserve(store, "r"),
        ):
            assert await duration_s(call) == pytest.approx(DEADLINE_S)
        assert await duration_s(store.call(ReleaseLeases(("r",)))) == 0.0
        found = await reserve(store, "s", 10)
        assert found.lease is not None
        assert found.degraded
        assert (await store.call(ListWorkers())).degraded


@in_virtual_time
async def test_an_open_breaker_sends_only_probes() -> None:
    """The guard sends only increasingly rare probes to a dead store, and a reply ends the
    outage."""
    async with pair() as (remote, store):
        await open_breaker(remote, store)
        begin_s, calls_before = now_s(), remote.calls.total()
        for index in range(50):
            found = await reserve(store, f"r{index}", 10)
            assert found.lease is not None
            assert found.degraded
        assert (now_s(), remote.calls.total()) == (begin_s, calls_before)
        await asyncio.sleep(60.0)
        probes = remote.calls.total() - calls_before
        assert 60.0 / PATIENCE.longest_pause_s <= probes < 20
        remote.failure = None
        await asyncio.sleep(BACK_S)
        assert store.outage is None
        await store.call(PublishReport(report(seq=1)))
        assert not (await reserve(store, "s")).degraded


@in_virtual_time
async def test_an_outage_is_logged_twice(caplog: pytest.LogCaptureFixture) -> None:
    """The guard logs one line at the start and one at the end of an outage, but none per
    request."""
    caplog.set_level(logging.DEBUG, "draftgate")
    async with pair() as (remote, store):
        await open_breaker(remote, store)
        for index in range(100):
            await reserve(store, f"r{index}")
        await asyncio.sleep(30.0)
        remote.failure = None
        await asyncio.sleep(BACK_S)
        messages = [(record.levelname, record.message) for record in caplog.records]
        assert messages == [
            ("WARNING", "state store is unavailable"),
            ("INFO", "state store recovered"),
        ]
        assert caplog.records[0].draftgate_fields == {"reason": "refused", "purpose": "leases"}


@in_virtual_time
async def test_timeouts_open_the_breaker_only_after_two_seconds() -> None:
    """The guard opens its breaker only after two seconds of timeouts, however many calls are
    slow."""
    async with pair() as (remote, store):
        remote.delay_s = 0.1
        while now_s() < PATIENCE.timeouts_span_s - 0.1:
            await reserve(store, "r")
            assert store.outage is None
        await asyncio.sleep(0.2)
        await reserve(store, "r")
        assert store.outage == "no response within 20 ms"


@in_virtual_time
async def test_a_stall_of_the_event_loop_is_no_outage() -> None:
    """The guard uses a reply that arrives during a stall of the event loop."""
    async with pair() as (remote, store):
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        remote.delay_s = 0.001
        for index in range(5 * PATIENCE.failures):
            call = asyncio.create_task(reserve(store, f"r{index}"))
            await asyncio.sleep(0)
            loop._jumping.advance(0.1)  # a callback blocks the loop
            assert not (await call).degraded
        assert store.outage is None


@in_virtual_time
async def test_repeated_stalls_do_not_open_the_breaker() -> None:
    """Repeated stalls of the event loop do not open the breaker, because the store may be fast."""
    async with pair() as (remote, store):
        loop = asyncio.get_running_loop()
        remote.delay_s = 10.0
        for index in range(5 * PATIENCE.failures):
            call = asyncio.create_task(reserve(store, f"r{index}"))
            for _ in range(2):
                await asyncio.sleep(DEADLINE_S / 2)
                loop._jumping.advance(1.0)
                await asyncio.sleep(0)
            assert (await call).degraded
        assert store.outage is None


@in_virtual_time
async def test_active_leases_are_restored_after_an_outage() -> None:
    """The guard restores active leases after an outage, but no released leases."""
    async with pair(capacity_tokens=10**6) as (remote, store):
        before = await granted(store, "before", 1)
        await granted(store, "ended", 10)
        await asyncio.sleep(0.1)
        await open_breaker(remote, store)
        taken = await granted(store, "taken", 100)
        await granted(store, "short", 1000)
        await store.call(ReleaseLeases(("ended", "short")))
        await asyncio.sleep(5.0)
        await store.call(RenewLeases((before, taken), 30.0))
        remote.forget()
        remote.failure = None
        await asyncio.sleep(BACK_S)
        await store.call(PublishReport(report(seq=1)))
        assert {lease.request_id for lease in remote.inner.leases()} == {"before", "taken"}
        assert await leased_tokens(remote.inner) == 101


@in_virtual_time
async def test_releases_of_an_outage_are_sent_afterwards() -> None:
    """The guard sends the releases of an outage afterwards and bounds the number of pending
    releases."""
    async with pair() as (remote, store):
        for index in range(5):
            await granted(store, f"r{index}", 100)
        await asyncio.sleep(0.1)
        await open_breaker(remote, store)
        await store.call(ReleaseLeases([f"r{index}" for index in range(4)]))
        remote.failure = None
        await asyncio.sleep(PATIENCE.first_pause_s + 0.1)
        assert [lease.request_id for lease in remote.inner.leases()] == ["r4"]
        await open_breaker(remote, store)
        for index in range(1000):
            await store.call(ReleaseLeases((f"s{index}",)))
            await asyncio.sleep(1.0)
        assert len(store._pending) <= 31


@in_virtual_time
async def test_a_late_lease_is_released() -> None:
    """The guard releases a lease that arrives after the end of its request."""
    async with pair() as (remote, store):
        remote.delay_s = 0.5
        assert (await reserve(store, "r", 100)).degraded
        await store.call(ReleaseLeases(("r",)))
        await asyncio.sleep(5.0)
        assert remote.inner.leases() == []
        assert remote.calls["ReserveLease"] == 1


@in_virtual_time
async def test_a_cancelled_reservation_leaves_no_lease() -> None:
    """A client that disconnects during a reservation leaves no lease."""
    async with pair() as (remote, store):
        for ticks in range(8):
            remote.delay_s = 0.0 if ticks % 2 else 0.01
            call = asyncio.create_task(reserve(store, "r", 100))
            for _ in range(ticks):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait({call})
            await store.call(ReleaseLeases(("r",)))
            await asyncio.sleep(1.0)
            assert remote.inner.leases() == []


@in_virtual_time
async def test_a_pending_release_does_not_end_a_newer_lease() -> None:
    """A restarted request keeps its new lease while the release of its old lease is pending."""
    async with pair() as (remote, store):
        await granted(store, "r", 100)
        remote.failure = "refused"
        await store.call(ReleaseLeases(("r",)))
        await asyncio.sleep(0.1)
        remote.failure = None
        await granted(store, "r", 50)
        await store.call(ReleaseLeases(("another",)))
        await asyncio.sleep(0.1)
        assert await leased_tokens(remote.inner) == 50


@in_virtual_time
async def test_a_renewal_does_not_restore_a_released_lease() -> None:
    """A lease that is released during its renewal ends in either order of the calls."""
    async with pair() as (remote, store):
        lease = await granted(store, "r", 100)
        remote.delay_s = 0.01
        renewing = asyncio.create_task(store.call(RenewLeases((lease,), 30.0)))
        await asyncio.sleep(0.005)
        remote.delay_s = 0.0  # the release arrives first
        await store.call(ReleaseLeases(("r",)))
        await renewing
        await asyncio.sleep(1.0)
        assert remote.inner.leases() == []


@in_virtual_time
async def test_a_gateway_uses_its_share_during_an_outage() -> None:
    """A gateway uses its share of shared workers and all of its own workers during an outage."""
    async with pair(capacity_tokens=1000) as (remote, store):
        await store.call(PublishReport(report("own", capacity_tokens=1000, address="")))
        remote.gateways = 4
        await store.call(ListWorkers())
        await open_breaker(remote, store)
        for index in range(25):
            await granted(store, f"r{index}", 10)
        refused = await reserve(store, "more", 10)
        assert (refused.refusal, refused.degraded) == (Refusal.FULL, True)
        for index in range(100):
            await granted(store, f"own{index}", 10, offer("own"))
        assert (await reserve(store, "more", 10, offer("own"))).refusal is Refusal.FULL


@in_virtual_time
async def test_an_outage_overshoots_by_less_than_the_capacity() -> None:
    """All gateways together lease less than twice the capacity during an outage."""
    remote = FlakyStore()
    gateways = [guarded(remote) for _ in range(4)]
    await gateways[0].call(PublishReport(report(capacity_tokens=1000)))
    remote.gateways = 4
    for store in gateways:
        await store.call(ListWorkers())
    held = 0
    while (await reserve(gateways[0], f"before{held}", 10)).lease is not None:
        held += 10
    assert held == 1000
    for number, store in enumerate(gateways):
        await open_breaker(remote, store)
        index = 0
        while (await reserve(store, f"{number}-{index}", 10)).lease is not None:
            index += 1
        held += 10 * index
    assert held == 1000 + 3 * 250 < 2000
    for store in gateways:
        await store.close()


@in_virtual_time
async def test_a_stuck_store_has_bounded_calls() -> None:
    """The guard bounds the calls in flight to a stuck store, and no caller waits beyond the
    deadline."""
    async with pair(capacity_tokens=0) as (remote, store):
        remote.delay_s = 1000.0
        calls_before = remote.calls["ReserveLease"]
        begin_s = now_s()
        calls = [reserve(store, f"r{index}") for index in range(20 * MOST_CALLS)]
        found = await asyncio.gather(*calls)
        assert all(reservation.lease is not None and reservation.degraded for reservation in found)
        assert remote.calls["ReserveLease"] - calls_before == MOST_CALLS
        assert now_s() - begin_s == pytest.approx(DEADLINE_S)


@in_virtual_time
async def test_a_store_without_memory_refuses_no_request() -> None:
    """The guard grants degraded leases after a memory loss until workers report again."""
    async with pair() as (remote, store):
        lease = await granted(store, "held", 100)
        remote.forget()
        found = await reserve(store, "r", 10)
        assert found.lease is not None
        assert found.degraded
        assert found.lease.number > lease.number
        await store.call(RenewLeases((lease, found.lease), 30.0))
        await store.call(PublishReport(report(seq=1)))
        assert await leased_tokens(remote.inner) == 110
        assert not (await reserve(store, "s", 10)).degraded


@in_virtual_time
async def test_a_store_without_memory_hides_no_worker() -> None:
    """The guard lists missing workers for `STALE_S` after a memory loss of the store."""
    async with pair() as (remote, store):
        await store.call(ListWorkers())
        remote.forget()
        assert set(await views(store)) == {"w"}
        assert not (await store.call(ListWorkers())).degraded
        await asyncio.sleep(STALE_S)
        assert await views(store) == {}


@in_virtual_time
async def test_a_withdrawn_worker_is_gone_immediately() -> None:
    """The guard refuses leases of a withdrawn worker immediately."""
    async with pair() as (remote, store):
        await remote.call(WithdrawWorker("w", "1", 1))
        found = await reserve(store, "r")
        assert (found.refusal, found.degraded) == (Refusal.GONE, False)
        await store.call(WithdrawWorker("w", "1", 2))
        assert await views(store) == {}


@in_virtual_time
async def test_reports_age_during_an_outage() -> None:
    """Reports have their true age and only this gateway's leases during an outage."""
    async with pair() as (remote, store):
        await granted(store, "r", 100)
        await store.call(ListWorkers())
        await open_breaker(remote, store)
        await asyncio.sleep(20.0)
        found = await store.call(ListWorkers())
        assert found.degraded
        (view,) = found.workers
        assert view.age_s == pytest.approx(20.0, abs=0.1)
        assert view.leased_tokens == 100
        await store.call(PublishReport(report(seq=1)))
        assert (await views(store))["w"].age_s == 0.0


@in_virtual_time
async def test_releases_are_batched() -> None:
    """The guard sends simultaneous releases in at most two calls, and no caller waits."""
    async with pair() as (remote, store):
        remote.delay_s = 0.001
        for index in range(50):
            await granted(store, f"r{index}", 1)
        begin_s = now_s()
        for index in range(50):
            await store.call(ReleaseLeases((f"r{index}",)))
        assert now_s() == begin_s
        await asyncio.sleep(1.0)
        assert remote.inner.leases() == []
        assert remote.calls["ReleaseLeases"] <= 2


@in_virtual_time
async def test_many_leases_take_many_calls() -> None:
    """The guard splits many leases into several calls, so that each call meets the deadline."""
    async with pair(capacity_tokens=0) as (remote, store):
        leases = [await granted(store, f"r{index}", 1) for index in range(5 * AT_ONCE + 1)]
        calls_before = remote.calls["RenewLeases"]
        await store.call(RenewLeases(leases, 30.0))
        assert remote.calls["RenewLeases"] - calls_before == 6
        await open_breaker(remote, store)
        remote.forget()
        remote.failure = None
        await asyncio.sleep(BACK_S)
        assert remote.inner.leases() == leases
        await store.call(ReleaseLeases([lease.request_id for lease in leases]))
        await asyncio.sleep(1.0)
        assert remote.inner.leases() == []
        assert remote.calls["ReleaseLeases"] == 6


@in_virtual_time
async def test_close_sends_pending_releases_and_ends_all_calls() -> None:
    """The guard sends pending releases and ends all calls when it closes, even during an outage."""
    async with pair() as (remote, store):
        await granted(store, "r", 1)
        await store.call(ReleaseLeases(("r",)))
        await store.close()
        assert remote.inner.leases() == []
    remote = FlakyStore()
    store = guarded(remote)
    await open_breaker(remote, store)
    remote.failure, remote.delay_s = None, 1000.0
    await asyncio.sleep(1.0)
    await store.close()
    assert remote.calls["close"] == 1
    assert asyncio.all_tasks() == {asyncio.current_task()}
