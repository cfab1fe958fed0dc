"""Workers that fail or hang when a test says so, behind the production dispatcher.

The workers are simulated, on any clock; only their devices are controlled by the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Any, TypeVar

import pytest
from msgspec import structs

from draftgate.backends.base import Backend
from draftgate.backends.core.steps import StepPlan, StepResult
from draftgate.backends.sim import assembly
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.sim.model import SimExecutor
from draftgate.backends.sim.virtual_time import run_virtual
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, FinishReason, SpeculationOutcome, TokenLogprob
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.assembly import WaitingRules, build_dispatcher, loop_time_s
from draftgate.gateway.cluster.heartbeat import Heartbeat
from draftgate.gateway.dispatch.admission import Bounds
from draftgate.gateway.dispatch.decisions import Decisions
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.run import UNWATCHED, Resume, Run, Watch
from draftgate.gateway.fleet import Fleet
from draftgate.gateway.lifecycle import Lifecycle, NodeState
from draftgate.gateway.state.memory import MemoryStore
from draftgate.gateway.state.store import Store
from draftgate.policies.quotas import Quota
from draftgate.policies.registry import speculation_policy
from draftgate.policies.resilience.failover import MOST_RESUMES, Cause, GivenUp

T = TypeVar("T")

DEVICE_ERROR = "an illegal memory access was encountered"
NEVER_S = 1e6
"""Longer than any test takes."""

PLAY_S = 7200.0
"""Limit of a test in virtual time, after which it fails."""

Look = Callable[[StepPlan], bool]
"""Whether the failure happens in a step."""


def never(_plan: StepPlan) -> bool:
    return False


def behind(tokens: int) -> Look:
    """The first step in which a request has this many output tokens."""
    return lambda plan: any(w.samples and w.sequence.output_tokens >= tokens for w in plan.work)


def in_step(number: int) -> Look:
    """The n-th step that is checked, from 0, and none after it."""
    steps = iter(range(number + 1))
    return lambda _plan: next(steps, None) == number


@dataclass
class Trouble:
    """A failure of a device.

    Attributes:
        breaks: the step in which it fails, and every step after it.
        hangs: a step that takes `hung_s`.
    """

    breaks: Look = never
    hangs: Look = never
    hung_s: float = NEVER_S


class TroubledExecutor:
    """A simulated device with a failure."""

    def __init__(self, device: SimExecutor, trouble: Trouble) -> None:
        self._device = device
        self._trouble = trouble
        self._broken = False

    @property
    def drafting_s(self) -> float:
        return self._device.drafting_s

    def execute(self, plan: StepPlan) -> StepResult:
        self._broken = self._broken or self._trouble.breaks(plan)
        if self._broken:
            raise RuntimeError(DEVICE_ERROR)
        result = self._device.execute(plan)
        return replace(result, step_s=self._trouble.hung_s) if self._trouble.hangs(plan) else result


def simulated(
    troubles: Mapping[int, Trouble], profiles: Mapping[int, str] | None = None
) -> Callable[[WorkerConfig], Backend]:
    """Make simulated workers, some of them with failures, by device.

    Args:
        profiles: profiles of some workers, each with its own numerics class.
    """

    def factory(config: WorkerConfig) -> Backend:
        index = config.device_index
        own = structs.replace(config, profile=(profiles or {}).get(index, config.profile))

        def build(config: WorkerConfig) -> assembly.SimWorker:
            made = assembly.serving_worker(config)
            executor = TroubledExecutor(made.executor, troubles.get(index, Trouble()))
            return replace(made, executor=executor)

        return SimBackend(own, build=build)

    return factory


def play(scenario: Coroutine[Any, Any, T]) -> T:
    """Run a scenario in virtual time."""

    async def timed() -> T:
        async with asyncio.timeout(PLAY_S):
            return await scenario

    return run_virtual(timed())


@contextmanager
def quick_starts() -> Iterator[None]:
    """Read the simulator's tokenizer once instead of once per worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "Tokenizer", cache(Tokenizer))
        patch.setattr(assembly, "printable_vocabulary", cache(assembly.printable_vocabulary))
        yield


