"""Holds of workers under random interleavings of failures, moves, pauses and cancels.

`test_move_machine` checks the texts of prompts that move. This machine counts what each prompt
holds: whatever happens in whichever order, it is released exactly once. It also checks that every
worker of a prompt gets the time of its arrival at the first one.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec import structs

from draftgate.backends.base import DeltaSink
from draftgate.backends.errors import BackendFailed, WorkerLeft
from draftgate.backends.sim import assembly
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.types import GenerationRequest
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.dispatch.dispatcher import RunningJob
from draftgate.gateway.dispatch.hold import Hold
from draftgate.gateway.errors import GatewayError
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.state.commands import ListWorkers, ReleaseLeases, ReserveLease
from draftgate.gateway.state.values import LeaseCandidate
from draftgate.lab.sim.virtual_time import VirtualTimeLoop
from draftgate.policies.quotas import Quota
from draftgate.policies.resilience.liveness import LEAST_PATIENCE_S
from draftgate.policies.types import Pace
from tests.examples import examples
from tests.gateway.harness import eventually
from tests.gateway.test_kv_fetch import CONFIG, make_job
from tests.gateway.troubles import (
    AMPLE,
    MOST_SCENARIO_S,
    Choice,
    DeviceFault,
    Dispatched,
    FaultyExecutor,
    dispatching,
    read_rest,
)

WORKERS = 2
MOST_JOBS = 6
OUTPUT_TOKENS = 40
QUEUE_TIMEOUT_S = 8.0
SCARCE = "scarce"
QUOTAS = {"": AMPLE, SCARCE: Quota(tokens_per_minute=1000, burst_tokens=1000)}


class Hanging(SimBackend):
    """A simulated worker whose next step may hang."""

    def __init__(self, config: WorkerConfig) -> None:
        self.hangs = False
        self.arrivals: list[tuple[str, float]] = []  # ids of prompts, and times of arrival
        fault = DeviceFault(hangs=lambda _: self._take_hang(), hung_s=3 * LEAST_PATIENCE_S)

        def build(config: WorkerConfig) -> assembly.SimWorker:
            made = assembly.serving_worker(config)
            return replace(made, executor=FaultyExecutor(made.executor, fault))

        super().__init__(config, build=build)

    def submit(self, request: GenerationRequest, sink: DeltaSink) -> None:
        prompt_id = request.request_id.partition(".")[0]
        self.arrivals.append((prompt_id, self._now_s() - request.age_s))
        super().submit(request, sink)

    def _take_hang(self) -> bool:
        hangs, self.hangs = self.hangs, False
        return hangs

    def lose_streams(self, kind: type[BackendFailed]) -> None:
        for request_id in tuple(self._sinks._open):
            self._sinks.fail("the connection was lost", kind, request_id)
            self._worker.cancel(request_id)


class Client:
    """A client that reads a response, and may leave or get an error."""

    run: RunningJob | None = None

    def __init__(self, dispatched: Dispatched, number: int, prompts: int, tenant: str) -> None:
        job = make_job(100 + number, 2, OUTPUT_TOKENS)
        prompt = job.prompts[0]
        self.job = replace(job, request_id=f"r{number}", prompts=(prompt,) * prompts, tenant=tenant)
        self.choices = [Choice() for _ in range(2 * prompts)]
        self.left = False
        self.reading = asyncio.create_task(self._read(dispatched))

    async def _read(self, dispatched: Dispatched) -> None:
        async with dispatched.dispatcher.run(self.job) as self.run:
            await read_rest(self.run, self.choices)

    def check(self) -> None:
        """Check that the client got a whole response, an error or nothing after it left."""
        if self.left and self.reading.cancelled():
            return
        if isinstance(self.reading.exception(), BackendFailed | GatewayError):
            return
        assert all(choice.finish_reason is not None for choice in self.choices)


places = st.integers(0, WORKERS - 1)
clients = st.integers(0, MOST_JOBS - 1)


class HoldMachine(RuleBasedStateMachine):
    """Requests for two small workers that another gateway uses, too, or of a node alone."""

    @initialize(shared=st.booleans())
    def start_workers(self, *, shared: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        self.held: list[Hold] = []
        self.released = Counter[Hold]()
        self._count_holds()
        self.clients: list[Client] = []
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.do(self._start(shared))

    def _count_holds(self) -> None:
        begin, release = Hold.__init__, Hold._release

        def count_begin(hold: Hold, *args: Any) -> None:
            begin(hold, *args)
            self.held.append(hold)

        def count_release(hold: Hold, error: BaseException | None) -> None:
            self.released[hold] += 1
            release(hold, error)

        self.patch.setattr(Hold, "__init__", count_begin)
        self.patch.setattr(Hold, "_release", count_release)

    async def _start(self, shared: bool) -> None:
        self.closing = asyncio.Event()
        started = asyncio.get_running_loop().create_future()
        self.hosting = asyncio.create_task(self._host(started, shared))
        self.dispatched: Dispatched = await started

    async def _host(self, started: asyncio.Future[Dispatched], shared: bool) -> None:
        config = structs.replace(CONFIG, max_num_seqs=4)
        async with dispatching(
            *(Hanging, WORKERS),
            config=config,
            timeout_s=QUEUE_TIMEOUT_S,
            quotas=QUOTAS,
            shared=shared,
        ) as dispatched:
            started.set_result(dispatched)
            await self.closing.wait()

    def do(self, coroutine: Any) -> None:
        self.runner.run(coroutine)

    @property
    def workers(self) -> tuple[FleetWorker, ...]:
        return self.dispatched.fleet.workers

    @precondition(lambda self: len(self.clients) < MOST_JOBS)
    @rule(prompts=st.integers(1, 2), tenant=st.sampled_from(["", "", SCARCE]))
    def begin_request(self, prompts: int, tenant: str) -> None:
        async def begin() -> None:
            number = len(self.clients)
            self.clients.append(Client(self.dispatched, number, prompts, tenant))
            await asyncio.sleep(0.0)

        self.do(begin())

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.1, 1.0, LEAST_PATIENCE_S, QUEUE_TIMEOUT_S]))
    def wait(self, seconds: float) -> None:
        self.do(asyncio.sleep(seconds))

    @rule(place=places, kind=st.sampled_from([BackendFailed, WorkerLeft]))
    def lose_streams(self, place: int, kind: type[BackendFailed]) -> None:
        async def lose() -> None:
            self.workers[place].backend.lose_streams(kind)

        self.do(lose())

    @rule(place=places)
    def hang_next_step(self, place: int) -> None:
        self.workers[place].backend.hangs = True

    @rule(place=places)
    def stop_worker(self, place: int) -> None:
        if len(self.dispatched.fleet.serving) == WORKERS:
            self.do(self.workers[place].backend.stop())

    @rule(place=places, drained=st.booleans())
    def drain(self, place: int, drained: bool) -> None:
        self.workers[place].drained = drained

    @rule(place=places)
    def fill_worker_elsewhere(self, place: int) -> None:
        """Let another gateway lease the whole worker for a while."""
        worker = self.workers[place]
        offer = LeaseCandidate(worker.worker_id, worker.epoch, watermark=worker.watermark)
        tokens = worker.backend.load().kv_total_tokens
        self.do(
            self.dispatched.store.call(ReserveLease(f"elsewhere-{place}", tokens, (offer,), 1.0))
        )

    @rule(number=clients, pace=st.sampled_from(Pace))
    def read_at_pace(self, number: int, pace: Pace) -> None:
        if number < len(self.clients) and self.clients[number].run is not None:
            self.clients[number].run.set_pace(pace)

    @rule(number=clients)
    def leave(self, number: int) -> None:
        if number < len(self.clients) and not self.clients[number].reading.done():
            self.clients[number].left = True
            self.clients[number].reading.cancel()

    def teardown(self) -> None:
        """Let every request end, and check what is held."""
        if not hasattr(self, "runner"):
            return
        with self.runner:
            try:
                self.do(self._end())
                for one in self.clients:
                    one.check()
                assert self.released == Counter(self.held)
                self._check_arrivals()
            finally:
                self.do(self._close())
                self.patch.undo()

    async def _end(self) -> None:
        for worker in self.workers:
            worker.drained = False
        for one in self.clients:
            if one.run is not None:
                one.run.set_pace(Pace.FULL)
        if self.clients:
            await asyncio.wait([one.reading for one in self.clients], timeout=MOST_SCENARIO_S)
        assert all(one.reading.done() for one in self.clients)
        for place in range(WORKERS):
            await self.dispatched.store.call(ReleaseLeases((f"elsewhere-{place}",)))
        views = (await self.dispatched.store.call(ListWorkers())).workers
        assert all(view.leased_tokens == view.claimed_tokens == 0 for view in views)
        await eventually(self.dispatched.is_idle)
        dispatcher = self.dispatched.dispatcher
        assert dispatcher.queue.claims.open == dispatcher.admission.quotas.open == 0
        assert not dispatcher.moves.streams
        await self._check_charges()

    def _check_arrivals(self) -> None:
        """Check that all workers of a prompt rank it by the same time."""
        times = defaultdict[str, list[float]](list)
        for worker in self.workers:
            for prompt_id, arrived_s in worker.backend.arrivals:
                times[prompt_id].append(arrived_s)
        for of_prompt in times.values():
            assert of_prompt == pytest.approx([of_prompt[0]] * len(of_prompt), abs=1e-6)

    async def _check_charges(self) -> None:
        """Check that each tenant was charged what its requests used, and nothing else."""
        for tenant in QUOTAS:
            runs = [one.run for one in self.clients if one.run and one.job.tenant == tenant]
            used = sum(run.prompt_tokens + run.output_tokens for run in runs)
            totals = await self.dispatched.totals(tenant)
            assert (totals.settled, totals.open) == (used, 0)

    async def _close(self) -> None:
        self.closing.set()
        await self.hosting


HoldMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)
TestHolds = HoldMachine.TestCase
