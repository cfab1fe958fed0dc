"""Simulated workers whose devices fail or hang when a test decides, and a dispatcher for them.

The workers run on any clock, and only their devices are under the control of the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeVar

import pytest
from msgspec import structs

from draftgate.backends.base import Backend, DeltaSink
from draftgate.backends.core.steps import StepPlan, StepResult
from draftgate.backends.delta_reader import GeneratedDeltas, generate
from draftgate.backends.errors import BackendFailed
from draftgate.backends.sim import assembly
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.sim.model import SimExecutor
from draftgate.backends.types import (
    Delta,
    FinishReason,
    GenerationRequest,
    SpeculationOutcome,
    TokenLogprob,
)
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.assembly import WaitingRules, build_dispatcher, loop_time_s
from draftgate.gateway.cluster.heartbeat import Heartbeat
from draftgate.gateway.dispatch.admission import Bounds
from draftgate.gateway.dispatch.decisions import Decision, Decisions
from draftgate.gateway.dispatch.dispatcher import Dispatcher, RunningJob
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.kv_pulls import KvFetch
from draftgate.gateway.dispatch.quotas import quota_account
from draftgate.gateway.dispatch.run import Event, Move, NotResumed, Resume, Watch, ignore
from draftgate.gateway.fleet import Fleet
from draftgate.gateway.lifecycle import Lifecycle, NodeState
from draftgate.gateway.state.commands import ListWorkers, ReadTotals
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.state.store import Store
from draftgate.lab.sim.virtual_time import run_virtual
from draftgate.policies.quotas import Quota, Totals
from draftgate.policies.registry import speculation_policy
from draftgate.policies.resilience.failover import MOST_RESUMES, Cause, GivenUp

T = TypeVar("T")

DEVICE_ERROR = "an illegal memory access was encountered"
NEVER_S = 1e6
"""Duration that exceeds the limit of every test, in seconds."""

AMPLE = Quota(tokens_per_minute=10**8)
"""A quota that no test exhausts. The ledger counts only the tokens of tenants with a quota."""

MOST_SCENARIO_S = 7200.0
"""Limit of a test in virtual time, in seconds."""

StepCondition = Callable[[StepPlan], bool]
"""Condition that selects the step in which a device fails or hangs."""


def never(_plan: StepPlan) -> bool:
    return False


def after_tokens(tokens: int) -> StepCondition:
    """Select the steps in which a request has at least this many output tokens."""
    return lambda plan: any(w.samples and w.sequence.output_tokens >= tokens for w in plan.work)


def in_step(number: int) -> StepCondition:
    """Select only the step with this number, counted from 0."""
    steps = iter(range(number + 1))
    return lambda _plan: next(steps, None) == number


@dataclass
class DeviceFault:
    """A fault of a device.

    Attributes:
        breaks: the condition of the first step that fails. All later steps fail too.
        hangs: the condition of the steps that take `hung_s`.
        hung_s: the duration of a hung step, in seconds.
    """

    breaks: StepCondition = never
    hangs: StepCondition = never
    hung_s: float = NEVER_S


class FaultyExecutor:
    """A simulated device with a fault."""

    def __init__(self, device: SimExecutor, fault: DeviceFault) -> None:
        self._device = device
        self._fault = fault
        self._broken = False

    @property
    def host_s(self) -> float:
        return self._device.host_s

    @property
    def launches_ahead(self) -> bool:
        return self._device.launches_ahead

    def execute(self, plan: StepPlan) -> StepResult:
        self._broken = self._broken or self._fault.breaks(plan)
        if self._broken:
            raise RuntimeError(DEVICE_ERROR)
        result = self._device.execute(plan)
        return replace(result, step_s=self._fault.hung_s) if self._fault.hangs(plan) else result


def simulated(
    faults: Mapping[int, DeviceFault], profiles: Mapping[int, str] | None = None
) -> Callable[[WorkerConfig], Backend]:
    """Return a factory of simulated workers, some of them with faulty devices.

    Args:
        troubles: faults by device index.
        profiles: profile names by device index. Each profile has its own numerics class.
    """

    def factory(config: WorkerConfig) -> Backend:
        index = config.device_index
        own = structs.replace(config, profile=(profiles or {}).get(index, config.profile))

        def build(config: WorkerConfig) -> assembly.SimWorker:
            made = assembly.serving_worker(config)
            executor = FaultyExecutor(made.executor, faults.get(index, DeviceFault()))
            return replace(made, executor=executor)

        return SimBackend(own, build=build)

    return factory


class ChangedDeltas:
    """A worker whose deltas pass through an asynchronous generator, on their way to the sink.

    The class comes before that of the worker among the bases.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._passing: dict[str, asyncio.Task[None]] = {}

    def changed(
        self, request: GenerationRequest, deltas: GeneratedDeltas
    ) -> AsyncGenerator[Delta, None]:
        """Yield the deltas that the sink gets. Its request fails if they end too early."""
        raise NotImplementedError

    def submit(self, request: GenerationRequest, sink: DeltaSink) -> None:
        deltas = generate(super(), request)
        passing = asyncio.create_task(self._pass_on(request, deltas, sink))
        self._passing[request.request_id] = passing

    def cancel(self, request_id: str) -> None:
        passing = self._passing.pop(request_id, None)
        if passing is not None:
            passing.cancel()
        super().cancel(request_id)

    async def _pass_on(
        self, request: GenerationRequest, deltas: GeneratedDeltas, sink: DeltaSink
    ) -> None:
        left = len(request.choices)
        try:
            async with aclosing(deltas), aclosing(self.changed(request, deltas)) as changed:
                async for delta in changed:
                    left -= delta.finish_reason is not None
                    sink.put(delta)
        except BackendFailed as error:
            sink.fail(error)
        else:
            if left:
                sink.fail(BackendFailed("the stream was cut off"))


