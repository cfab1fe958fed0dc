"""A guarded store answers in time, whatever the remote store does. All in virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

import pytest

from draftgate.backends.sim.virtual_time import VirtualTimeLoop, run_virtual
from draftgate.gateway.state.calls import DEADLINE_S, MOST_CALLS, PATIENCE
from draftgate.gateway.state.guarded import AT_ONCE, GuardedStore
from draftgate.gateway.state.store import STALE_S, Refusal
from tests.gateway.flaky_store import FlakyStore, guarded
from tests.gateway.stores import granted, leased_tokens, offer, report, reserve, views

BACK_S = 2 * PATIENCE.longest_pause_s
"""Time after which a recovered server has been noticed."""


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in virtual time, where waiting takes no real time."""

    @wraps(test)
    def run(**given: Any) -> None:
        run_virtual(test(**given))

    return run


@asynccontextmanager
async def pair(**told: Any) -> AsyncIterator[tuple[FlakyStore, GuardedStore]]:
    """A store and its guard; one worker has reported."""
    remote = FlakyStore()
    store = guarded(remote)
    await store.publish(report(**told))
    yield remote, store
    await store.close()


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def duration_s(call: Awaitable[object]) -> float:
    """The duration of a call."""
    begin_s = now_s()
    await call
    return now_s() - begin_s


async def broken(remote: FlakyStore, store: GuardedStore, failure: str = "refused") -> None:
    """Let the store fail until the guard opens its breaker."""
    remote.failure = failure
    for _ in range(PATIENCE.failures):
        await store.renew((), 30.0)
    assert store.outage == failure


@in_virtual_time
async def test_answers_of_a_working_store_pass_unchanged() -> None:
    """A working store's answers pass unchanged and are not degraded."""
    async with pair() as (remote, store):
        found = await reserve(store, "r", 100)
        assert found.lease is not None
        assert not found.degraded
        assert await leased_tokens(remote.inner) == 100
        assert await store.snapshot() == await remote.snapshot()
        assert await store.renew((found.lease,), 30.0) == frozenset()
        assert store.outage is None


@in_virtual_time
async def test_no_call_waits_longer_than_the_deadline() -> None:
    """A slow store costs each call the deadline, and this gateway answers alone."""
    async with pair() as (remote, store):
        remote.delay_s = 0.5
        for call in (
            store.publish(report(seq=1)),
            store.snapshot(),
            store.renew((), 30.0),
            store.withdraw("x", "1", 0),
            reserve(store, "r"),
        ):
            assert await duration_s(call) == pytest.approx(DEADLINE_S)
        assert await duration_s(store.release(("r",))) == 0.0
        found = await reserve(store, "s", 10)
        assert found.lease is not None
        assert found.degraded
        assert (await store.snapshot()).degraded


@in_virtual_time
async def test_a_dead_store_is_not_asked_until_it_is_back() -> None:
    """After several failures no call waits, probes become rarer, and the first answer ends the
    outage."""
    async with pair() as (remote, store):
        await broken(remote, store)
        begin_s, asked = now_s(), remote.calls.total()
        for index in range(50):
            found = await reserve(store, f"r{index}", 10)
            assert found.lease is not None
            assert found.degraded
        assert (now_s(), remote.calls.total()) == (begin_s, asked)
        await asyncio.sleep(60.0)
        probes = remote.calls.total() - asked
        assert 60.0 / PATIENCE.longest_pause_s <= probes < 20
        remote.failure = None
        await asyncio.sleep(BACK_S)
        assert store.outage is None
        await store.publish(report(seq=1))
        assert not (await reserve(store, "s")).degraded


@in_virtual_time
async def test_an_outage_is_logged_twice(caplog: pytest.LogCaptureFixture) -> None:
    """The log has one line at its start and one at its end, none per request."""
    caplog.set_level(logging.DEBUG, "draftgate")
    async with pair() as (remote, store):
        await broken(remote, store)
        for index in range(100):
            await reserve(store, f"r{index}")
        await asyncio.sleep(30.0)
        remote.failure = None
        await asyncio.sleep(BACK_S)
        told = [(record.levelname, record.message) for record in caplog.records]
        assert told == [
            ("WARNING", "state store is unavailable"),
            ("INFO", "state store recovered"),
        ]
        assert caplog.records[0].draftgate_fields == {"reason": "refused"}


@in_virtual_time
async def test_timeouts_open_the_breaker_only_after_two_seconds() -> None:
    """Short slowness is no outage, however many calls it delays; two seconds of it are."""
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
    """An answer that arrived during the stall is used, and does not count as a failure."""
    async with pair() as (remote, store):
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        remote.delay_s = 0.001
        for index in range(5 * PATIENCE.failures):
            call = asyncio.create_task(reserve(store, f"r{index}"))
            await asyncio.sleep(0)
            loop._jumping._advance(0.1)  # a callback blocks the loop
            assert not (await call).degraded
        assert store.outage is None


