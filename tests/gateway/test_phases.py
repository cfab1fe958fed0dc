"""Prefill and decode on different workers, in virtual time: texts, copies and faults."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from msgspec import structs

from draftgate.backends.delta_reader import GeneratedDeltas
from draftgate.backends.kv_transfer.format import KvChunk
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.types import Delta, GenerationRequest
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.dispatch.decisions import Decision
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.fleet import FleetWorker
from draftgate.policies.moves import MoveEnd, MoveReason
from tests.gateway.harness import eventually
from tests.gateway.test_kv_fetch import BLOCK_BYTES, CONFIG, OwnFormat, make_job, undisturbed
from tests.gateway.test_moves import Counting, reached
from tests.gateway.troubles import (
    ChangedDeltas,
    Choice,
    Dispatched,
    RecordingWatch,
    dispatching,
    read_rest,
    run_job,
    run_scenario,
)

ROLES = ("prefill", "decode")
OUTPUT_TOKENS = 200


@dataclass
class Outcome:
    """The results of a job whose phases are apart."""

    choices: list[Choice]
    watch: RecordingWatch
    decisions: list[Decision]


class Decoding(ChangedDeltas, Counting):
    """A simulated worker that counts the tokens which it sends."""

    sent_tokens = 0

    async def changed(
        self, request: GenerationRequest, deltas: GeneratedDeltas
    ) -> AsyncGenerator[Delta, None]:
        async for delta in deltas:
            self.sent_tokens += len(delta.token_ids)
            yield delta


def apart(
    factory: Callable[[WorkerConfig], Any],
    roles: Sequence[str] = ROLES,
    config: WorkerConfig = CONFIG,
    phases: str = "apart",
) -> AbstractAsyncContextManager[Dispatched]:
    """Start workers with roles."""
    fields = {"config": config, "phases": phases, "roles": roles, "timeout_s": math.inf}
    return dispatching(factory, len(roles), **fields)


async def served(
    job: Job, factory: Callable[[WorkerConfig], Any], phases: str
) -> tuple[Outcome, tuple[FleetWorker, ...]]:
    """Run a job on a prefill worker and a decode worker."""
    async with apart(factory, phases=phases) as dispatched:
        watch = RecordingWatch()
        choices = await run_job(dispatched.dispatcher, job, watch)
        await eventually(dispatched.is_idle)
        decisions = dispatched.decisions.latest(10)[::-1]
        return Outcome(choices, watch, decisions), dispatched.fleet.workers


def serve(
    job: Job, factory: Any = Decoding, phases: str = "apart"
) -> tuple[Outcome, tuple[FleetWorker, ...]]:
    return run_scenario(served(job, factory, phases))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("tokens", [5, 300, 4000])
def test_output_continues_on_the_decode_worker(tokens: int, n: int) -> None:
    """The decode worker continues the output after a few tokens, with the text of a single worker.
    It computes at most a block and a few tokens of each choice, and the decision says why."""
    job = make_job(tokens, n, OUTPUT_TOKENS)
    outcome, (source, sink) = serve(job)
    assert outcome.choices == undisturbed(job)
    (move,) = outcome.watch.moves
    assert (move.reason, move.end) == (MoveReason.PHASES, MoveEnd.MOVED)
    assert (move.source, move.sink) == (source.worker_id, sink.worker_id)
    assert move.blocks == (tokens - 1) // 16
    assert move.num_bytes == move.blocks * BLOCK_BYTES
    assert move.verified_tokens
    assert sink.backend.sent_tokens > (OUTPUT_TOKENS - 10) * n
    assert sink.backend.computed_tokens <= 32 * n
    first, second = outcome.decisions
    assert (first.worker_id, second.worker_id) == (source.worker_id, sink.worker_id)
    assert first.phases.policy == "apart"
    assert first.phases.decode_worker_id == sink.worker_id
    assert first.plan.max_draft_tokens == 0
    assert first.moves[0].explanation == first.phases.reason
    assert second.phases is None


def test_blocks_travel_while_later_chunks_are_computed() -> None:
    """Most blocks of a long prompt have arrived before its first token."""
    job = make_job(6000, 1, OUTPUT_TOKENS)

    async def scenario() -> tuple[int, int]:
        async with apart(Decoding) as dispatched:
            watch, choices = RecordingWatch(), [Choice()]
            async with dispatched.dispatcher.run(job, watch=watch) as run:
                async for delta in run.deltas:
                    choices[0].append(delta)
                    before = sum(fetch.blocks for fetch in watch.fetches)
                    break
                await read_rest(run, choices)
            assert choices == undisturbed_choices
            return before, sum(fetch.blocks for fetch in watch.fetches)

    undisturbed_choices = undisturbed(job)
    before, after = run_scenario(scenario())
    assert after == 5999 // 16
    assert before > 0.7 * after


def test_roles_have_no_effect_without_a_policy() -> None:
    """With the policy `together`, no request moves, whatever the roles of the workers."""
    job = make_job(500, 1, OUTPUT_TOKENS)
    outcome, _ = serve(job, phases="together")
    assert outcome.choices == undisturbed(job)
    assert not outcome.watch.moves
    (decision,) = outcome.decisions
    assert decision.phases is None


@pytest.mark.parametrize("output_tokens", [0, 1])
def test_request_without_further_tokens_stays(output_tokens: int) -> None:
    """A request that ends with its prompt or first token runs on a prefill worker alone."""
    job = make_job(500, 1, output_tokens)
    outcome, (source, _) = serve(job)
    assert outcome.choices == undisturbed(job)
    assert not outcome.watch.moves
    assert outcome.watch.workers == [source.worker_id]


def test_workers_of_different_formats_serve_together() -> None:
    """Requests stay on one worker if the workers exchange no KV blocks."""
    job = make_job(500, 1, OUTPUT_TOKENS)
    outcome, _ = serve(job, OwnFormat)
    assert outcome.choices == undisturbed(job)
    assert not outcome.watch.moves
    assert outcome.decisions[0].phases.decode_worker_id == ""


class Faulty(ChangedDeltas, SimBackend):
    """A simulated worker that calls a function before each of its KV operations and deltas."""

    def __init__(self, config: WorkerConfig, fault: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self.fault = fault

    async def changed(
        self, request: GenerationRequest, deltas: GeneratedDeltas
    ) -> AsyncGenerator[Delta, None]:
        async for delta in deltas:
            await self.fault()
            yield delta

    async def held_blocks(self, hashes: Any) -> int:
        await self.fault()
        return await super().held_blocks(hashes)

    async def begin_import(self, hashes: Any) -> int:
        await self.fault()
        return await super().begin_import(hashes)

    async def pull_blocks(
        self, hashes: Any, *, urgent: bool = False
    ) -> AsyncGenerator[KvChunk, None]:
        async with aclosing(super().pull_blocks(hashes, urgent=urgent)) as chunks:
            async for chunk in chunks:
                await self.fault()
                yield chunk


async def with_fault(job: Job, fault: str, after: int) -> tuple[list[Choice], bool]:
    """Run a job, and cause a fault after a number of operations on any worker.

    Returns:
        The choices, and whether the fault occurred.
    """
    left = after

    async def step() -> None:
        nonlocal left
        left -= 1
        if left != -1:
            return
        source, sink, *_ = dispatched.fleet.workers
        if fault == "source dies":
            await source.backend.stop()
        elif fault == "sink dies":
            await sink.backend.stop()
        elif fault == "sink drains":
            sink.drained = True
        elif fault == "client leaves":
            running.cancel()

    factory = partial(Faulty, fault=step)
    async with apart(factory, (*ROLES, "decode")) as dispatched:
        running = asyncio.create_task(run_job(dispatched.dispatcher, job))
        try:
            choices = await running
        except asyncio.CancelledError:
            assert fault == "client leaves"
            choices = []
        await eventually(dispatched.is_idle)
        return choices, left < 0


@pytest.mark.parametrize("fault", ["source dies", "sink dies", "sink drains", "client leaves"])
def test_faults_at_any_operation(fault: str) -> None:
    """Whatever fails at any operation of a handover, the text is that of a single worker, and no
    worker keeps capacity."""
    job = make_job(1500, 2, 40)
    alone = undisturbed(job)
    happened = 0
    for after in (*range(24), 30, 40, 60):
        choices, reached = run_scenario(with_fault(job, fault, after))
        happened += reached
        assert choices == alone or (fault == "client leaves" and not choices), after
    assert happened > 20


def test_full_decode_worker_leaves_the_output_on_its_source() -> None:
    """If the memory of the decode worker is taken meanwhile, the output stays where it is."""
    job = make_job(2000, 1, OUTPUT_TOKENS)

    async def scenario() -> tuple[list[Choice], RecordingWatch]:
        async with apart(SimBackend) as dispatched:
            watch, (source, sink) = RecordingWatch(), dispatched.fleet.workers
            running = asyncio.create_task(run_job(dispatched.dispatcher, job, watch))
            await reached(lambda: source.backend.load().running)
            blocks = sink.backend._exchange._blocks
            blocks.extend(array("q"), blocks.num_free * blocks.block_size)
            return await running, watch

    choices, watch = run_scenario(scenario())
    assert choices == undisturbed(job)
    (move,) = watch.moves
    assert move.end is MoveEnd.NO_ROOM


def test_memory_of_arriving_prompts_is_reserved() -> None:
    """While prompts are on their way to a decode worker, no further prompt gets its memory."""

    async def scenario() -> tuple[int, list[MoveEnd]]:
        config = structs.replace(CONFIG, kv_bytes=300 * BLOCK_BYTES)
        roles = ("prefill", "prefill", "decode")
        async with apart(SimBackend, roles, config) as dispatched:
            sink, most = dispatched.fleet.workers[2], 0
            watches = [RecordingWatch() for _ in range(6)]
            jobs = [replace(make_job(1800, 1, 100), request_id=f"r{n}") for n in range(6)]
            tasks = [
                asyncio.create_task(run_job(dispatched.dispatcher, job, watch))
                for job, watch in zip(jobs, watches, strict=True)
            ]
            for _ in range(3000):
                most = max(most, sink.usage.arriving_tokens)
                await asyncio.sleep(0.01)
            await asyncio.gather(*tasks)
            await eventually(dispatched.is_idle)
            return most, [move.end for watch in watches for move in watch.moves]

    most, ends = run_scenario(scenario())
    assert 1800 <= most <= 300 * 16
    assert ends == [MoveEnd.MOVED] * 6
