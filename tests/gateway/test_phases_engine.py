"""Prefill and decode on different engines with the shipped model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from draftgate.backends.kv_transfer import turns
from draftgate.backends.kv_transfer.format import KvChunk
from draftgate.backends.types import Delta
from draftgate.gateway.dispatch import handover
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.overlap import Overlap
from draftgate.policies.moves import MoveEnd, MoveReason
from tests.gateway.harness import eventually, needs_engine
from tests.gateway.moving_streams import CONFIG, KINDS, SteppingEngine, bytes_of, job_of
from tests.gateway.troubles import (
    NEVER_S,
    Choice,
    RecordingWatch,
    dispatching,
    run_job,
)

pytestmark = needs_engine

ROLES = ("prefill", "decode")
SMALL_STEPS = structs.replace(CONFIG, max_step_tokens=64)
"""The prompt has several chunks, so that blocks travel while later ones are computed."""


@pytest.fixture(autouse=True)
def _quick_handovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks travel after every step of the small model, however slow this machine is."""
    monkeypatch.setattr(handover, "LEAST_BLOCKS", 1)
    monkeypatch.setattr(handover, "LEAST_PAUSE_S", 0.0)
    monkeypatch.setattr(handover, "MOST_PAUSE_S", 0.0)
    monkeypatch.setattr(handover, "MOVE_S", NEVER_S)
    monkeypatch.setattr(turns, "SERVING_SHARE", 1.0)


async def apart(job: Job) -> tuple[list[Choice], RecordingWatch, list[Choice]]:
    """Run a job with its phases apart, and again on a single worker."""
    watch = RecordingWatch()
    async with dispatching(
        SteppingEngine, 2, config=SMALL_STEPS, phases="apart", roles=ROLES, timeout_s=math.inf
    ) as dispatched:
        choices = await run_job(dispatched.dispatcher, job, watch)
        await eventually(dispatched.is_idle)
        source, sink = dispatched.fleet.workers
        prompt = [*job.prompts[0]][:-1]
        copied = await bytes_of(sink.kv, job.tenant, prompt)
        assert copied
        assert copied == await bytes_of(source.kv, job.tenant, prompt)
        source.drained = True
        plain = replace(job, request_id="plain", tenant="plain")
        return choices, watch, await run_job(dispatched.dispatcher, plain)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == "logprobs" else pytest.mark.long) for kind in KINDS],
)
async def test_texts_and_blocks_equal_those_of_one_engine(kind: str) -> None:
    """Tokens, texts, log probabilities and blocks are those of a single engine, for every kind of
    request."""
    choices, watch, plain = await apart(job_of(kind, 1))
    assert choices == plain
    moves = [move for move in watch.moves if move.reason is MoveReason.PHASES]
    assert [move.end for move in moves] == [MoveEnd.MOVED]


async def test_a_handover_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported once although its prompt cancels the task that began it, before that task has
    seen the end."""
    put = Overlap.put

    def wake_first(self: Overlap, delta: Delta) -> None:
        self._stream.wake()
        put(self, delta)

    monkeypatch.setattr(Overlap, "put", wake_first)
    choices, watch, plain = await apart(job_of("logprobs", 1))
    assert choices == plain
    assert [move.end for move in watch.moves] == [MoveEnd.MOVED]


class Stopping(SteppingEngine):
    """An engine that stops, or whose client leaves, after a number of its chunks were sent."""

    chunks_left = math.inf
    on_last: Any = None

    async def pull_blocks(
        self, hashes: Any, *, urgent: bool = False
    ) -> AsyncGenerator[KvChunk, None]:
        async with aclosing(super().pull_blocks(hashes, urgent=urgent)) as chunks:
            async for chunk in chunks:
                yield chunk
                self.chunks_left -= 1
                if self.chunks_left == 0:
                    await self.on_last()


@pytest.mark.long
@pytest.mark.parametrize("fault", ["source", "sink", "client"])
async def test_faults_in_the_middle_of_a_transfer(fault: str) -> None:
    """If either engine stops, or the client leaves, in the middle of a transfer, the text equals
    that of a single engine, and no capacity stays reserved."""
    job = job_of("seeded", 3)
    async with dispatching(
        Stopping, 2, config=SMALL_STEPS, phases="apart", roles=ROLES, timeout_s=math.inf
    ) as dispatched:
        source, sink = dispatched.fleet.workers
        running = asyncio.create_task(run_job(dispatched.dispatcher, job))

        async def fail() -> None:
            if fault == "client":
                running.cancel()
            else:
                await (source if fault == "source" else sink).backend.stop()

        source.backend.chunks_left, source.backend.on_last = 2, fail
        choices = (await asyncio.gather(running, return_exceptions=True))[0]
        await eventually(dispatched.is_idle)
        plain = replace(job, request_id="plain")
        alone = await run_job(dispatched.dispatcher, plain)
    assert choices == alone or (fault == "client" and isinstance(choices, BaseException))
