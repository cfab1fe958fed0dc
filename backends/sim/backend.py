"""`--backend sim`: the worker's own scheduler, paced by a simulated device."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from msgspec import structs

from draftgate.backends.errors import BackendFailed
from draftgate.backends.sim.clock import Clock, LoopClock
from draftgate.backends.sim.executor import SimExecutor
from draftgate.backends.sim.parts import Builder, StepWorker, serving_parts
from draftgate.backends.streams import DeltaStreams
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, GenerationRequest, ModelCard, Pace
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import WorkerLoad


class SimBackend:
    """Runs requests on a simulated device. Everything but the forward pass is the real thing."""

    recovers = False

    def __init__(
        self, config: WorkerConfig, clock: Clock | None = None, build: Builder = serving_parts
    ) -> None:
        """Configure; nothing is read or built before `start`."""
        self._config = _one_at_a_time(config) if config.sim_service_ms is not None else config
        self._clock: Clock = clock or LoopClock()
        self._build = build
        self._streams = DeltaStreams(self._cancel)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._card: ModelCard
        self._tokenizer: Tokenizer
        self._worker: StepWorker
        self._executor: SimExecutor

    @property
    def card(self) -> ModelCard:
        """What is served."""
        return self._card

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def failure(self) -> str | None:
        """Why the backend is broken or stopped, or None while it is well."""
        return self._failure

    @property
    def progress(self) -> float:
        """All of it at once."""
        return float(self._task is not None)

    async def start(self) -> None:
        """Build the worker, and start stepping.

        Raises:
            CheckpointError: there is no tokenizer, or it is damaged.
            ValueError: the profile, the policy or a setting of the simulator is wrong.
        """
        parts = self._build(self._config, self._clock)
        self._worker, self._executor = parts.worker, parts.executor
        self._tokenizer, self._card = parts.tokenizer, parts.card
        self._task = asyncio.create_task(self._run(), name="sim-worker")

    async def stop(self) -> None:
        """Stop at once; open streams end with `BackendFailed`."""
        self._failure = self._failure or "the worker was stopped"
        self._streams.fail(self._failure)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def check(self, request: GenerationRequest) -> None:
        """Raise `RequestRejected` if the request can never run here."""
        self._worker.admission.check(request)

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Queue the request and return its deltas."""
        if self._failure is not None:
            raise BackendFailed(self._failure)
        stream = self._streams.open(request)
        self._worker.submit(request, self._clock.now_s())
        self._wake.set()
        return stream

    def set_pace(self, request_id: str, pace: Pace) -> None:
        """Change how far the worker goes on with a request."""
        self._worker.set_pace(request_id, pace)
        self._wake.set()

    def unread_tokens(self, request_id: str) -> int:
        """Return how many tokens wait for a request's reader."""
        return self._streams.unread_tokens(request_id)

    def load(self) -> WorkerLoad:
        """Return the worker's load."""
        return self._worker.load()

    def _cancel(self, request_id: str) -> None:
        self._worker.cancel(request_id)

    async def _run(self) -> None:
        try:
            await self._step_forever()
        except Exception as error:  # noqa: BLE001 - whatever it is, the streams must learn of it
            self._failure = f"{type(error).__name__}: {error}"
            self._streams.fail(self._failure)

    async def _step_forever(self) -> None:
        due_s = self._clock.now_s()
        while True:
            plan = self._worker.plan(self._clock.now_s())
            if plan is None:
                self._wake.clear()
                await self._wake.wait()
                due_s = self._clock.now_s()
                continue
            result = self._executor.execute(plan)
            # Steps follow each other's due time, so timers that fire late do not add up. But no
            # device makes up for a host that kept it waiting for longer than a step.
            now_s = self._clock.now_s()
            due_s = max(due_s, now_s - result.step_s) + self._executor.drafting_s + result.step_s
            await self._clock.sleep_s(due_s - now_s)
            self._streams.deliver(self._worker.complete(plan, result, self._clock.now_s()))


def _one_at_a_time(config: WorkerConfig) -> WorkerConfig:
    """Return the configuration of a single server: a queue in front of one constant service."""
    return structs.replace(config, max_num_seqs=1)
