"""`--backend sim`: the worker's own scheduler, paced by a cost model instead of a device."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Final

from backends.base import WorkerConfig
from backends.checkpoints import checkpoint_id, find_checkpoint
from backends.core.kv_blocks import KvBlocks
from backends.core.scheduler import Scheduler, SchedulerConfig
from backends.core.worker import Worker
from backends.errors import BackendFailed
from backends.shipped import SHIPPED_MODEL_ID
from backends.sim.clock import Clock, LoopClock
from backends.sim.executor import CostModel, ProfileCost, ServiceCost, SimExecutor
from backends.sim.profile import Profile, load_profile
from backends.sim.proposer import SimProposer
from backends.sim.truth import Truth, printable_vocabulary
from backends.streams import DeltaStreams
from backends.tokenizer import Tokenizer, read_json
from backends.types import Delta, GenerationRequest, ModelCard
from policies.registry import speculation_policy
from policies.types import SpeculationMode, WorkerLoad

BLOCK_TOKENS: Final = 16
DEFAULT_MODEL_LEN: Final = 8192
DEFAULT_KV_BYTES: Final = 1 << 30
"""Memory of the simulated device where none is stated: there is nothing to measure."""

PROPOSER: Final = SpeculationMode.NGRAM.value
"""The simulated drafter's name: policies and clients see what the cheapest real one looks like."""


class SimBackend:
    """Runs requests against a profile. Everything but the forward pass is the real thing.

    The text is deterministic nonsense (`Truth`), in the words of the model's tokenizer.
    """

    def __init__(self, config: WorkerConfig, clock: Clock | None = None) -> None:
        """Configure; nothing is read before `start`."""
        self._config = _one_at_a_time(config) if config.sim_service_ms is not None else config
        self._clock: Clock = clock or LoopClock()
        self._streams = DeltaStreams(self._cancel)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._card: ModelCard
        self._tokenizer: Tokenizer
        self._worker: Worker
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
        """Read tokenizer and profile, and start stepping.

        Raises:
            CheckpointError: there is no tokenizer, or it is damaged.
            ValueError: the profile, the policy or a setting of the simulator is wrong.
        """
        # Of a hub's model only small files are fetched: not worth a thread.
        directory = find_checkpoint(self._config.model, weights=False)
        self._build(directory, load_profile(self._config.profile))
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
        self._worker.admission.check(request)
        if self._failure is not None:
            raise BackendFailed(self._failure)
        stream = self._streams.open(request)
        self._worker.submit(request)
        self._wake.set()
        return stream

    def load(self) -> WorkerLoad:
        """Return the worker's load."""
        return self._worker.load()

    def _build(self, directory: Path, profile: Profile) -> None:
        config = self._config
        self._tokenizer = Tokenizer(directory)
        truth = Truth(printable_vocabulary(self._tokenizer))
        if config.proposer not in (None, PROPOSER):
            raise ValueError(f"the simulator drafts as {PROPOSER!r}, not {config.proposer!r}")
        scheduler = Scheduler(
            SchedulerConfig(config.max_num_seqs, config.max_step_tokens),
            KvBlocks(_num_blocks(config, profile), BLOCK_TOKENS),
            speculation_policy(config.speculation),
            {PROPOSER: SimProposer(truth, config.sim_acceptance)},
            profile.cost,
        )
        shape = read_json(directory / "config.json", missing={})
        longest = int(shape.get("max_position_embeddings", DEFAULT_MODEL_LEN))
        max_model_len = min(longest, config.max_model_len or longest)
        self._worker = Worker(scheduler, self._tokenizer, max_model_len)
        self._executor = SimExecutor(truth, _cost_model(config, profile))
        self._card = ModelCard(
            model_id=checkpoint_id(config.model),
            root=config.model or SHIPPED_MODEL_ID,
            max_model_len=max_model_len,
            numerics_class=f"sim:{profile.name}",
            created_s=int(time.time()),
        )

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
            plan = self._worker.plan()
            if plan is None:
                self._wake.clear()
                await self._wake.wait()
                due_s = self._clock.now_s()
                continue
            result = self._executor.execute(plan)
            # Steps follow each other's due time: timers that fire late do not add up.
            due_s += result.step_s
            await self._clock.sleep_s(due_s - self._clock.now_s())
            self._streams.deliver(self._worker.complete(plan, result))


def _one_at_a_time(config: WorkerConfig) -> WorkerConfig:
    """Return the configuration of a single server: a queue in front of one constant service."""
    return replace(config, max_num_seqs=1)


def _cost_model(config: WorkerConfig, profile: Profile) -> CostModel:
    if config.sim_service_ms is not None:
        return ServiceCost(config.sim_service_ms / 1e3)
    return ProfileCost(profile)


def _num_blocks(config: WorkerConfig, profile: Profile) -> int:
    """Return how many KV blocks the memory holds.

    Raises:
        ValueError: not even one.
    """
    kv_bytes = DEFAULT_KV_BYTES if config.kv_bytes is None else config.kv_bytes
    block_bytes = BLOCK_TOKENS * profile.kv_token_bytes
    if kv_bytes < block_bytes:
        raise ValueError(f"kv_bytes is {kv_bytes}, but one KV block needs {block_bytes} bytes")
    return kv_bytes // block_bytes
