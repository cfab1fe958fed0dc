"""Drain by moves: the streams of a worker that leaves continue elsewhere with their KV blocks."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from draftgate.backends.core.steps import StepPlan, StepResult
from draftgate.backends.delta_reader import GeneratedDeltas
from draftgate.backends.kv_transfer.exchange import BlockCount
from draftgate.backends.kv_transfer.format import KvChunk
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.token_ids import compact
from draftgate.backends.types import Delta, GenerationRequest, ModelCard, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.moves import Moves
from draftgate.gateway.dispatch.prompt import Prompt
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.telemetry.otel import OtelTracing
from draftgate.policies.moves import MOST_FAILURES, MOST_MOVES, STALL_S, VERIFIED_TOKENS, MoveEnd
from draftgate.policies.resilience.failover import Cause
from draftgate.policies.types import Pace
from tests.examples import examples
from tests.gateway.harness import client, eventually, running, until
from tests.gateway.test_kv_fetch import BLOCK_BYTES, CONFIG, OwnFormat, make_job, undisturbed
from tests.gateway.troubles import (
    NEVER_S,
    ChangedDeltas,
    Choice,
    Dispatched,
    RecordingWatch,
    dispatching,
    run_job,
    run_scenario,
)

OUTPUT_TOKENS = 400


@dataclass
class Outcome:
    """The results of a job whose worker is drained."""

    choices: list[Choice]
    watch: RecordingWatch
    gap_s: float
    step_s: float
    computed_tokens: int
    drained_s: float


class Counting(SimBackend):
    """A simulated worker that counts the tokens of its prompts, with those that follow them."""

    computed_tokens = 0

    async def start(self) -> None:
        await super().start()
        execute = self._executor.execute

        def counted(plan: StepPlan) -> StepResult:
            chunks = [work for work in plan.work if work.sequence.first_token_s is None]
            self.computed_tokens += sum(work.num_tokens for work in chunks)
            return execute(plan)

        self._executor.execute = counted


def drain(job: Job, kind: type[SimBackend] = Counting, **settings: Any) -> Outcome:
    """Run a job on two simulated workers, and drain its worker after 20 deltas."""
    return run_scenario(drained(job, kind, structs.replace(CONFIG, **settings)))


async def drained(
    job: Job, factory: Callable[[WorkerConfig], Any], config: WorkerConfig, after_deltas: int = 20
) -> Outcome:
    async with dispatching(factory, 2, config=config) as dispatched:
        watch, times, choices = RecordingWatch(), [], [Choice() for _ in range(job.n)]
        source: FleetWorker | None = None
        left_s = math.inf
        async with dispatched.dispatcher.run(job, watch=watch) as run:
            async for delta in run.deltas:
                times.append(asyncio.get_running_loop().time())
                choices[delta.choice].append(delta)
                if len(times) == after_deltas:
                    source = run.holds[0].worker
                    source.drained = True
                if source is not None and not source.usage.sequences:
                    left_s = min(left_s, times[-1])
        await eventually(dispatched.is_idle)
        gaps = sorted(b - a for a, b in pairwise(times))
        others = [one.backend for one in dispatched.fleet.workers if one is not source]
        computed = sum(getattr(one, "computed_tokens", 0) for one in others)
        drained_s = left_s - times[after_deltas - 1]
        return Outcome(choices, watch, gaps[-1], gaps[len(gaps) // 2], computed, drained_s)


@pytest.mark.parametrize("tokens", [256, 1000, 4000, 7600])
def test_stream_moves_with_its_blocks_and_a_short_gap(tokens: int) -> None:
    """A drained worker is empty while its stream runs on, with the same text and a gap that does
    not depend on the context. The destination computes at most 64 tokens."""
    job = make_job(tokens, output_tokens=OUTPUT_TOKENS)
    outcome = drain(job)
    assert outcome.choices == undisturbed(job)
    (resume,), (move,) = outcome.watch.resumes, outcome.watch.moves
    assert resume.cause is Cause.MOVED
    assert resume.same_numerics_class
    assert move.end is MoveEnd.MOVED
    assert move.num_bytes == move.blocks * BLOCK_BYTES
    assert move.blocks >= tokens // 16
    assert move.verified_tokens >= VERIFIED_TOKENS
    assert 0 < outcome.computed_tokens <= 64
    assert outcome.gap_s < 1.5 * outcome.step_s
    assert outcome.drained_s < 5.0


def test_a_stream_may_end_before_its_move_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the destination may finish before the gateway takes its tokens over."""
    notify = Prompt._notify

    def notify_late(prompt: Prompt) -> None:
        late_s = 60.0 if prompt.successor is not None else 0.0
        asyncio.get_running_loop().call_later(late_s, notify, prompt)

    monkeypatch.setattr(Prompt, "_notify", notify_late)
    job = make_job(256, output_tokens=OUTPUT_TOKENS)
    outcome = drain(job)
    assert outcome.choices == undisturbed(job)
    assert [move.end for move in outcome.watch.moves] == [MoveEnd.MOVED]


