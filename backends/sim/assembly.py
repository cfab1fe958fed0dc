"""Construction of simulated workers that serve text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from draftgate.backends.checkpoints import (
    SHIPPED_MODEL,
    SHIPPED_MODEL_ID,
    checkpoint_id,
    find_checkpoint,
)
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.generation_defaults import read_generation_defaults
from draftgate.backends.grammar import LlGrammars
from draftgate.backends.kv_transfer.format import KvFormat
from draftgate.backends.sim.acceptance import ConstantAcceptance
from draftgate.backends.sim.device_model import DeviceModel, ProfileDevice, ServiceTimeDevice
from draftgate.backends.sim.grammar_tokens import GrammarTokens
from draftgate.backends.sim.kv_link import TimedExchange
from draftgate.backends.sim.model import SimExecutor, SimProposer
from draftgate.backends.sim.profile import DraftCost, Profile, load_profile
from draftgate.backends.sim.tokens import SimulatedTokens, printable_vocabulary, shipped_tokenizer
from draftgate.backends.tokenizer import Tokenizer, read_json
from draftgate.backends.types import SAMPLING_OPTIONS, SIMULATED, Capabilities, ModelCard
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.registry import batching_policy, speculation_policy
from draftgate.policies.types import SpeculationMode

BLOCK_TOKENS: Final = 16

DEFAULT_MODEL_LEN: Final = 8192
"""Context of a served model without a context in its configuration, in tokens."""

EXACT: Final = Capabilities(exact=True, options=SAMPLING_OPTIONS)
"""Capabilities of simulated workers, whose texts are functions of seed, choice and position."""

NGRAM: Final = SpeculationMode.NGRAM.value
"""The default proposer, for which a profile need not have a cost."""


@dataclass(frozen=True, slots=True)
class SimWorker:
    """A worker, its device, the model that it serves, and the access to its KV blocks."""

    worker: WorkerCore
    executor: SimExecutor
    card: ModelCard
    exchange: TimedExchange


WorkerBuilder = Callable[[WorkerConfig], SimWorker]
"""Builds a worker.

Raises:
    CheckpointError: the tokenizer is missing or damaged.
    ValueError: the profile, the policy or a setting of the simulator is wrong.
"""


def serving_worker(config: WorkerConfig) -> SimWorker:
    """Return a worker that generates deterministic random words from a tokenizer.

    Its outputs satisfy the grammars of requests. Without a grammar, they never end by themselves.
    The worker knows the costs of its device. Its drafts are right with a constant probability.
    """
    if config.proposer not in {None, NGRAM}:
        raise ValueError(f"the simulator drafts as {NGRAM!r}, not {config.proposer!r}")
    # Only the small files of a hub model are fetched, so this needs no thread.
    directory = find_checkpoint(config.model, weights=False)
    profile = load_profile(config.profile)
    tokenizer = shipped_tokenizer() if directory == SHIPPED_MODEL else Tokenizer(directory)
    printable = printable_vocabulary(tokenizer)
    tokens = SimulatedTokens(printable)
    eos_id = tokenizer.special_id("eos_token")
    eos_ids = frozenset[int]() if eos_id is None else frozenset({eos_id})
    forms = GrammarTokens(tokenizer, printable, eos_ids, tokens.uniform)
    device: DeviceModel = ProfileDevice(profile)
    if config.sim_service_ms is not None:
        service_s = config.sim_service_ms / 1e3
        if not service_s > 0.0:
            raise ValueError(f"sim_service_ms must be more than 0, not {config.sim_service_ms}")
        device = ServiceTimeDevice(lambda _request: service_s)
    acceptance = ConstantAcceptance(tokens, config.sim_acceptance)
    proposer = SimProposer(NGRAM, tokens, acceptance, DraftCost(), device)
    scheduler = make_scheduler(
        Scheduler,
        config,
        profile,
        speculation_policy(config.speculation),
        {NGRAM: proposer},
        profile.cost,
        eos_ids,
    )
    shape = read_json(directory / "config.json", missing={})
    longest = int(shape.get("max_position_embeddings", DEFAULT_MODEL_LEN))
    max_model_len = min(longest, config.max_model_len or longest)
    card = ModelCard(
        model_id=config.model_id or checkpoint_id(config.model),
        root=config.model or SHIPPED_MODEL_ID,
        max_model_len=max_model_len,
        numerics_class=sim_numerics_class(profile),
        created_s=int(time.time()),
        capabilities=replace(EXACT, formats=True),
        pool_tokens=scheduler.blocks.num_blocks * BLOCK_TOKENS,
        eos_ids=tuple(eos_ids),
        kv_format=kv_format_of(profile),
        defaults=read_generation_defaults(config.generation_config, directory),
    )
    grammars = LlGrammars(tokenizer, eos_ids)
    worker = WorkerCore(scheduler, tokenizer, max_model_len, grammars)
    exchange = timed_exchange(scheduler.blocks, profile)
    return SimWorker(worker, SimExecutor(tokens, device, forms), card, exchange)


def sim_numerics_class(profile: Profile) -> str:
    """Return the class of workers with the same numerics, those of the same profile."""
    return f"{SIMULATED}{profile.name}"


def kv_format_of(profile: Profile) -> KvFormat:
    """Return a format with the profile's bytes per token."""
    return KvFormat(sim_numerics_class(profile), "uint8", BLOCK_TOKENS, 1, profile.kv_token_bytes)


def timed_exchange(blocks: KvBlocks, profile: Profile) -> TimedExchange:
    """Return the access of other workers to the blocks of a worker with a profile."""
    return TimedExchange(blocks, BLOCK_TOKENS * profile.kv_token_bytes / profile.kv_copy_bytes_s)


def num_blocks(config: WorkerConfig, profile: Profile) -> int:
    """Return how many KV blocks fit the worker's share of the memory.

    Raises:
        ValueError: not even one block fits.
    """
    kv_bytes = profile.kv_bytes if config.kv_bytes is None else config.kv_bytes
    available = int(config.memory_share * kv_bytes)
    block_bytes = BLOCK_TOKENS * profile.kv_token_bytes
    if available < block_bytes:
        raise ValueError(f"kv_bytes is {available}, but one KV block needs {block_bytes} bytes")
    return available // block_bytes


def make_scheduler(
    make: type[Scheduler],
    config: WorkerConfig,
    profile: Profile,
    policy: SpeculationPolicy,
    proposers: Mapping[str, SimProposer],
    cost: StepCost,
    eos_ids: frozenset[int] = frozenset(),
) -> Scheduler:
    """Return the scheduler of a simulated worker.

    Args:
        make: the class of the scheduler.
        config: the worker's settings.
        profile: sizes of the device.
        policy: the speculation policy.
        proposers: proposers by name.
        cost: initial belief about the duration of steps.
        eos_ids: tokens that end a text.

    Raises:
        ValueError: the batching policy is invalid, or no KV block fits.
    """
    return make(
        SchedulerConfig(*config.step_limits("cpu"), eos_ids),
        KvBlocks(num_blocks(config, profile), BLOCK_TOKENS),
        policy,
        proposers,
        cost,
        batching_policy(config.batching),
    )
