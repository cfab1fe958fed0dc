"""Tests of the central queue, which chooses workers at dispatch in the policy's order."""

from __future__ import annotations

import asyncio
from itertools import count
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.errors import BackendFailed
from draftgate.gateway.dispatch.admission import (
    DEFAULT_BOUNDS,
    AdmissionController,
    Entry,
)
from draftgate.gateway.dispatch.claims import Claims
from draftgate.gateway.dispatch.kv_pulls import KvPulls
from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.dispatch.quotas import Quotas
from draftgate.gateway.dispatch.routing import Router
from draftgate.gateway.dispatch.waiting import Waiting
from draftgate.gateway.errors import Overloaded, QueueTimeout
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.state.memory.quotas import MemoryQuotas
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.lab.sim.virtual_time import run_virtual
from draftgate.policies.admission.types import AdmissionView, RefusalKind, Refused
from draftgate.policies.capacity import CapacityNeed
from draftgate.policies.ordering.fair import STARVATION_S
from draftgate.policies.registry import ordering_policy, routing_policy
from draftgate.policies.routing.types import RouteView
from draftgate.policies.types import RequestView, WorkerLoad
from tests.gateway.two_gateways import SharedWorker


class Backend:
    """A worker with a limited number of sequences."""

    card = SimpleNamespace(numerics_class=None)

    def __init__(self, capacities: int) -> None:
        self.max_sequences = capacities
        self.running = 0
        self.failure: str | None = None

    def load(self) -> WorkerLoad:
        pages = 0, 1000, 1000, 0.0, 0.5, ()
        limits = {"max_sequences": self.max_sequences, "step_tokens": 512}
        return WorkerLoad(self.running, *pages, **limits)


class Fleet(SimpleNamespace):
    """The part of a fleet that the queue uses."""

    @property
    def serving(self) -> list[FleetWorker]:
        return [worker for worker in self.workers if worker.backend.failure is None]

    def open_among(self, workers: list[FleetWorker], adapter: str = "") -> list[FleetWorker]:
        return [worker for worker in workers if worker.backend.failure is None]

    @property
    def serves(self) -> bool:
        return bool(self.serving)

    open = serving
    outage, rivals = "device lost", 0


def queue_of(*capacities: int, timeout_s: float = 60.0) -> tuple[CentralQueue, list[FleetWorker]]:
    """Return a queue and its workers with a limited number of sequences each."""
    workers = [FleetWorker(f"w-{index}", Backend(count)) for index, count in enumerate(capacities)]
    clock = asyncio.get_running_loop().time
    fleet = Fleet(workers=workers)
    router = Router(routing_policy("least_loaded"), Random(0).random, KvPulls(clock))
    claims, ordering = Claims(fleet, MemoryStore(clock)), ordering_policy("fair")
    return CentralQueue(fleet, ordering, router, claims, clock, timeout_s), workers


def waiting_request(key: int, priority: int = 0, sequences: int = 1) -> Waiting:
    """Return a request to queue."""
    now_s = asyncio.get_running_loop().time()
    need = CapacityNeed(sequences, 10, 30 * sequences)
    return Waiting(key, now_s, now_s + 10.0, priority, work_s=1.0, request_id=f"r-{key}", need=need)


async def wait_for_worker(queue: CentralQueue, waiting: Waiting) -> FleetWorker:
    """Wait for the turn of a request and return its worker."""
    need = waiting.need
    view = RouteView(RequestView(need.prompt_tokens, 20, 1.0), need.most_tokens, 20.0)
    return (await queue.turn(waiting, lambda: view)).worker


async def settle() -> None:
    """Run the loop until no callback is ready."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_most_urgent_request_gets_the_first_free_worker() -> None:
    """The queue gives the first free worker to the most urgent request."""

    async def scenario() -> None:
        queue, workers = queue_of(1, 1)
        assert [await wait_for_worker(queue, waiting_request(key)) for key in range(2)] == workers
        usual, urgent = (
            asyncio.create_task(wait_for_worker(queue, waiting_request(2 + p, -p)))
            for p in range(2)
        )
        await settle()
        assert len(queue) == 2
        assert queue.prompt_tokens == 20
        workers[1].release("r-1")
        queue.dispatch_waiting()
        await settle()
        assert urgent.result() is workers[1]
        assert not usual.done()
        workers[0].release("r-0")
        queue.dispatch_waiting()
        assert await usual is workers[0]
        assert len(queue) == queue.prompt_tokens == 0

    run_virtual(scenario())


def test_requests_that_become_overdue_are_served_once() -> None:
    """The queue serves requests exactly once if they become overdue during the service."""

    async def scenario() -> None:
        queue, workers = queue_of(1)
        await wait_for_worker(queue, waiting_request(0))
        waiting = [
            asyncio.create_task(wait_for_worker(queue, waiting_request(key, key)))
            for key in range(1, 6)
        ]
        await settle()
        # Requests become overdue between two readings of the clock.
        ticks = count(STARVATION_S - 0.25, 0.1)
        queue.now_s = lambda: next(ticks)
        served = 0
        while served < len(waiting):
            for key in range(6):
                workers[0].release(f"r-{key}")
            queue.dispatch_waiting()
            await settle()
            served = sum(task.done() for task in waiting)
        assert [task.result() for task in waiting] == workers * 5
        assert len(queue) == 0

    run_virtual(scenario())


def test_no_request_waits_longer_than_the_timeout() -> None:
    """A wait ends with an error at the timeout and does not block later requests."""

    async def scenario() -> None:
        queue, workers = queue_of(2, timeout_s=5.0)
        await wait_for_worker(queue, waiting_request(0))
        with pytest.raises(QueueTimeout) as caught:
            await wait_for_worker(queue, waiting_request(1, sequences=2))
        assert caught.value.retry_after_s is not None
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)
        assert await wait_for_worker(queue, waiting_request(2)) is workers[0]

    run_virtual(scenario())


def test_waiting_requests_fail_with_the_last_worker() -> None:
    """All waiting requests fail when the last worker fails."""

    async def scenario() -> None:
        queue, workers = queue_of(1)
        await wait_for_worker(queue, waiting_request(0))
        waiting = asyncio.create_task(wait_for_worker(queue, waiting_request(1)))
        await settle()
        workers[0].backend.failure = "device lost"
        queue.dispatch_waiting()
        with pytest.raises(BackendFailed, match="device lost"):
            await waiting
        assert len(queue) == 0

    run_virtual(scenario())


def test_a_disconnect_at_the_moment_of_dispatch_frees_the_worker() -> None:
    """A client that disconnects when it gets a worker does not keep the worker's capacity."""

    async def scenario() -> None:
        queue, workers = queue_of(1)
        await wait_for_worker(queue, waiting_request(0))
        leaving, next_ = (
            asyncio.create_task(wait_for_worker(queue, waiting_request(key))) for key in (1, 2)
        )
        await settle()
        workers[0].release("r-0")
        queue.dispatch_waiting()  # the request has a worker, but its task has not run yet
        leaving.cancel()
        await settle()
        assert leaving.cancelled()
        assert await next_ is workers[0]

    run_virtual(scenario())