def test_without_another_format_the_stream_stays() -> None:
    """A stream stays on its worker if no other worker can take its blocks."""
    job = make_job(600, output_tokens=100)
    outcome = drain(job, OwnFormat)
    assert outcome.choices == undisturbed(job)
    assert not outcome.watch.moves
    assert not outcome.watch.resumes


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("speculation", ["off", "fixed:3"])
def test_all_choices_move_together(n: int, speculation: str) -> None:
    """All choices of a prompt continue on one worker, with and without drafts."""
    job = make_job(500, n=n, output_tokens=OUTPUT_TOKENS)
    outcome = drain(job, speculation=speculation)
    assert outcome.choices == undisturbed(job)
    (move,) = outcome.watch.moves
    assert move.end is MoveEnd.MOVED
    assert move.verified_tokens >= VERIFIED_TOKENS
    assert outcome.computed_tokens <= 64 * n


def test_choices_of_different_lengths_move() -> None:
    """A prompt moves although drafts have made some of its choices much longer than others."""
    job = make_job(300, n=8, output_tokens=1500)
    config = structs.replace(CONFIG, speculation="fixed:3")
    outcome = run_scenario(drained(job, Counting, config, after_deltas=3000))
    assert outcome.choices == undisturbed(job)
    (move,) = outcome.watch.moves
    assert move.end is MoveEnd.MOVED


class Wrong(ChangedDeltas, SimBackend):
    """A simulated worker that adds other tokens to resumed choices after their first 5 tokens."""

    async def changed(
        self, request: GenerationRequest, deltas: GeneratedDeltas
    ) -> AsyncGenerator[Delta, None]:
        tokens = 0
        async for delta in deltas:
            right, ids = max(5 - tokens, 0), delta.token_ids
            tokens += len(ids)
            if request.resumed:
                wrong = (token + 1 for token in ids[right:])
                yield delta._replace(token_ids=(*ids[:right], *wrong))
            else:
                yield delta


@pytest.mark.parametrize("speculation", ["off", "fixed:3"])
def test_move_to_a_worker_with_other_tokens_is_cancelled(speculation: str) -> None:
    """If the destination computes other tokens than the source, the stream stays on the source with
    the same text, and the move is reported once."""
    job = make_job(600, output_tokens=OUTPUT_TOKENS)
    outcome = drain(job, Wrong, speculation=speculation)
    assert outcome.choices == undisturbed(job)
    assert {move.end for move in outcome.watch.moves} == {MoveEnd.REJECTED}
    assert len(outcome.watch.moves) <= MOST_FAILURES
    assert {move.verified_tokens for move in outcome.watch.moves} == {5}
    assert not outcome.watch.resumes


class Stalling(ChangedDeltas, SimBackend):
    """A simulated worker that sends a few more deltas after its blocks were pulled, and then none,
    as if it had preempted the stream."""

    left = math.inf

    def pull_blocks(
        self, hashes: Sequence[bytes], *, urgent: bool = False
    ) -> AsyncGenerator[KvChunk, None]:
        self.left = min(self.left, STALLED_AFTER)
        return super().pull_blocks(hashes, urgent=urgent)

    async def changed(
        self, request: GenerationRequest, deltas: GeneratedDeltas
    ) -> AsyncGenerator[Delta, None]:
        async for delta in deltas:
            self.left -= 1
            if self.left < 0:
                await asyncio.Event().wait()
            yield delta


STALLED_AFTER = 14
"""Number of these deltas, with which the stall is within the 8 tokens that become drafts."""


