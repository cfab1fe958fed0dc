"""Moves by the rescheduling policy: who moves, at most one move per worker, and the reports."""

from __future__ import annotations

import asyncio
import math
import time

import pytest
from msgspec import structs
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.token_ids import compact
from draftgate.backends.types import SamplingParams
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.telemetry.otel import OtelTracing
from draftgate.lab.sim.virtual_time import loop_time_s
from draftgate.policies.moves import MoveEnd, MoveReason
from draftgate.policies.rescheduling.types import ChosenMove, PoolState, StreamsOf
from tests.gateway.harness import client, eventually, running, until
from tests.gateway.test_kv_fetch import BLOCK_BYTES, CONFIG, undisturbed
from tests.gateway.test_moves import reached
from tests.gateway.troubles import (
    Choice,
    RecordingWatch,
    dispatching,
    run_job,
    run_scenario,
)

POLICIES = ("llumnix:500,600", "least_time")


class CountingStore(MemoryStore):
    """A store that counts the calls for moves, and checks that a worker has one move at a time."""

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__(loop_time_s)
        self.begun = self.granted = 0
        self.open: dict[str, str] = {}
        self._refuses = refuses

    def hold_slots(self, command):
        self.begun += 1
        if self._refuses or not super().hold_slots(command):
            return False
        self.granted += 1
        assert not self.open.keys() & set(command.names)
        self.open.update(dict.fromkeys(command.names, command.holder))
        return True

    def free_slots(self, command):
        super().free_slots(command)
        for worker_id in command.names:
            del self.open[worker_id]


def make_stream(number: int) -> Job:
    """Return a job with 800 tokens of its own, and 600 tokens of output."""
    prompt = compact([8 + (number + 1) * index % 499 for index in range(800)])
    sampling = SamplingParams(1, seed=number, ignore_eos=True)
    return Job(f"r{number}", (prompt,), sampling, 600)


async def unbalanced(
    policy: str, store: CountingStore, workers: int = 2
) -> tuple[list[list[Choice]], list[RecordingWatch], list[object]]:
    """Start six streams on the first worker, open the others, and run the streams to their end.

    Returns:
        The choices and the observer of each stream, and the decisions.
    """
    config = structs.replace(CONFIG, kv_bytes=560 * BLOCK_BYTES)
    async with dispatching(
        SimBackend, workers, config=config, timeout_s=math.inf, store=store, rescheduling=policy
    ) as dispatched:
        first, *others = dispatched.fleet.workers
        for other in others:
            other.drained = True
        watches = [RecordingWatch() for _ in range(6)]
        tasks = [
            asyncio.create_task(run_job(dispatched.dispatcher, make_stream(number), watch))
            for number, watch in enumerate(watches)
        ]
        await reached(lambda: first.usage.started == len(tasks))
        for other in others:
            other.drained = False
        choices = await asyncio.gather(*tasks)
        await eventually(dispatched.is_idle)
        return choices, watches, dispatched.decisions.latest(100)


@pytest.mark.parametrize("policy", POLICIES)
def test_streams_of_a_full_worker_move_to_an_idle_one(policy: str) -> None:
    """Streams leave a worker whose memory runs out, one at a time, with the text that they have
    without a move. Each decision explains the moves of its stream."""
    store = CountingStore()
    choices, watches, decisions = run_scenario(unbalanced(policy, store))
    alone, _, _ = run_scenario(unbalanced("off", CountingStore()))
    assert choices == alone
    moves = [move for watch in watches for move in watch.moves if move.end is MoveEnd.MOVED]
    assert moves
    assert {move.reason for move in moves} <= {MoveReason.BALANCE, MoveReason.FASTER}
    assert store.granted >= len(moves)
    assert not store.open
    records = [record for decision in decisions for record in decision.moves]
    assert len(records) == sum(len(watch.moves) for watch in watches)
    assert all(record.explanation and record.gain > record.threshold for record in records)
    assert all(len(watch.moves) <= 4 for watch in watches)


def test_no_slot_no_move() -> None:
    """A stream stays if the store grants no slot, and its text is complete."""
    store = CountingStore(refuses=True)
    choices, watches, _ = run_scenario(unbalanced(POLICIES[0], store))
    assert store.begun
    assert all(len(one.token_ids) == 600 for (one,) in choices)
    assert {move.end for watch in watches for move in watch.moves} == {MoveEnd.TAKEN}


@pytest.mark.parametrize("policy", POLICIES)
def test_pool_of_one_worker_never_calls_the_policy(policy: str) -> None:
    """A single worker moves nothing and calls no store, however full it is."""
    store = CountingStore()
    _, watches, _ = run_scenario(unbalanced(policy, store, workers=1))
    assert not store.begun
    assert not any(watch.moves for watch in watches)