STEPS = st.lists(
    st.tuples(st.sampled_from(["come", "end", "leave"]), st.integers(0, 30), st.integers(1, 3)),
    max_size=40,
)


@given(STEPS, st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_capacity_holds_and_nothing_leaks(
    steps: list[tuple[str, int, int]], capacities: list[int]
) -> None:
    """The queue respects capacities and frees everything for any order of events."""

    async def scenario() -> None:
        queue, workers = queue_of(*capacities)
        tasks: dict[int, asyncio.Task[FleetWorker]] = {}
        for key, (what, target, sequences) in enumerate(steps):
            task = tasks.get(target)
            if what == "come":
                tasks[key] = asyncio.create_task(
                    wait_for_worker(queue, waiting_request(key, sequences=sequences))
                )
            elif task is not None and what == "leave":
                task.cancel()
            elif task is not None and task.done() and not task.cancelled():
                task.result().release(f"r-{target}")
                queue.dispatch_waiting()
            if target % 2:
                await settle()
            for worker, most in zip(workers, capacities, strict=True):
                assert worker.usage.sequences <= max(most, 3)
                alone = len(worker._sent) == 1
                assert alone or worker.usage.sequences <= most
        for task in tasks.values():
            task.cancel()
        await settle()
        for key, task in tasks.items():
            if task.done() and not task.cancelled():
                task.result().release(f"r-{key}")
        assert len(queue) == queue.prompt_tokens == 0
        assert all(worker.reserved_tokens == 0 for worker in workers)
        assert all(worker.usage.unstarted_prompt_tokens == 0 for worker in workers)

    run_virtual(scenario())


class NeverAdmit:
    """An admission policy that refuses every request and predicts an absurd wait."""

    name = "never"

    def decide(self, view: AdmissionView, now_s: float) -> Refused:
        self.view = view
        return Refused(1e12, RefusalKind.DEADLINE, "never")


def test_admission_knows_its_share_of_the_workers() -> None:
    """The view of a policy has the gateway's share of the sequences on the workers of others."""

    async def scenario() -> None:
        queue, _ = queue_of(1)
        own, shared = FleetWorker("own", Backend(8)), SharedWorker("shared", Backend(8), "1")
        fleet, quotas = Fleet(workers=[own, shared]), Quotas(MemoryQuotas(), {}, lambda: 0.0)
        policy = NeverAdmit()
        admission = AdmissionController(fleet, queue, policy, quotas, DEFAULT_BOUNDS, lambda: 0.0)
        shares = []
        for reserved, running in ((0, 0), (0, 3), (1, 4), (1, 4)):
            for index in range(reserved):
                shared.reserve(f"{running}-{len(shares)}-{index}", CapacityNeed(1, 1, 2))
            shared.backend.running = running
            with pytest.raises(Overloaded):
                await admission.admit(Entry("r", (CapacityNeed(1, 1, 2),), 1))
            shares.append(policy.view.pool.share)
        assert shares == [1.0, 0.25, 0.25, 0.5]

    run_virtual(scenario())


def test_retry_after_is_at_most_an_hour() -> None:
    """The Retry-After header is at most an hour for any predicted wait."""

    async def scenario() -> None:
        queue, workers = queue_of(1)
        fleet, quotas = Fleet(workers=workers), Quotas(MemoryQuotas(), {}, lambda: 0.0)
        admission = AdmissionController(
            fleet, queue, NeverAdmit(), quotas, DEFAULT_BOUNDS, lambda: 0.0
        )
        with pytest.raises(Overloaded) as caught:
            await admission.admit(Entry("r", (CapacityNeed(1, 1, 2),), 1))
        assert dict(caught.value.headers())["Retry-After"] == "3600"

    run_virtual(scenario())
