"""Moves under random interleavings of drains, faults and clients, as a state machine."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec import structs

from draftgate.backends.delta_reader import GeneratedDeltas
from draftgate.backends.kv_transfer.exchange import HOLD_S, BlockCount
from draftgate.backends.kv_transfer.format import KvChunk
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.types import Delta, GenerationRequest
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.dispatch.dispatcher import RunningJob
from draftgate.gateway.fleet import FleetWorker
from draftgate.lab.sim.virtual_time import VirtualTimeLoop
from draftgate.policies.types import Pace
from tests.examples import examples
from tests.gateway.harness import eventually
from tests.gateway.test_kv_fetch import CONFIG, make_job, undisturbed
from tests.gateway.troubles import (
    MOST_SCENARIO_S,
    NEVER_S,
    ChangedDeltas,
    Choice,
    Dispatched,
    dispatching,
    read_rest,
)

WORKERS = 3
MOST_JOBS = 3
OUTPUT_TOKENS = 150


class Events:
    """The number of operations on KV blocks and of deltas of destinations, on all workers."""

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def add(self) -> None:
        self.count += 1
        self._next.set()
        self._next.clear()

    async def until(self, count: int) -> None:
        while self.count < count:
            await self._next.wait()


class Faulty(ChangedDeltas, SimBackend):
    """A simulated worker whose next operation may hang, and whose next chunk may be damaged."""

    def __init__(self, config: WorkerConfig, events: Events) -> None:
        super().__init__(config)
        self.hangs = self.damages = False
        self._events = events
        self._filler = array("q")

    def fill_memory(self) -> None:
        blocks = self._exchange._blocks
        blocks.extend(self._filler, blocks.num_free * blocks.block_size)

    def free_memory(self) -> None:
        self._exchange._blocks.release(self._filler)
        self._filler = array("q")

    @property
    def held(self) -> int:
        """Number of blocks whose hold has not expired."""
        blocks = self._exchange._blocks
        blocks.expire_holds(self._now_s())
        return blocks._cache.num_held

    async def changed(
        self, request: GenerationRequest, deltas: GeneratedDeltas
    ) -> AsyncGenerator[Delta, None]:
        async for delta in deltas:
            if request.resumed:
                self._events.add()
            yield delta

    async def begin_import(self, hashes: Sequence[bytes]) -> int:
        await self._begin()
        return await super().begin_import(hashes)

    async def pull_blocks(
        self, hashes: Sequence[bytes], *, urgent: bool = False
    ) -> AsyncGenerator[KvChunk, None]:
        async with aclosing(super().pull_blocks(hashes, urgent=urgent)) as chunks:
            async for chunk in chunks:
                await self._begin()
                sums = tuple(one + self.damages for one in chunk.checksums)
                self.damages = False
                yield structs.replace(chunk, checksums=sums)

    async def adopt_blocks(
        self, chunk: KvChunk, parent: bytes, *, urgent: bool = False
    ) -> BlockCount:
        await self._begin()
        return await super().adopt_blocks(chunk, parent, urgent=urgent)

    async def _begin(self) -> None:
        self._events.add()
        hangs, self.hangs = self.hangs, False
        await asyncio.sleep(NEVER_S if hangs else 0.0)


class Client:
    """A client that reads a stream, and may leave."""

    run: RunningJob | None = None

    def __init__(self, dispatched: Dispatched, number: int, tokens: int, n: int) -> None:
        job = make_job(tokens, n, OUTPUT_TOKENS)
        self.kind = tokens, n
        self.choices = [Choice() for _ in range(n)]
        self.left = False
        self._job = replace(job, request_id=f"r{number}")
        self.reading = asyncio.create_task(self._read(dispatched))

    async def _read(self, dispatched: Dispatched) -> None:
        async with dispatched.dispatcher.run(self._job) as self.run:
            await read_rest(self.run, self.choices)

    def check(self) -> None:
        """Compare what the client has read with an undisturbed run."""
        plain = plain_choices(*self.kind)
        if not self.left:
            self.reading.result()
            assert self.choices == plain
            return
        for choice, whole in zip(self.choices, plain, strict=True):
            assert whole.text.startswith(choice.text)
            assert whole.token_ids[: len(choice.token_ids)] == choice.token_ids


@cache
def plain_choices(tokens: int, n: int) -> list[Choice]:
    return undisturbed(make_job(tokens, n, OUTPUT_TOKENS))


places = st.integers(0, WORKERS - 1)
clients = st.integers(0, MOST_JOBS - 1)


class MoveMachine(RuleBasedStateMachine):
    """Streams on three workers, at least one of which accepts requests."""

    @initialize(speculation=st.sampled_from(["off", "fixed:3"]))
    def start_workers(self, speculation: str) -> None:
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.clients: list[Client] = []
        self.filled = False
        self.do(self._start(structs.replace(CONFIG, speculation=speculation)))

    async def _start(self, config: WorkerConfig) -> None:
        self.events, self.closing = Events(), asyncio.Event()
        started = asyncio.get_running_loop().create_future()
        self.hosting = asyncio.create_task(self._host(config, started))
        self.dispatched: Dispatched = await started

    async def _host(self, config: WorkerConfig, started: asyncio.Future[Dispatched]) -> None:
        def factory(one: WorkerConfig) -> Faulty:
            return Faulty(one, self.events)

        async with dispatching(
            factory, WORKERS, config=config, timeout_s=math.inf, most_resumes=100
        ) as dispatched:
            started.set_result(dispatched)
            await self.closing.wait()

    def do(self, coroutine: Any) -> None:
        self.runner.run(coroutine)

    @property
    def workers(self) -> tuple[FleetWorker, ...]:
        return self.dispatched.fleet.workers

    def others_open(self, place: int) -> bool:
        return any(one is not self.workers[place] for one in self.dispatched.fleet.open)

    @precondition(lambda self: len(self.clients) < MOST_JOBS)
    @rule(tokens=st.sampled_from([40, 300, 900]), n=st.integers(1, 2))
    def begin_stream(self, tokens: int, n: int) -> None:
        async def begin() -> None:
            number = len(self.clients)
            self.clients.append(Client(self.dispatched, number, tokens, n))
            await asyncio.sleep(0.02)

        self.do(begin())

    @rule(events=st.integers(1, 12))
    def run_operations(self, events: int) -> None:
        """Run until a number of operations and deltas of destinations has begun."""

        async def run() -> None:
            try:
                async with asyncio.timeout(0.3):
                    await self.events.until(self.events.count + events)
            except TimeoutError:
                pass

        self.do(run())

    @rule(seconds=st.floats(0.0, 0.5))
    def wait(self, seconds: float) -> None:
        self.do(asyncio.sleep(seconds))

    @rule(place=places)
    def drain(self, place: int) -> None:
        self.workers[place].drained = self.others_open(place)

    @rule(place=places)
    def end_drain(self, place: int) -> None:
        self.workers[place].drained = False

    @rule(place=places)
    def stop_worker(self, place: int) -> None:
        if len(self.dispatched.fleet.serving) == WORKERS and self.others_open(place):
            self.do(self.workers[place].backend.stop())

    @rule(place=places)
    def fill_memory(self, place: int) -> None:
        if not self.filled:
            self.filled = True
            self.workers[place].backend.fill_memory()

    @rule()
    def free_memory(self) -> None:
        self.filled = False
        for worker in self.workers:
            worker.backend.free_memory()

    @rule(place=places)
    def hang_next_operation(self, place: int) -> None:
        self.workers[place].backend.hangs = True

    @rule(place=places)
    def damage_next_chunk(self, place: int) -> None:
        self.workers[place].backend.damages = True

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
        """Let every stream end, and check texts, endings, leases and holds."""
        if not hasattr(self, "runner"):
            return
        with self.runner:
            try:
                self.do(self._end())
                for one in self.clients:
                    one.check()
            finally:
                self.do(self._close())

    async def _end(self) -> None:
        for worker in self.workers:
            worker.drained = False
            worker.backend.free_memory()
        for one in self.clients:
            if one.run is not None:
                one.run.set_pace(Pace.FULL)
        if self.clients:
            await asyncio.wait([one.reading for one in self.clients], timeout=MOST_SCENARIO_S)
        assert all(one.reading.done() for one in self.clients)
        await eventually(self.dispatched.is_idle)
        assert self.dispatched.dispatcher.queue.claims.open == 0
        await asyncio.sleep(HOLD_S)
        assert not any(one.backend.held for one in self.dispatched.fleet.serving)

    async def _close(self) -> None:
        self.closing.set()
        await self.hosting


MoveMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)
TestMoves = MoveMachine.TestCase
"""Whatever happens in whichever order, every client gets the text of an undisturbed run with one
ending, and no lease or hold outlives its time."""