@pytest.mark.parametrize("policy", POLICIES)
def test_room_is_made_for_a_long_prompt(policy: str) -> None:
    """A prompt that fits on no worker, but into the free memory of all, starts after one stream has
    moved, and long before the others end."""

    async def scenario() -> tuple[list[RecordingWatch], bool]:
        config = structs.replace(CONFIG, kv_bytes=560 * BLOCK_BYTES)
        async with dispatching(
            SimBackend, 2, config=config, timeout_s=math.inf, rescheduling=policy
        ) as dispatched:
            watches = [RecordingWatch() for _ in range(8)]
            tasks = [
                asyncio.create_task(run_job(dispatched.dispatcher, make_stream(number), watch))
                for number, watch in enumerate(watches)
            ]
            workers = dispatched.fleet.workers
            await reached(lambda: sum(one.usage.started for one in workers) == len(tasks))
            prompt = compact([9 + index * 7 % 490 for index in range(6000)])
            long = Job("long", (prompt,), SamplingParams(1, seed=1, ignore_eos=True), 10)
            await run_job(dispatched.dispatcher, long)
            early = not any(task.done() for task in tasks)
            await asyncio.gather(*tasks)
            return watches, early

    watches, early = run_scenario(scenario())
    reasons = [one.reason for watch in watches for one in watch.moves if one.end is MoveEnd.MOVED]
    assert MoveReason.MAKE_ROOM in reasons
    assert early


async def test_trace_and_decisions_explain_a_move() -> None:
    """The span `migrate` and `/decisions` state policy, gain, threshold, reason and result of a
    move."""
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    settings = {"devices": (0, 1), "rescheduling": "llumnix:5000,6000"}
    settings["kv_bytes"] = 560 * BLOCK_BYTES
    async with running(tracing=tracing, **settings) as gateway, client(gateway) as http:
        workers = gateway.node.fleet.workers
        workers[1].drained = True
        body = {"max_tokens": 400, "ignore_eos": True}
        requests = [
            asyncio.create_task(
                http.post(
                    "/v1/completions", json={**body, "prompt": [number + 9] * 800}, timeout=60
                )
            )
            for number in range(2)
        ]
        await until(lambda: workers[0].usage.started == 2)
        workers[1].drained = False
        await asyncio.gather(*requests)
        found = (await http.get("/decisions")).json()["decisions"]
    tracing.shutdown()
    spans = [dict(one.attributes) for one in exporter.get_finished_spans() if one.name == "migrate"]
    (span,) = (one for one in spans if one["draftgate.move.end"] == "moved")
    (record,) = (move for one in found for move in one["moves"] if move["end"] == "moved")
    assert record["source"] == span["draftgate.move.from"] == workers[0].worker_id
    assert record["sink"] == span["draftgate.move.to"] == workers[1].worker_id
    assert record["policy"] == span["draftgate.move.policy"] == "llumnix:5000,6000"
    assert record["stages"] == span["draftgate.move.stages"] >= 1
    assert record["blocks"] == span["draftgate.move.blocks"] >= 50
    assert record["num_bytes"] == span["draftgate.move.bytes"] == record["blocks"] * BLOCK_BYTES
    assert record["gap_s"] == span["draftgate.move.gap_s"] > 0.0
    assert abs(time.time() - record["ended_s"]) < 60.0
    assert record["reason"] == span["draftgate.move.reason"] == "balance"
    assert record["gain"] == span["draftgate.move.gain"] > span["draftgate.move.threshold"]
    assert record["explanation"] == span["draftgate.move.explanation"]


class MovesOne:
    """A policy that moves one stream whenever it may."""

    name = "moves_one"
    reschedules = True

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id

    def choose(self, pool: PoolState, streams_of: StreamsOf) -> list[ChosenMove]:
        source, sink = (one.worker_id for one in pool.workers)
        return [
            ChosenMove(one.stream_id, source, sink, MoveReason.BALANCE, 1.0, 0.0, "a test")
            for one in streams_of(source)
            if one.stream_id.startswith(self.request_id) and one.may_move
        ]


async def preempted_stream(jobs: list[Job]) -> tuple[list[list[Choice]], list[RecordingWatch]]:
    """Run two jobs on a worker whose memory is too small for both, and move the younger one once
    it has been preempted. The older one keeps the memory."""
    config = structs.replace(CONFIG, kv_bytes=120 * BLOCK_BYTES)
    async with dispatching(SimBackend, 2, config=config, timeout_s=math.inf) as dispatched:
        source, sink = dispatched.fleet.workers
        sink.drained = True
        watches = [RecordingWatch() for _ in jobs]
        runs = []
        for job, watch in zip(jobs, watches, strict=True):
            runs.append(asyncio.create_task(run_job(dispatched.dispatcher, job, watch)))
            await asyncio.sleep(0.01)

        async def is_preempted() -> bool:
            return source.usage.started == 2 and source.backend.load().waiting == 1

        await eventually(is_preempted)
        sink.drained = False
        dispatched.dispatcher.moves._rescheduler._policy = MovesOne(jobs[1].request_id)

        async def has_moved() -> bool:
            return bool(watches[1].moves)

        await eventually(has_moved)
        assert not runs[0].done()
        return list(await asyncio.gather(*runs)), watches


def test_a_preempted_stream_moves_without_its_blocks() -> None:
    """A stream that its source has preempted continues at once on a worker with memory, which
    computes what the source no longer holds. The text stays the same."""
    jobs = [make_stream(number) for number in range(2)]
    choices, watches = run_scenario(preempted_stream(jobs))
    for job, found in zip(jobs, choices, strict=True):
        assert found == undisturbed(job)
    assert not watches[0].moves
    (move,) = watches[1].moves
    assert move.end is MoveEnd.MOVED
    assert move.verified_tokens == 0
