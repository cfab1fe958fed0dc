"""Tests that the search for workers finds every worker with capacity, and few searches compare
all."""

from __future__ import annotations

from random import Random
from typing import cast

from hypothesis import example, given
from hypothesis import strategies as st

from draftgate.backends.peer.backend import PeerBackend
from draftgate.gateway.dispatch.kv_pulls import KvPulls
from draftgate.gateway.dispatch.routing import Router
from draftgate.gateway.dispatch.search import WorkerSearch
from draftgate.gateway.fleet import FleetWorker, PeerWorker
from draftgate.policies.capacity import CapacityNeed, has_capacity
from draftgate.policies.registry import routing_policy
from draftgate.policies.routing.types import RouteView
from draftgate.policies.types import RequestView
from tests.gateway.test_queue import Backend, Fleet

SIZE = 100
VIEW = RouteView(RequestView(800, 20, 1.0), 820, 20.0)
FULL = 2
"""Number of sequences of a full worker."""


class CountedFleet(Fleet):
    """A fleet that counts how many workers are compared."""

    compared = 0

    def open_among(self, workers: list[FleetWorker], adapter: str = "") -> list[FleetWorker]:
        self.compared += len(workers)
        return super().open_among(workers, adapter)


class Pool:
    """A large pool of full workers of other nodes, and its search."""

    def __init__(self) -> None:
        self.workers = [self._worker(number) for number in range(SIZE)]
        self.fleet = CountedFleet(workers=self.workers)
        router = Router(routing_policy("least_loaded"), Random(0).random, KvPulls(lambda: 0.0))
        self.search = WorkerSearch(self.fleet, router, binds_early=False)

    @staticmethod
    def _worker(number: int) -> PeerWorker:
        worker = PeerWorker(f"w-{number}", cast(PeerBackend, Backend(FULL)), "1")
        for sequence in range(FULL):
            worker.reserve(str(sequence), CapacityNeed(1, 10, 30))
        return worker

    def set_sequences(self, number: int, sequences: int) -> None:
        """Let a worker run this many sequences, and report the change."""
        worker = self.workers[number]
        for sequence in range(FULL):
            worker.release(str(sequence))
        for sequence in range(sequences):
            worker.reserve(str(sequence), CapacityNeed(1, 10, 30))
        self.search.mark(worker)

    def find(self, need: CapacityNeed, taken: frozenset[str] = frozenset()) -> set[str]:
        """Return the ids of the workers that the search offers, of which it compares some."""
        found = self.search.find(need, lambda: VIEW, avoid=frozenset(), taken=taken)
        return set() if found is None else {worker.worker_id for worker, _ in found[0]}

    def with_capacity(self, need: CapacityNeed, taken: frozenset[str] = frozenset()) -> set[str]:
        """Return the ids of all workers with capacity."""
        return {
            worker.worker_id
            for worker in self.workers
            if worker.worker_id not in taken and has_capacity(worker.usage, need)
        }


numbers = st.integers(0, SIZE - 1)
events = st.lists(
    st.one_of(
        st.tuples(st.just("report"), numbers, st.integers(0, FULL)),
        st.tuples(st.just("search"), numbers, st.integers(1, FULL)),
    ),
    max_size=30,
)


@given(events)
@example([("search", 0, 1), ("report", 7, 1), ("search", 7, 1), ("search", 0, 2), ("search", 0, 1)])
def test_a_request_gets_a_worker_exactly_if_one_has_capacity(
    script: list[tuple[str, int, int]],
) -> None:
    """A search finds a worker exactly if one has capacity, and only workers with capacity.

    The number of a search is that of a worker that another request has claimed.
    """
    pool = Pool()
    for what, number, sequences in script:
        if what == "report":
            pool.set_sequences(number, sequences)
            continue
        need, taken = CapacityNeed(sequences, 10, 30), frozenset({f"w-{number}"})
        expected, found = pool.with_capacity(need, taken), pool.find(need, taken)
        assert found <= expected
        assert bool(found) == bool(expected)


def test_reports_of_full_workers_cost_one_comparison_each() -> None:
    """While a request waits in a full pool, each report of a worker compares only this worker."""
    pool, need = Pool(), CapacityNeed(1, 10, 30)
    assert not pool.find(need)
    pool.fleet.compared = 0
    for number in range(SIZE):
        pool.set_sequences(number, FULL)
        assert not pool.find(need)
    assert pool.fleet.compared == SIZE
    pool.set_sequences(42, FULL - 1)
    assert pool.find(need) == {"w-42"}


def test_workers_that_join_are_searched() -> None:
    """A change of the fleet starts a new search of all workers."""
    pool, need = Pool(), CapacityNeed(1, 10, 30)
    assert not pool.find(need)
    joined = PeerWorker("new", cast(PeerBackend, Backend(FULL)), "1")
    pool.fleet.workers = [*pool.workers, joined]
    assert pool.find(need) == {"new"}