def test_stream_moves_at_once_if_its_source_stalls_during_the_handover() -> None:
    """If the source stops sending tokens before the destination has begun, the destination
    continues after half a second instead of the time limit of a move."""
    job = make_job(600, output_tokens=OUTPUT_TOKENS)
    outcome = drain(job, Stalling)
    assert outcome.choices == undisturbed(job)
    (move,) = outcome.watch.moves
    assert move.end is MoveEnd.MOVED
    assert move.verified_tokens == 0
    assert STALL_S <= outcome.gap_s < 2 * STALL_S


def test_worker_without_an_exact_class_is_not_compared() -> None:
    """Between workers without exact numerics, the stream moves without a comparison."""
    job = make_job(600, output_tokens=OUTPUT_TOKENS)
    outcome = drain(job, Inexact)
    assert outcome.choices == undisturbed(job)
    (move,) = outcome.watch.moves
    assert move.end is MoveEnd.MOVED
    assert move.verified_tokens == 0


@pytest.mark.parametrize("pace", [Pace.SPARING, Pace.PAUSED])
def test_stream_of_a_slow_reader_moves(pace: Pace) -> None:
    """The stream of a client that reads slowly moves with its blocks when the client reads on."""
    job = make_job(1000, output_tokens=OUTPUT_TOKENS)

    async def scenario() -> None:
        async with dispatching(Counting, 2, config=CONFIG) as dispatched:
            watch, choice = RecordingWatch(), Choice()
            async with dispatched.dispatcher.run(job, watch=watch) as run:
                source = None
                async for delta in run.deltas:
                    choice.append(delta)
                    if source is None and len(choice.token_ids) >= 20:
                        source = run.holds[0].worker
                        source.drained = True
                        run.set_pace(pace)
                        await asyncio.sleep(3.0)
                        run.set_pace(Pace.SPARING)
            (move,) = watch.moves
            assert move.end is MoveEnd.MOVED
            assert [choice] == undisturbed_choices
            (sink,) = (one for one in dispatched.fleet.workers if one is not source)
            assert 0 < sink.backend.computed_tokens <= 64

    undisturbed_choices = undisturbed(job)
    run_scenario(scenario())


class Inexact(Counting):
    """A worker whose tokens may depend on its batch."""

    @property
    def card(self) -> ModelCard:
        card = super().card
        return replace(card, capabilities=replace(card.capabilities, exact=False))


class Fault(StrEnum):
    """A fault of a move."""

    SOURCE_DIES = "source dies"
    SINK_DIES = "sink dies"
    SINK_HANGS = "sink hangs"
    SINK_DRAINS = "sink drains"
    SINK_FULL = "sink is full"
    CLIENT_LEAVES = "client leaves"
    DAMAGED = "damaged"


@dataclass
class Script:
    """A fault in one of the operations on KV blocks or one of the deltas of a destination.

    Attributes:
        left: number of operations and deltas before the fault, on all workers of a test.
    """

    fault: Fault
    left: int
    client: asyncio.Task[Any] | None = None
    fleet: list[FleetWorker] = field(default_factory=list)
    happened: bool = False

    async def step(self, worker: Troubled, *, as_source: bool) -> bool:
        """Cause the fault when its operation comes, and return whether the block is damaged."""
        self.left -= 1
        if self.left != -1 or self.happened:
            return False
        self.happened = True
        source = next(one for one in self.fleet if one.drained)
        sink = next(
            (one for one in self.fleet if one.backend is worker and not as_source),
            next(one for one in self.fleet if one is not source),
        )
        if self.fault is Fault.SOURCE_DIES:
            await source.backend.stop()
        elif self.fault is Fault.SINK_DIES:
            await sink.backend.stop()
        elif self.fault is Fault.SINK_HANGS and not as_source:
            await asyncio.sleep(NEVER_S)
        elif self.fault is Fault.SINK_DRAINS:
            sink.drained = True
        elif self.fault is Fault.SINK_FULL:
            sink.backend.fill_memory()
        elif self.fault is Fault.CLIENT_LEAVES:
            self.client.cancel()
        return self.fault is Fault.DAMAGED