@in_virtual_time
async def test_repeated_stalls_do_not_open_the_breaker() -> None:
    """Repeated stalls do not open the breaker, because the store may be fast."""
    async with pair() as (remote, store):
        loop = asyncio.get_running_loop()
        remote.delay_s = 10.0
        for index in range(5 * PATIENCE.failures):
            call = asyncio.create_task(reserve(store, f"r{index}"))
            for _ in range(2):
                await asyncio.sleep(DEADLINE_S / 2)
                loop._jumping._advance(1.0)
                await asyncio.sleep(0)
            assert (await call).degraded
        assert store.outage is None


@in_virtual_time
async def test_living_leases_are_restored_after_an_outage() -> None:
    """Living leases from before and during the outage are restored; ended ones are not."""
    async with pair(capacity_tokens=10**6) as (remote, store):
        before = await granted(store, "before", 1)
        await granted(store, "ended meanwhile", 10)
        await asyncio.sleep(0.1)
        await broken(remote, store)
        taken = await granted(store, "taken", 100)
        await granted(store, "short", 1000)
        await store.release(("ended meanwhile", "short"))
        await asyncio.sleep(5.0)
        await store.renew((before, taken), 30.0)
        remote.forget()
        remote.failure = None
        await asyncio.sleep(BACK_S)
        await store.publish(report(seq=1))
        assert {lease.request_id for lease in remote.inner.leases()} == {"before", "taken"}
        assert await leased_tokens(remote.inner) == 101


@in_virtual_time
async def test_releases_of_an_outage_are_sent_afterwards() -> None:
    """Capacity is freed before the leases expire, and no release is pending for ever."""
    async with pair() as (remote, store):
        for index in range(5):
            await granted(store, f"r{index}", 100)
        await asyncio.sleep(0.1)
        await broken(remote, store)
        await store.release([f"r{index}" for index in range(4)])
        remote.failure = None
        await asyncio.sleep(PATIENCE.first_pause_s + 0.1)
        assert [lease.request_id for lease in remote.inner.leases()] == ["r4"]
        await broken(remote, store)
        for index in range(1000):
            await store.release((f"s{index}",))
            await asyncio.sleep(1.0)
        assert len(store._pending) <= 31


@in_virtual_time
async def test_a_late_lease_is_released() -> None:
    """A lease that arrives after its request has ended is released."""
    async with pair() as (remote, store):
        remote.delay_s = 0.5
        assert (await reserve(store, "r", 100)).degraded
        await store.release(("r",))
        await asyncio.sleep(5.0)
        assert remote.inner.leases() == []
        assert remote.calls["reserve"] == 1


@in_virtual_time
async def test_a_cancelled_reservation_leaves_nothing() -> None:
    """A client that disconnects during the reservation holds no capacity afterwards."""
    async with pair() as (remote, store):
        for ticks in range(8):
            remote.delay_s = 0.0 if ticks % 2 else 0.01
            call = asyncio.create_task(reserve(store, "r", 100))
            for _ in range(ticks):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait({call})
            await store.release(("r",))
            await asyncio.sleep(1.0)
            assert remote.inner.leases() == []


@in_virtual_time
async def test_a_pending_release_does_not_end_a_newer_lease() -> None:
    """A request that starts again keeps its new lease, although the old release is pending."""
    async with pair() as (remote, store):
        await granted(store, "r", 100)
        remote.failure = "refused"
        await store.release(("r",))
        await asyncio.sleep(0.1)
        remote.failure = None
        await granted(store, "r", 50)
        await store.release(("another",))
        await asyncio.sleep(0.1)
        assert await leased_tokens(remote.inner) == 50


@in_virtual_time
async def test_a_renewal_does_not_restore_a_released_lease() -> None:
    """A lease released during its renewal ends, in whatever order the calls arrive."""
    async with pair() as (remote, store):
        lease = await granted(store, "r", 100)
        remote.delay_s = 0.01
        renewing = asyncio.create_task(store.renew((lease,), 30.0))
        await asyncio.sleep(0.005)
        remote.delay_s = 0.0  # the release arrives first
        await store.release(("r",))
        await renewing
        await asyncio.sleep(1.0)
        assert remote.inner.leases() == []


@in_virtual_time
async def test_alone_each_gateway_takes_its_share() -> None:
    """During an outage a gateway uses its share of shared workers, and all of its own."""
    async with pair(capacity_tokens=1000) as (remote, store):
        await store.publish(report("own", capacity_tokens=1000, address=""))
        remote.gateways = 4
        await store.snapshot()
        await broken(remote, store)
        for index in range(25):
            await granted(store, f"r{index}", 10)
        refused = await reserve(store, "more", 10)
        assert (refused.refusal, refused.degraded) == (Refusal.FULL, True)
        for index in range(100):
            await granted(store, f"own{index}", 10, offer("own"))
        assert (await reserve(store, "more", 10, offer("own"))).refusal is Refusal.FULL


