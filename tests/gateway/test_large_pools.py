"""Tests of decisions in a pool of many workers, which do not read the whole pool."""

from __future__ import annotations

import asyncio
from random import Random
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.base import Backend
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cluster.members import Members, Reach
from draftgate.gateway.dispatch.pool_totals import SMALL_POOL, PoolReader
from draftgate.gateway.dispatch.routing import MOST_COMPARED
from draftgate.gateway.fleet import Fleet as RealFleet
from draftgate.gateway.state.commands import ListWorkers
from draftgate.gateway.state.store import Store
from draftgate.gateway.state.values import Snapshot, WorkerReport, WorkerView
from draftgate.lab.sim.virtual_time import run_virtual
from draftgate.policies.routing.selection import draw_some
from draftgate.policies.routing.types import RouteView
from draftgate.policies.types import RequestView
from tests.gateway.test_queue import Fleet, queue_of, wait_for_worker, waiting_request

LARGE = 4 * MOST_COMPARED


@given(st.integers(0, 300), st.integers(1, 100), st.integers(0, 2**32))
def test_a_draw_has_distinct_values_in_order(count: int, most: int, seed: int) -> None:
    """A draw has the requested number of distinct values, in their order."""
    found = draw_some(range(count), most, Random(seed).random)
    assert list(found) == sorted(set(found))
    assert len(found) == min(count, most)
    assert set(found) <= set(range(count))


def test_every_worker_is_drawn_equally_often() -> None:
    """Each of 200 workers is among 20 drawn workers in a tenth of the draws."""
    draw, counts = Random(0).random, [0] * 200
    for _ in range(4000):
        for place in draw_some(range(200), 20, draw):
            counts[place] += 1
    assert min(counts) > 320
    assert max(counts) < 480


def test_a_large_pool_finds_the_last_worker_with_capacity() -> None:
    """A request gets the only worker with capacity, even if the draw does not contain it."""

    async def scenario() -> None:
        queue, workers = queue_of(*[1] * LARGE)
        for number in range(LARGE):
            await wait_for_worker(queue, waiting_request(number))
        assert all(worker.usage.sequences == 1 for worker in workers)

    run_virtual(scenario())


@pytest.mark.parametrize("count", [MOST_COMPARED, LARGE])
def test_a_decision_compares_a_bounded_number_of_workers(count: int) -> None:
    """A decision compares all workers of a small pool, and 64 of a large pool."""

    async def scenario() -> None:
        queue, workers = queue_of(*[1] * count)
        found = queue.router.compared(lambda: VIEW, workers)
        assert len(found) == MOST_COMPARED

    run_virtual(scenario())


VIEW = RouteView(RequestView(800, 20, 1.0), 820, 20.0)


def test_a_decision_compares_the_holders_of_the_prompt() -> None:
    """The worker that probably holds a prompt is compared with every draw."""

    async def scenario() -> None:
        queue, workers = queue_of(*[1] * LARGE)
        hashes = tuple(bytes([number]) for number in range(50))
        queue.router.history.record("w-200", hashes, 0)
        view = RouteView(VIEW.request, VIEW.most_tokens, 20.0, block_hashes=hashes)
        for _ in range(20):
            assert workers[200] in queue.router.compared(lambda: view, workers)

    run_virtual(scenario())


def test_loads_of_a_large_pool_are_read_again_after_a_pause() -> None:
    """Forecasts in a large pool use the same loads for a time that grows with the pool."""
    now_s = [0.0]

    async def scenario() -> None:
        _, workers = queue_of(*[1] * LARGE)
        reader = PoolReader(cast(RealFleet, Fleet(workers=workers)), lambda: now_s[0])
        first = reader.view(100.0)
        assert (first.workers, reader.max_sequences) == (LARGE, LARGE)
        assert reader.view(100.0) is first
        now_s[0] = 1.0
        assert reader.view(100.0) is not first

    run_virtual(scenario())


def test_loads_of_a_small_pool_are_always_present() -> None:
    """Forecasts in a small pool always read the loads."""

    async def scenario() -> None:
        _, workers = queue_of(*[1] * SMALL_POOL)
        reader = PoolReader(cast(RealFleet, Fleet(workers=workers)), lambda: 0.0)
        assert reader.view(100.0) is not reader.view(100.0)

    run_virtual(scenario())


class Pool:
    """A store with many workers and gateways, which counts its snapshots."""

    outage: str | None = None

    def __init__(self, gateways: int) -> None:
        self.read = 0
        self.degraded = False
        self._gateways = gateways
        self._views = tuple(
            WorkerView(WorkerReport(f"w-{number}", "1", 1), 0.0, 0, 0) for number in range(1000)
        )

    async def call(self, _command: ListWorkers) -> Snapshot:
        self.read += 1
        return Snapshot(self._views, self._gateways, self.degraded, nodes=self._gateways)


def _no_backend(config: WorkerConfig) -> Backend:
    raise AssertionError("the node has no worker")


def empty_fleet() -> RealFleet:
    """Return the fleet of a node without workers."""
    return RealFleet(lambda: _no_backend, ())


def members_of(store: Pool, fleet: RealFleet) -> Members:
    """Return members that link to no worker, because the reports have no address."""
    return Members(fleet, cast(Store, store), cast(Reach, None), lambda _worker: None)


@pytest.mark.parametrize(("gateways", "reads"), [(1, 20), (10, 20), (64, 3)])
def test_gateways_of_a_large_pool_read_the_store_less_often(gateways: int, reads: int) -> None:
    """The snapshots of all gateways take a bounded share of the store's time."""
    store = Pool(gateways)

    async def scenario() -> None:
        members = members_of(store, empty_fleet())
        for _ in range(20):
            await members.refresh()
            await asyncio.sleep(1.0)

    run_virtual(scenario())
    assert store.read == reads


def test_an_outage_is_noticed_with_the_next_heartbeat() -> None:
    """A gateway of a large pool reads the store again when the store does not respond."""
    store = Pool(64)

    async def scenario() -> None:
        members = members_of(store, fleet)
        await members.refresh()
        store.outage, store.degraded = "no response", True
        await members.refresh()
        assert fleet.rivals == 63
        store.outage, store.degraded = None, False
        await members.refresh()
        assert fleet.rivals == 0

    fleet = empty_fleet()
    run_virtual(scenario())
