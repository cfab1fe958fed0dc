"""Streams whose worker changes, as a client sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from statistics import median
from typing import Final
from unittest.mock import patch

from draftgate.backends.token_ids import compact
from draftgate.backends.types import SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway import assembly
from draftgate.gateway.assembly import WaitingRules, loop_time_s
from draftgate.gateway.dispatch.decisions import Decision
from draftgate.gateway.dispatch.dispatcher import Dispatcher, RunningJob
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.kv_pulls import KvFetch
from draftgate.gateway.dispatch.run import Event, Move, Resume
from draftgate.gateway.fleet import BackendFactory, FleetWorker
from draftgate.lab.simulate.cluster import running_dispatcher
from draftgate.policies.protocols import ReschedulingPolicy

OUTPUT_TOKENS: Final = 500
BEGUN_TOKENS: Final = 40
"""Output tokens of a stream before its worker is drained."""


@dataclass
class Observed:
    """An observer of a job, and the times of its deltas.

    Attributes:
        run: the job, once it runs.
        worker: the worker on which the job began, or None before.
        copied_s: end of the last transfer of blocks.
        computed_tokens: tokens that a worker computed although another worker had done so.
    """

    times_s: list[float] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    run: RunningJob | None = None
    worker: FleetWorker | None = None
    copied_s: float = 0.0
    computed_tokens: int = 0
    _held_blocks: dict[str, int] = field(default_factory=dict)  # by worker, since the last switch
    _switched: int = 0  # number of deltas before the last switch

    def __call__(self, event: Event) -> None:
        """Record the first worker, a switch, a fetch or a move."""
        match event:
            case Decision():
                assert self.run is not None
                self.worker = self.worker or self.run.holds[0].worker
            case Resume():
                self._resumed(event)
            case KvFetch():
                self._fetched(event)
            case Move():
                self._moved(event)

    def _resumed(self, resume: Resume) -> None:
        """Record a switch."""
        assert self.run is not None
        hold = self.run.holds[resume.index]
        worker = hold.worker
        self.resumes.append(resume)
        self._switched = len(self.times_s)
        known = len(hold.request.prompt_ids) + resume.kept_tokens
        form, blocks = worker.kv_format, self._held_blocks.get(worker.worker_id, 0)
        self.computed_tokens += known - (0 if form is None else blocks * form.block_tokens)
        self._held_blocks.clear()

    def _fetched(self, fetch: KvFetch) -> None:
        """Record a transfer."""
        self._held_blocks[fetch.sink] = fetch.known_blocks + fetch.blocks
        self.copied_s = loop_time_s()

    def _moved(self, move: Move) -> None:
        """Record a move."""
        self.moves.append(move)

    def extra_gap_s(self) -> float:
        """Return the longest pause around the switch, without the median pause.

        The deltas just before and after the switch may wait for this reader, so the pause of the
        switch is one of the pauses beside it.
        """
        gaps = self.gaps_s()
        around = gaps[max(0, self._switched - 2) : self._switched + 2]
        return max(around) - median(gaps)

    @property
    def deltas_since_switch(self) -> int:
        """Number of deltas after the last switch, or 0 before the first switch."""
        return len(self.times_s) - self._switched if self.resumes else 0

    def gaps_s(self, begin_s: float = 0.0, end_s: float = float("inf")) -> list[float]:
        """Return the pauses between deltas in a time interval."""
        return [b - a for a, b in pairwise(self.times_s) if begin_s <= a and b <= end_s]


def job_of(tokens: int, seed: int, output_tokens: int = OUTPUT_TOKENS) -> Job:
    """Return a job with a random prompt, which no engine has in its cache."""
    draw = Random(seed)
    prompt = compact([draw.randrange(300, 2000) for _ in range(tokens)])
    sampling = SamplingParams(1, seed=seed, ignore_eos=True)
    return Job(f"r{seed}", (prompt,), sampling, output_tokens)


async def run_job(
    dispatcher: Dispatcher,
    job: Job,
    observed: Observed,
    begun: Callable[[FleetWorker], None] | None = None,
    settled: int | None = None,
) -> None:
    """Run a job, and call `begun` with its worker after `BEGUN_TOKENS` deltas.

    Args:
        settled: number of deltas after a switch at which the client leaves, or None.
    """
    async with dispatcher.run(job, watch=observed) as run:
        observed.run = run
        async for _ in run.deltas:
            observed.times_s.append(loop_time_s())
            if begun is not None and len(observed.times_s) == BEGUN_TOKENS:
                begun(run.holds[0].worker)
            if settled is not None and observed.deltas_since_switch >= settled:
                return


@asynccontextmanager
async def dispatching(
    factory: BackendFactory,
    configs: Sequence[WorkerConfig],
    rules: WaitingRules,
    policy: ReschedulingPolicy | None = None,
) -> AsyncIterator[Dispatcher]:
    """Run workers and a dispatcher for them, as a node does, but without HTTP.

    Args:
        policy: the rescheduling policy, or None for that of `rules`.
    """
    with ExitStack() as stack:
        if policy is not None:
            named = patch.object(assembly, "rescheduling_policy", lambda _: policy)
            stack.enter_context(named)
        async with running_dispatcher(factory, configs, rules, policy="off") as dispatcher:
            yield dispatcher


async def until(condition: Callable[[], bool], tasks: Sequence[asyncio.Task[None]] = ()) -> None:
    """Wait for a condition while tasks run.

    Raises:
        Exception: a task has failed.
        RuntimeError: all tasks have ended without the condition.
    """
    while not condition():
        if tasks and all(task.done() for task in tasks):
            await asyncio.gather(*tasks)
            raise RuntimeError("the streams have ended too early")
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.001)