@in_virtual_time
async def test_an_outage_overshoots_by_less_than_the_capacity() -> None:
    """Gateways together lease less than twice the capacity during an outage."""
    remote = FlakyStore()
    gateways = [guarded(remote) for _ in range(4)]
    await gateways[0].publish(report(capacity_tokens=1000))
    remote.gateways = 4
    for store in gateways:
        await store.snapshot()
    held = 0
    while (await reserve(gateways[0], f"before{held}", 10)).lease is not None:
        held += 10
    assert held == 1000
    for number, store in enumerate(gateways):
        await broken(remote, store)
        index = 0
        while (await reserve(store, f"{number}-{index}", 10)).lease is not None:
            index += 1
        held += 10 * index
    assert held == 1000 + 3 * 250 < 2000
    for store in gateways:
        await store.close()


@in_virtual_time
async def test_a_stuck_store_has_bounded_calls() -> None:
    """The number of calls in flight is bounded, and no caller waits long."""
    async with pair(capacity_tokens=0) as (remote, store):
        remote.delay_s = 1000.0
        asked = remote.calls["reserve"]
        begin_s = now_s()
        calls = [reserve(store, f"r{index}") for index in range(20 * MOST_CALLS)]
        found = await asyncio.gather(*calls)
        assert all(one.lease is not None and one.degraded for one in found)
        assert remote.calls["reserve"] - asked == MOST_CALLS
        assert now_s() - begin_s == pytest.approx(DEADLINE_S)


@in_virtual_time
async def test_a_store_without_memory_refuses_no_request() -> None:
    """Until workers report again, this gateway decides by its own knowledge."""
    async with pair() as (remote, store):
        lease = await granted(store, "held", 100)
        remote.forget()
        found = await reserve(store, "r", 10)
        assert found.lease is not None
        assert found.degraded
        assert found.lease.number > lease.number
        await store.renew((lease, found.lease), 30.0)
        await store.publish(report(seq=1))
        assert await leased_tokens(remote.inner) == 110
        assert not (await reserve(store, "s", 10)).degraded


@in_virtual_time
async def test_a_store_without_memory_hides_no_worker() -> None:
    """Missing workers stay listed for as long as they could be silent."""
    async with pair() as (remote, store):
        await store.snapshot()
        remote.forget()
        assert set(await views(store)) == {"w"}
        assert not (await store.snapshot()).degraded
        await asyncio.sleep(STALE_S)
        assert await views(store) == {}


@in_virtual_time
async def test_a_worker_that_left_is_gone_at_once() -> None:
    """A withdrawal in the store is effective at once."""
    async with pair() as (remote, store):
        await remote.withdraw("w", "1", 1)
        found = await reserve(store, "r")
        assert (found.refusal, found.degraded) == (Refusal.GONE, False)
        await store.withdraw("w", "1", 2)
        assert await views(store) == {}


@in_virtual_time
async def test_reports_age_during_an_outage() -> None:
    """During an outage, reports have their true age and only this gateway's leases."""
    async with pair() as (remote, store):
        await granted(store, "r", 100)
        await store.snapshot()
        await broken(remote, store)
        await asyncio.sleep(20.0)
        found = await store.snapshot()
        assert found.degraded
        (view,) = found.workers
        assert view.age_s == pytest.approx(20.0, abs=0.1)
        assert view.leased_tokens == 100
        await store.publish(report(seq=1))
        assert (await views(store))["w"].age_s == 0.0


@in_virtual_time
async def test_releases_are_batched() -> None:
    """Releases at the same time share one or two calls, and no caller waits."""
    async with pair() as (remote, store):
        remote.delay_s = 0.001
        for index in range(50):
            await granted(store, f"r{index}", 1)
        begin_s = now_s()
        for index in range(50):
            await store.release((f"r{index}",))
        assert now_s() == begin_s
        await asyncio.sleep(1.0)
        assert remote.inner.leases() == []
        assert remote.calls["release"] <= 2


@in_virtual_time
async def test_many_leases_take_many_calls() -> None:
    """Each call fits the deadline, and all leases are restored after an outage."""
    async with pair(capacity_tokens=0) as (remote, store):
        leases = [await granted(store, f"r{index}", 1) for index in range(5 * AT_ONCE + 1)]
        asked = remote.calls["renew"]
        await store.renew(leases, 30.0)
        assert remote.calls["renew"] - asked == 6
        await broken(remote, store)
        remote.forget()
        remote.failure = None
        await asyncio.sleep(BACK_S)
        assert remote.inner.leases() == leases
        await store.release([lease.request_id for lease in leases])
        await asyncio.sleep(1.0)
        assert remote.inner.leases() == []
        assert remote.calls["release"] == 6


@in_virtual_time
async def test_close_sends_pending_releases_and_ends_all_calls() -> None:
    """Pending releases are sent first, and nothing keeps running, also during an outage."""
    async with pair() as (remote, store):
        await granted(store, "r", 1)
        await store.release(("r",))
        await store.close()
        assert remote.inner.leases() == []
    remote = FlakyStore()
    store = guarded(remote)
    await broken(remote, store)
    remote.failure, remote.delay_s = None, 1000.0
    await asyncio.sleep(1.0)
    await store.close()
    assert remote.calls["close"] == 1
    assert asyncio.all_tasks() == {asyncio.current_task()}
