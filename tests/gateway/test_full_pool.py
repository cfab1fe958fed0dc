"""Tests of pools whose workers seem free to a gateway, while the leases in the store fill them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgate.gateway.assembly import loop_time_s
from draftgate.gateway.dispatch.queue import BACKOFF_S
from draftgate.gateway.state.commands import (
    ListWorkers,
    ReleaseLeases,
    RenewLeases,
    ReserveLease,
    StoreCommand,
    T,
)
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.state.values import Lease
from tests.gateway.test_claims import CONFIG, job
from tests.gateway.troubles import RecordingWatch, run_job, run_scenario, simulated
from tests.gateway.two_gateways import Gateway, Pool, pool_of

MEMORY_TOKENS = 2720
"""Tokens of KV memory of a worker with `CONFIG`."""


class CountingStore(MemoryStore):
    """A store that takes a millisecond for each reservation, and counts refusals and releases."""

    memory = None

    def __init__(self) -> None:
        super().__init__(loop_time_s)
        self.calls = Counter[str]()

    async def call(self, command: StoreCommand[T]) -> T:
        if not isinstance(command, ReserveLease):
            return self.apply(command)
        await asyncio.sleep(0.001)
        found = self.apply(command)
        self.calls["refused" if found.lease is None else "granted"] += 1
        return found

    def release(self, command: ReleaseLeases) -> None:
        self.calls["release"] += 1
        super().release(command)


@dataclass
class FullPool:
    """Workers that seem idle to both gateways, although the leases `full-0`, `full-1`, ... fill
    them."""

    pool: Pool
    store: CountingStore
    clients: list[asyncio.Task[object]] = field(default_factory=list)
    watches: list[RecordingWatch] = field(default_factory=list)

    @property
    def first(self) -> Gateway:
        return self.pool.gateways[0]

    @property
    def placed(self) -> list[bool]:
        """Whether each request has its worker."""
        return [bool(watch.workers) for watch in self.watches]

    def send(self, number: int, prompt: int = 60, output: int = 150, *, gateway: int = 0) -> None:
        """Send a request."""
        watch, dispatcher = RecordingWatch(), self.pool.gateways[gateway].dispatcher
        self.watches.append(watch)
        run = run_job(dispatcher, job(number, prompt, output), watch)
        self.clients.append(asyncio.create_task(run))


@asynccontextmanager
async def full_pool(*leased: int) -> AsyncIterator[FullPool]:
    """Start a worker for each number of leased tokens."""
    store = CountingStore()
    async with pool_of(simulated({}), len(leased), (store, store), CONFIG) as pool:
        for index, (worker, tokens) in enumerate(zip(pool.workers, leased, strict=True)):
            lease = Lease(f"full-{index}", worker.worker_id, worker.epoch, tokens, index + 1)
            await store.call(RenewLeases((lease,), 600.0))
        full = FullPool(pool, store)
        yield full
        for client in full.clients:
            client.cancel()
        await asyncio.gather(*full.clients, return_exceptions=True)


@pytest.mark.parametrize("waiting", [2, 40])
def test_refusals_do_not_grow_with_the_queue(waiting: int) -> None:
    """A gateway with many waiting requests of one size asks as often as with two: once every
    `BACKOFF_S`."""

    async def scenario() -> Counter[str]:
        async with full_pool(MEMORY_TOKENS, MEMORY_TOKENS) as full:
            for number in range(waiting):
                full.send(number)
            await asyncio.sleep(0.1)
            assert full.store.calls["refused"] <= waiting + 2  # all arrive before the first answer
            full.store.calls.clear()
            await asyncio.sleep(10.0)
            assert not any(full.placed)
            return Counter(full.store.calls)

    calls = run_scenario(scenario())
    assert 10.0 / BACKOFF_S * 0.9 <= calls["refused"] <= 1.1 * 10.0 / BACKOFF_S
    assert calls["release"] == calls["granted"] == 0


@pytest.mark.parametrize("waited_s", [0.2, 3.0])
def test_all_waiting_requests_are_sent_when_memory_is_free(waited_s: float) -> None:
    """All requests that fit have their workers within two `BACKOFF_S` and a few milliseconds,
    instead of one request per `BACKOFF_S`."""

    async def scenario() -> None:
        async with full_pool(MEMORY_TOKENS, MEMORY_TOKENS) as full:
            for number in range(8):
                full.send(number)
            await asyncio.sleep(waited_s)
            await full.store.call(ReleaseLeases(("full-0", "full-1")))
            await asyncio.sleep(2 * BACKOFF_S + 0.02)
            assert all(full.placed)
            await asyncio.gather(*full.clients)

    run_scenario(scenario())


def test_a_refused_long_prompt_does_not_hold_up_shorter_requests() -> None:
    """Shorter requests that fit are sent although the store refuses the long prompt before them."""

    async def scenario() -> None:
        async with full_pool(MEMORY_TOKENS - 600, MEMORY_TOKENS - 600) as full:
            full.send(0, 1200, 900)
            await asyncio.sleep(0.01)
            full.send(1)
            full.send(2)
            await asyncio.sleep(2 * BACKOFF_S)
            assert full.placed == [False, True, True]

    run_scenario(scenario())


ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.001, 0.03, 0.3]),
        st.integers(0, 1),
        st.sampled_from([20, 300, 1200]),
        st.sampled_from([1, 40, 300]),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=10)
@given(ARRIVALS, st.lists(st.integers(1, MEMORY_TOKENS), min_size=1, max_size=2))
def test_every_request_of_a_full_pool_is_served(
    arrivals: list[tuple[float, int, int, int, bool]], leased: list[int]
) -> None:
    """Whatever arrives, leaves and ends, every remaining request is served, and no lease or claim
    outlives its request."""

    async def scenario() -> None:
        async with full_pool(*leased) as full:
            for number, (pause_s, gateway, prompt, output, leaves) in enumerate(arrivals):
                await asyncio.sleep(pause_s)
                full.send(number, prompt, output, gateway=gateway)
                if leaves:
                    full.clients[number // 2].cancel()
            for index in range(len(leased)):
                await asyncio.sleep(1.0)
                await full.store.call(ReleaseLeases((f"full-{index}",)))
            async with asyncio.timeout(60.0):
                await asyncio.gather(*full.clients, return_exceptions=True)
            ended = [client.exception() for client in full.clients if not client.cancelled()]
            assert ended == [None] * len(ended)
            await asyncio.sleep(0.1)
            views = (await full.store.call(ListWorkers())).workers
            assert [view.leased_tokens + view.claimed_tokens for view in views] == [0] * len(leased)
            assert all(len(one.dispatcher.queue) == 0 for one in full.pool.gateways)

    run_scenario(scenario())
