"""The central queue: who waits is bound late, in the order of the policy, and leaves no trace."""

from __future__ import annotations

import asyncio
from itertools import count
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.errors import BackendFailed
from draftgate.backends.sim.virtual_time import run_virtual
from draftgate.gateway.dispatch.admission import DEFAULT_BOUNDS, AdmissionController, Ask
from draftgate.gateway.dispatch.queue import CentralQueue, Waiting
from draftgate.gateway.dispatch.routing import Router
from draftgate.gateway.errors import Overloaded, QueueTimeout
from draftgate.gateway.fleet import FleetWorker
from draftgate.policies.admission.types import AdmissionView, RefusalKind, Refused
from draftgate.policies.capacity import CapacityNeed
from draftgate.policies.ordering.fair import STARVATION_S
from draftgate.policies.quotas import QuotaLedger
from draftgate.policies.registry import ordering_policy, routing_policy
from draftgate.policies.routing.types import RouteView
from draftgate.policies.types import RequestView, Ticket, WorkerLoad


class Backend:
    """A worker with so many seats."""

    card = SimpleNamespace(numerics_class=None)

    def __init__(self, seats: int) -> None:
        self.max_sequences = seats
        self.failure: str | None = None

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            0, 0, 1000, 1000, 0.0, 0.5, (), max_sequences=self.max_sequences, step_tokens=512
        )


class Fleet(SimpleNamespace):
    """What the queue sees of a fleet."""

    @property
    def serving(self) -> list[FleetWorker]:
        return [worker for worker in self.workers if worker.backend.failure is None]

    open = serving
    outage, rivals = "device lost", 0


def queue_of(*seats: int, timeout_s: float = 60.0) -> tuple[CentralQueue, list[FleetWorker]]:
    """A queue in front of workers with so many seats each."""
    workers = [FleetWorker(f"w-{index}", Backend(count)) for index, count in enumerate(seats)]
    clock = asyncio.get_running_loop().time
    fleet, router = Fleet(workers=workers), Router(routing_policy("least_loaded"), Random(0).random)
    return CentralQueue(fleet, ordering_policy("fair"), router, clock, timeout_s), workers


def one(key: int, priority: int = 0, sequences: int = 1) -> Waiting:
    """A request on its way."""
    now_s = asyncio.get_running_loop().time()
    ticket = Ticket(key, now_s, now_s + 10.0, priority, work_s=1.0)
    return Waiting(f"r-{key}", ticket, CapacityNeed(sequences, 10, 30 * sequences))


async def turn(queue: CentralQueue, waiting: Waiting) -> FleetWorker:
    """The worker that a request gets."""
    need = waiting.need
    view = RouteView(RequestView(need.prompt_tokens, 20, 1.0), need.most_tokens, 20.0)
    return (await queue.turn(waiting, lambda: view)).worker


