"""What a simulated worker is made of, and who puts it together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from draftgate.backends.checkpoints import SHIPPED_MODEL_ID, checkpoint_id, find_checkpoint
from draftgate.backends.core.admission import Admission
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.core.steps import StepPlan, StepResult
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.sim.acceptance import ConstantAcceptance
from draftgate.backends.sim.clock import Clock
from draftgate.backends.sim.device import Device, ProfileDevice
from draftgate.backends.sim.executor import SimExecutor
from draftgate.backends.sim.profile import DraftCost, Profile, load_profile
from draftgate.backends.sim.proposer import SimProposer
from draftgate.backends.sim.service import ServiceDevice, constant_service
from draftgate.backends.sim.truth import Truth, printable_vocabulary
from draftgate.backends.tokenizer import Tokenizer, read_json
from draftgate.backends.types import Capabilities, Delta, GenerationRequest, ModelCard, Pace
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.registry import batching_policy, speculation_policy
from draftgate.policies.types import SpeculationMode, WorkerLoad

BLOCK_TOKENS: Final = 16
DEFAULT_MODEL_LEN: Final = 8192

EXACT: Final = Capabilities(exact=True)
"""Of a simulator: texts are functions of seed, choice and position."""

PROPOSER: Final = SpeculationMode.NGRAM.value
"""The served simulator's drafter: clients see what the cheapest real one looks like."""


class StepWorker(Protocol):
    """A worker without I/O, as `backends.core.worker.WorkerCore` is."""

    @property
    def admission(self) -> Admission:
        """What can run here."""
        ...

    def submit(self, request: GenerationRequest, now_s: float) -> None:
        """Queue every choice of a request that `admission` accepted."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request and free its blocks at once; no-op if it has ended already."""
        ...

    def set_pace(self, request_id: str, pace: Pace) -> None:
        """Change how far a request goes on, from the next step on; no-op if it is not open."""
        ...

    def load(self) -> WorkerLoad:
        """Return the load."""
        ...

    def plan(self, now_s: float) -> StepPlan | None:
        """Return the next step, or None when there is nothing to do."""
        ...

    def complete(self, plan: StepPlan, result: StepResult, now_s: float) -> list[tuple[str, Delta]]:
        """Account for a step that ended now, and return the deltas with their request ids."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """A worker, its device, and what it serves."""

    worker: StepWorker
    executor: SimExecutor
    tokenizer: Tokenizer
    card: ModelCard


Builder = Callable[[WorkerConfig, Clock], Parts]
"""Puts a worker together.

Raises:
    CheckpointError: there is no tokenizer, or it is damaged.
    ValueError: the profile, the policy or a setting of the simulator is wrong.
"""


def serving_parts(config: WorkerConfig, clock: Clock) -> Parts:
    """Return a worker that gives text: deterministic nonsense in the words of a tokenizer.

    It knows its device, whose drafts are right with a constant chance.
    """
    del clock  # the device is the same at all times
    if config.proposer not in {None, PROPOSER}:
        raise ValueError(f"the simulator drafts as {PROPOSER!r}, not {config.proposer!r}")
    # Of a hub's model only small files are fetched: not worth a thread.
    directory = find_checkpoint(config.model, weights=False)
    profile = load_profile(config.profile)
    tokenizer = Tokenizer(directory)
    truth = Truth(printable_vocabulary(tokenizer))
    device = _device(config, profile)
    proposer = SimProposer(
        PROPOSER, truth, ConstantAcceptance(truth, config.sim_acceptance), DraftCost(), device
    )
    blocks = KvBlocks(num_blocks(config.kv_bytes, profile), BLOCK_TOKENS)
    scheduler = Scheduler(
        SchedulerConfig(config.max_num_seqs, config.max_step_tokens),
        blocks,
        speculation_policy(config.speculation),
        {PROPOSER: proposer},
        profile.cost,
        batching_policy(config.batching),
    )
    max_model_len = _max_model_len(config, directory)
    card = ModelCard(
        model_id=checkpoint_id(config.model),
        root=config.model or SHIPPED_MODEL_ID,
        max_model_len=max_model_len,
        numerics_class=f"sim:{profile.name}",
        created_s=int(time.time()),
        capabilities=EXACT,
        pool_tokens=blocks.num_blocks * BLOCK_TOKENS,
    )
    worker = WorkerCore(scheduler, tokenizer, max_model_len)
    return Parts(worker, SimExecutor(truth, device), tokenizer, card)


def _device(config: WorkerConfig, profile: Profile) -> Device:
    if config.sim_service_ms is not None:
        return ServiceDevice(constant_service(config.sim_service_ms / 1e3))
    return ProfileDevice(profile)


def _max_model_len(config: WorkerConfig, directory: Path) -> int:
    shape = read_json(directory / "config.json", missing={})
    longest = int(shape.get("max_position_embeddings", DEFAULT_MODEL_LEN))
    return min(longest, config.max_model_len or longest)


def num_blocks(kv_bytes: int | None, profile: Profile) -> int:
    """Return how many KV blocks the memory holds; None is the device's own.

    Raises:
        ValueError: not even one.
    """
    held = profile.kv_bytes if kv_bytes is None else kv_bytes
    block_bytes = BLOCK_TOKENS * profile.kv_token_bytes
    if held < block_bytes:
        raise ValueError(f"kv_bytes is {held}, but one KV block needs {block_bytes} bytes")
    return held // block_bytes