async def first_deltas(deltas: GeneratedDeltas, count: int) -> AsyncGenerator[Delta, None]:
    """Yield this many deltas of a stream, or all of them if the count is 0."""
    async for delta in deltas:
        yield delta
        count -= 1
        if count == 0:
            return


def lose_first_stream(monkeypatch: pytest.MonkeyPatch, after_deltas: int) -> None:
    """Let the first stream of all simulated workers fail after some deltas."""
    submit, left = SimBackend.submit, [after_deltas]

    def lose(self: SimBackend, request: GenerationRequest, sink: DeltaSink) -> None:
        submit(self, request, Losing(self, request, sink, left.pop()) if left else sink)

    monkeypatch.setattr(SimBackend, "submit", lose)


@dataclass
class Losing:
    """A sink that fails after some deltas."""

    backend: SimBackend
    request: GenerationRequest
    sink: DeltaSink
    left: int

    def put(self, delta: Delta) -> None:
        self.sink.put(delta)
        self.left -= 1
        if self.left == 0:
            self.backend.cancel(self.request.request_id)
            self.fail(BackendFailed("the stream was lost"))

    def fail(self, error: Exception) -> None:
        self.sink.fail(error)


def run_scenario(scenario: Coroutine[Any, Any, T]) -> T:
    """Run a scenario in virtual time, with a limit of `PLAY_S` seconds."""

    async def timed() -> T:
        async with asyncio.timeout(MOST_SCENARIO_S):
            return await scenario

    return run_virtual(timed())


@dataclass
class Dispatched:
    """A dispatcher with started workers."""

    dispatcher: Dispatcher
    fleet: Fleet
    store: Store
    decisions: Decisions

    async def is_idle(self) -> bool:
        """Return whether the queue, the store and the working workers hold no resources."""
        loads = [worker.backend.load() for worker in self.fleet.serving]
        busy = any(load.running + load.waiting + load.paused for load in loads)
        reserved = sum(worker.reserved_tokens for worker in self.fleet.workers)
        views = (await self.store.call(ListWorkers())).workers
        leased = sum(view.leased_tokens + view.claimed_tokens for view in views)
        return not (busy or reserved or leased or len(self.dispatcher.queue))

    async def totals(self, tenant: str = "") -> Totals:
        """Return what a tenant has used of its quota."""
        return await self.store.call(ReadTotals(quota_account(tenant, self.fleet.model_id)))


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
    routing: str = "least_cost",
    rescheduling: str = "off",
    phases: str = "together",
    roles: Sequence[str] = (),
) -> AsyncIterator[Dispatched]:
    """Start workers and a dispatcher as a node does, without HTTP and on any clock."""
    config = config or WorkerConfig()
    configs = [structs.replace(config, device_index=index) for index in range(workers)]
    for index, role in enumerate(roles):
        configs[index] = structs.replace(configs[index], role=role)
    fleet, lifecycle = Fleet(lambda: factory, configs), Lifecycle()
    await fleet.start_with(factory, "w")
    lifecycle.move_to(NodeState.READY)
    store, decisions = store or MemoryStore(loop_time_s), Decisions(None, loop_time_s)
    bounds = Bounds(timeout_s=timeout_s)
    rules = WaitingRules(
        admission="none",
        bounds=bounds,
        routing=routing,
        most_resumes=most_resumes,
        shared=shared,
        rescheduling=rescheduling,
        phases=phases,
    )
    policy = speculation_policy(config.speculation)
    dispatcher = build_dispatcher(
        *(fleet, store, lifecycle, decisions, policy, rules),
        quotas=quotas or {"": AMPLE},
        draw=Random(0).random,
    )
    heartbeat = Heartbeat(fleet, store, dispatcher)
    try:
        async with heartbeat.beating():
            yield Dispatched(dispatcher, fleet, store, decisions)
    finally:
        await fleet.stop()


@dataclass
class RecordingWatch:
    """An observer that records the notifications of a job."""

    workers: list[str] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    losses: list[tuple[Cause, GivenUp]] = field(default_factory=list)
    fetches: list[KvFetch] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        match event:
            case Decision():
                self.workers.append(event.worker_id)
            case Resume():
                self.resumes.append(event)
            case NotResumed():
                self.losses.append((event.cause, event.why))
            case KvFetch():
                self.fetches.append(event)
            case Move():
                self.moves.append(event)


@dataclass
class Choice:
    """A choice as the client sees the text. Choices are equal if clients cannot distinguish
    them."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    outcome: SpeculationOutcome | None = field(default=None, compare=False)

    def append(self, delta: Delta) -> None:
        """Append a delta, which must not follow a finish reason."""
        assert self.finish_reason is None, "a delta after the finish reason"
        self.token_ids.extend(delta.token_ids)
        self.text += delta.text
        self.logprobs.extend(delta.logprobs)
        self.finish_reason, self.outcome = delta.finish_reason, delta.outcome


async def run_job(dispatcher: Dispatcher, job: Job, watch: Watch = ignore) -> list[Choice]:
    """Run a job to its end and return its choices, each with a finish reason."""
    async with dispatcher.run(job, watch=watch) as run:
        choices = [Choice() for _ in range(job.n * len(job.prompts))]
        await read_rest(run, choices)
    assert all(choice.finish_reason is not None for choice in choices)
    return choices


async def read_rest(run: RunningJob, choices: Sequence[Choice]) -> None:
    """Append the remaining deltas of a run to its choices."""
    async for delta in run.deltas:
        choices[delta.choice].append(delta)


def texts(choices: Sequence[Choice]) -> list[str]:
    return [choice.text for choice in choices]