class Troubled(ChangedDeltas, SimBackend):
    """A simulated worker whose operations on KV blocks follow a script."""

    def __init__(self, config: WorkerConfig, script: Script) -> None:
        super().__init__(config)
        self.script = script
        self.filler = array("q")

    def fill_memory(self) -> None:
        blocks = self._exchange._blocks
        blocks.extend(self.filler, blocks.num_free * blocks.block_size)

    def free_memory(self) -> None:
        self._exchange._blocks.release(self.filler)

    async def changed(
        self, request: GenerationRequest, deltas: GeneratedDeltas
    ) -> AsyncGenerator[Delta, None]:
        async for delta in deltas:
            if request.resumed:  # both workers run the stream, or the destination alone
                await self.script.step(self, as_source=False)
            yield delta

    async def begin_import(self, hashes: Any) -> int:
        await self.script.step(self, as_source=False)
        return await super().begin_import(hashes)

    async def pull_blocks(
        self, hashes: Any, *, urgent: bool = False
    ) -> AsyncGenerator[KvChunk, None]:
        async with aclosing(super().pull_blocks(hashes, urgent=urgent)) as chunks:
            async for chunk in chunks:
                if await self.script.step(self, as_source=True):
                    wrong = tuple(one + 1 for one in chunk.checksums)
                    yield structs.replace(chunk, checksums=wrong)
                else:
                    yield chunk

    async def adopt_blocks(
        self, chunk: KvChunk, parent: bytes, *, urgent: bool = False
    ) -> BlockCount:
        await self.script.step(self, as_source=False)
        return await super().adopt_blocks(chunk, parent, urgent=urgent)


async def disturbed(job: Job, script: Script, drained_at: int) -> tuple[list[Choice], int]:
    """Run a job whose worker is drained after some deltas, with a fault of its move.

    Returns:
        The choices as far as the client has read them, and the number of open claims.
    """
    factory = partial(Troubled, script=script)
    async with dispatching(factory, 3, config=CONFIG) as dispatched:
        script.fleet = list(dispatched.fleet.workers)
        choices = [Choice() for _ in range(job.n)]
        script.client = asyncio.create_task(read(dispatched, job, choices, drained_at))
        await asyncio.wait({script.client})
        if not script.client.cancelled():
            script.client.result()
        for worker in script.fleet:
            worker.backend.free_memory()
        await eventually(dispatched.is_idle)
        return choices, dispatched.dispatcher.queue.claims.open


async def read(dispatched: Dispatched, job: Job, choices: list[Choice], drained_at: int) -> None:
    async with dispatched.dispatcher.run(job) as run:
        async for delta in run.deltas:
            choices[delta.choice].append(delta)
            drained_at -= 1
            if drained_at == 0:
                run.holds[0].worker.drained = True


@settings(max_examples=examples(100))
@given(
    fault=st.sampled_from(Fault),
    step=st.integers(0, 60),
    tokens=st.integers(40, 900),
    drained_at=st.integers(1, 60),
    n=st.integers(1, 2),
)
@example(Fault.SOURCE_DIES, 0, 300, 10, 1)
@example(Fault.SINK_DIES, 3, 300, 10, 1)
@example(Fault.SINK_HANGS, 2, 300, 10, 1)
@example(Fault.SINK_DRAINS, 1, 300, 10, 2)
@example(Fault.SINK_FULL, 2, 600, 10, 1)
@example(Fault.CLIENT_LEAVES, 3, 600, 10, 2)
@example(Fault.DAMAGED, 1, 600, 10, 1)
@example(Fault.SOURCE_DIES, 20, 300, 10, 1)
@example(Fault.SINK_DIES, 14, 300, 10, 2)
@example(Fault.SINK_DIES, 40, 300, 10, 1)
@example(Fault.CLIENT_LEAVES, 16, 300, 10, 1)
def test_no_fault_of_a_move_changes_a_stream(
    fault: Fault, step: int, tokens: int, drained_at: int, n: int
) -> None:
    """Whatever fails in whichever step of a move, the client gets the text of an undisturbed run
    with one ending, and nothing stays reserved. A client that leaves has the beginning of it."""
    job = make_job(tokens, n=n, output_tokens=120)
    script = Script(fault, step)
    choices, claims = run_scenario(disturbed(job, script, drained_at))
    plain = undisturbed(job)
    assert claims == 0
    if fault is not Fault.CLIENT_LEAVES or not script.happened:
        assert choices == plain
        return
    for choice, whole in zip(choices, plain, strict=True):
        assert whole.text.startswith(choice.text)
        assert whole.token_ids[: len(choice.token_ids)] == choice.token_ids


STREAMS = 16


def make_stream(number: int, tokens: int = 4000) -> Job:
    """Return a job with a prompt of its own."""
    prompt = compact([8 + (number + 1) * index % 499 for index in range(tokens)])
    return Job(f"r{number}", (prompt,), SamplingParams(1, seed=number, ignore_eos=True), 4000)