async def settled() -> None:
    """Let everything that can happen now happen."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_first_to_go_is_the_most_urgent_and_it_goes_where_room_is_first() -> None:
    """Who came later may overtake as long as both wait; the worker is chosen at that moment."""

    async def scenario() -> None:
        queue, workers = queue_of(1, 1)
        assert [await turn(queue, one(key)) for key in range(2)] == workers
        usual, urgent = (asyncio.create_task(turn(queue, one(2 + p, -p))) for p in range(2))
        await settled()
        assert len(queue) == 2
        assert queue.prompt_tokens == 20
        workers[1].release("r-1")
        queue.pump()
        await settled()
        assert urgent.result() is workers[1]
        assert not usual.done()
        workers[0].release("r-0")
        queue.pump()
        assert await usual is workers[0]
        assert len(queue) == queue.prompt_tokens == 0

    run_virtual(scenario())


def test_a_clock_that_goes_on_between_two_looks_confuses_nobody() -> None:
    """Whoever becomes overdue while the queue is served, all who wait are served once."""

    async def scenario() -> None:
        queue, workers = queue_of(1)
        await turn(queue, one(0))
        waiting = [asyncio.create_task(turn(queue, one(key, key))) for key in range(1, 6)]
        await settled()
        ticks = count(STARVATION_S - 0.25, 0.1)  # becomes overdue between two readings
        queue._now_s = lambda: next(ticks)
        served = 0
        while served < len(waiting):
            for key in range(6):
                workers[0].release(f"r-{key}")
            queue.pump()
            await settled()
            served = sum(task.done() for task in waiting)
        assert [task.result() for task in waiting] == workers * 5
        assert len(queue) == 0

    run_virtual(scenario())


def test_nobody_waits_for_ever() -> None:
    """A wait that is in vain ends with an error at the bound, and the next ones are not held up."""

    async def scenario() -> None:
        queue, workers = queue_of(2, timeout_s=5.0)
        await turn(queue, one(0))
        with pytest.raises(QueueTimeout) as caught:
            await turn(queue, one(1, sequences=2))
        assert caught.value.retry_after_s is not None
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)
        assert await turn(queue, one(2)) is workers[0]

    run_virtual(scenario())


def test_who_waits_learns_that_no_worker_is_left() -> None:
    """With the last worker all who wait are told, at once."""

    async def scenario() -> None:
        queue, workers = queue_of(1)
        await turn(queue, one(0))
        waiting = asyncio.create_task(turn(queue, one(1)))
        await settled()
        workers[0].backend.failure = "device lost"
        queue.pump()
        with pytest.raises(BackendFailed, match="device lost"):
            await waiting
        assert len(queue) == 0

    run_virtual(scenario())


def test_who_leaves_at_the_moment_of_its_turn_leaves_its_place_to_the_next() -> None:
    """A client that goes just when a worker was found for it keeps nothing of that worker."""

    async def scenario() -> None:
        queue, workers = queue_of(1)
        await turn(queue, one(0))
        leaving, next_ = (asyncio.create_task(turn(queue, one(key))) for key in (1, 2))
        await settled()
        workers[0].release("r-0")
        queue.pump()  # its turn, and before it hears of it
        leaving.cancel()
        await settled()
        assert leaving.cancelled()
        assert await next_ is workers[0]

    run_virtual(scenario())


STEPS = st.lists(
    st.tuples(st.sampled_from(["come", "end", "leave"]), st.integers(0, 30), st.integers(1, 3)),
    max_size=40,
)


@given(STEPS, st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_no_worker_gets_more_than_it_has_room_for_and_nothing_is_left_over(
    steps: list[tuple[str, int, int]], seats: list[int]
) -> None:
    """Whoever comes, ends or leaves in whatever order: seats hold, and in the end all is free."""

    async def scenario() -> None:
        queue, workers = queue_of(*seats)
        tasks: dict[int, asyncio.Task[FleetWorker]] = {}
        for key, (what, who, sequences) in enumerate(steps):
            task = tasks.get(who)
            if what == "come":
                tasks[key] = asyncio.create_task(turn(queue, one(key, sequences=sequences)))
            elif task is not None and what == "leave":
                task.cancel()
            elif task is not None and task.done() and not task.cancelled():
                task.result().release(f"r-{who}")
                queue.pump()
            if who % 2:
                await settled()
            for worker, most in zip(workers, seats, strict=True):
                assert worker.usage.sequences <= max(most, 3)
                alone = len(worker._sent) == 1
                assert alone or worker.usage.sequences <= most
        for task in tasks.values():
            task.cancel()
        await settled()
        for key, task in tasks.items():
            if task.done() and not task.cancelled():
                task.result().release(f"r-{key}")
        assert len(queue) == queue.prompt_tokens == 0
        assert all(worker.reserved_tokens == 0 for worker in workers)
        assert all(worker.usage.unstarted_prompt_tokens == 0 for worker in workers)

    run_virtual(scenario())


class Never:
    """An admission policy that predicts absurd waits."""

    name = "never"

    def decide(self, view: AdmissionView, now_s: float) -> Refused:
        return Refused(1e12, RefusalKind.DEADLINE, "never")


def test_nobody_is_sent_away_for_longer_than_an_hour() -> None:
    """However long a wait is predicted, Retry-After is a time after which clients do come back."""

    async def scenario() -> None:
        queue, workers = queue_of(1)
        fleet, ledger = Fleet(workers=workers), QuotaLedger({})
        admission = AdmissionController(fleet, queue, Never(), ledger, DEFAULT_BOUNDS, lambda: 0.0)
        with pytest.raises(Overloaded) as caught:
            admission.admit(Ask("r", (CapacityNeed(1, 1, 2),), 1))
        assert caught.value.headers()["Retry-After"] == "3600"

    run_virtual(scenario())