@dataclass
class Dispatched:
    """A dispatcher with started workers."""

    dispatcher: Dispatcher
    fleet: Fleet
    store: Store
    decisions: Decisions

    async def is_idle(self) -> bool:
        """Whether queue, store and working workers hold nothing of any request."""
        loads = [worker.backend.load() for worker in self.fleet.serving]
        busy = any(load.running + load.waiting + load.paused for load in loads)
        reserved = sum(worker.reserved_tokens for worker in self.fleet.workers)
        leased = sum(view.leased_tokens for view in (await self.store.snapshot()).workers)
        return not (busy or reserved or leased or len(self.dispatcher.queue))


@asynccontextmanager
async def dispatching(
    factory: Callable[[WorkerConfig], Backend],
    workers: int,
    *,
    config: WorkerConfig | None = None,
    quotas: Mapping[str, Quota] | None = None,
    most_resumes: int = MOST_RESUMES,
    timeout_s: float = 60.0,
    shared: bool = False,
    store: Store | None = None,
) -> AsyncIterator[Dispatched]:
    """Start workers behind a dispatcher as a node does, without HTTP, on any clock."""
    config = config or WorkerConfig()
    configs = [structs.replace(config, device_index=index) for index in range(workers)]
    fleet, lifecycle = Fleet(lambda: factory, configs), Lifecycle()
    await fleet.start_with(factory, "w")
    lifecycle.move_to(NodeState.READY)
    store, decisions = store or MemoryStore(loop_time_s), Decisions(None, loop_time_s)
    bounds = Bounds(timeout_s=timeout_s)
    rules = WaitingRules(admission="none", bounds=bounds, most_resumes=most_resumes, shared=shared)
    policy = speculation_policy(config.speculation)
    dispatcher = build_dispatcher(
        *(fleet, store, lifecycle, decisions, policy, rules),
        quotas=quotas or {},
        draw=Random(0).random,
    )
    heartbeat = Heartbeat(fleet, store, dispatcher.queue, dispatcher.leases, decisions)
    try:
        async with heartbeat.beating():
            yield Dispatched(dispatcher, fleet, store, decisions)
    finally:
        await fleet.stop()


@dataclass
class Told:
    """Records the notifications of a job's observer."""

    workers: list[str] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    losses: list[tuple[Cause, GivenUp]] = field(default_factory=list)

    def placed(self, placed) -> None:
        self.workers.append(placed.worker.worker_id)

    def resumed(self, resume: Resume) -> None:
        self.resumes.append(resume)

    def given_up(self, cause: Cause, why: GivenUp) -> None:
        self.losses.append((cause, why))


@dataclass
class Choice:
    """A choice as the client sees it; equal if clients cannot tell a difference."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    outcome: SpeculationOutcome | None = field(default=None, compare=False)

    def add(self, delta: Delta) -> None:
        """Add a delta; none may follow an ending."""
        assert self.finish_reason is None, "a delta behind the end"
        self.token_ids.extend(delta.token_ids)
        self.text += delta.text
        self.logprobs.extend(delta.logprobs)
        self.finish_reason, self.outcome = delta.finish_reason, delta.outcome


async def answer(dispatcher: Dispatcher, job: Job, watch: Watch = UNWATCHED) -> list[Choice]:
    """Run a job to its end; every choice must end once."""
    async with dispatcher.run(job, watch=watch) as run:
        choices = [Choice() for _ in range(job.n * len(job.prompts))]
        await read(run, choices)
    assert all(choice.finish_reason is not None for choice in choices)
    return choices


async def read(run: Run, choices: Sequence[Choice]) -> None:
    """Add the rest of a job to its choices."""
    async for delta in run.deltas:
        choices[delta.choice].add(delta)


def texts(choices: Sequence[Choice]) -> list[str]:
    return [choice.text for choice in choices]