async def drain_streams(
    jobs: list[Job], sample: Callable[[Moves], None] = lambda _: None
) -> tuple[list[RecordingWatch], float, int]:
    """Drain a worker that runs all jobs, and cancel them afterwards.

    Args:
        sample: is called often during the drain.

    Returns:
        The observers, the seconds until the worker was empty, and the number of prompt tokens that
        the other worker computed.
    """
    config = structs.replace(CONFIG, kv_bytes=6000 * BLOCK_BYTES)
    async with dispatching(Counting, 2, config=config, timeout_s=math.inf) as dispatched:
        source, sink = dispatched.fleet.workers
        sink.drained = True
        watches = [RecordingWatch() for _ in jobs]
        tasks = [
            asyncio.create_task(run_job(dispatched.dispatcher, job, watch))
            for job, watch in zip(jobs, watches, strict=True)
        ]
        await reached(lambda: source.usage.started == len(jobs))
        sink.drained, source.drained = False, True
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while source.usage.sequences:
            sample(dispatched.dispatcher.moves)
            await asyncio.sleep(0.005)
        drained_s = loop.time() - began_s
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await eventually(dispatched.is_idle)
        return watches, drained_s, sink.backend.computed_tokens


async def reached(condition: Callable[[], bool]) -> None:
    """Wait in virtual time until a condition holds."""
    while not condition():  # noqa: ASYNC110 - the condition sets no event
        await asyncio.sleep(0.005)


def test_streams_copy_while_others_verify_tokens() -> None:
    """The number of moves that copy blocks is limited, but not the number of all moves."""
    moving, copying = set[int](), set[int]()

    def sample(moves: Moves) -> None:
        moving.add(len(moves._moving))
        copying.add(sum(not one.copied for one in moves._moving))

    run_scenario(drain_streams([make_stream(number, 600) for number in range(12)], sample))
    assert max(copying) == MOST_MOVES < max(moving)


@pytest.mark.long
def test_worker_with_16_streams_is_empty_within_5_s() -> None:
    """16 streams of 4,000 tokens leave a drained worker within 5 s, none fails, and the other
    worker computes at most 64 tokens of each."""
    jobs = [make_stream(number) for number in range(STREAMS)]
    watches, drained_s, computed = run_scenario(drain_streams(jobs))
    assert drained_s < 5.0
    assert computed <= 64 * STREAMS
    assert all(len(watch.resumes) == 1 for watch in watches)


async def test_trace_metrics_and_response_describe_a_move() -> None:
    """The trace of a moved request has a span `migrate`, metrics count the move and its gap, and
    the response names both workers."""
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    async with running(tracing=tracing, devices=(0, 1)) as gateway, client(gateway) as http:
        workers = gateway.node.fleet.workers
        body = {"prompt": list(make_job(800).prompts[0]), "max_tokens": 400, "seed": 1}
        request = asyncio.create_task(
            http.post("/v1/completions", json={**body, "ignore_eos": True}, timeout=60)
        )
        await until(lambda: any(one.usage.started for one in workers))
        (source,) = (one for one in workers if one.usage.started)
        source.drained = True
        response = (await request).json()
        page = (await http.get("/metrics")).text
    tracing.shutdown()
    (resumed,) = response["metrics"]["resumes"]
    assert resumed["from_worker_id"] == source.worker_id
    (span,) = (one for one in exporter.get_finished_spans() if one.name == "migrate")
    found = dict(span.attributes)
    assert found["draftgate.move.end"] == "moved"
    assert found["draftgate.move.reason"] == "drain"
    assert found["draftgate.move.from"] == source.worker_id
    assert found["draftgate.move.to"] == resumed["to_worker_id"]
    assert found["draftgate.move.stages"] >= 1
    assert found["draftgate.move.blocks"] >= 49
    assert found["draftgate.move.bytes"] == found["draftgate.move.blocks"] * BLOCK_BYTES
    assert found["draftgate.move.gap_s"] > 0.0
    lines = [line for line in page.splitlines() if line.startswith("draftgate_move")]
    counted = [line for line in lines if line.endswith(" 1.0")]
    assert any("draftgate_moves_total" in one and 'end="moved"' in one for one in counted)
    assert any("draftgate_move_gap_seconds_count" in one for one in counted)
