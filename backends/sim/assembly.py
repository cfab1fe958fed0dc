"""Construction of simulated workers, with text for serving or without text for simulations.

In a simulation, the device and the recorded texts define the true costs and outcomes. The worker
starts from misjudged step costs, learns acceptance from outcomes, and decides by these alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

from msgspec import structs

from draftgate.backends.checkpoints import (
    SHIPPED_MODEL,
    SHIPPED_MODEL_ID,
    checkpoint_id,
    find_checkpoint,
)
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.grammar import LlGrammars
from draftgate.backends.kv_transfer.exchange import KvExchange, NoMemory
from draftgate.backends.kv_transfer.format import KvFormat
from draftgate.backends.sim.acceptance import Acceptance, ConstantAcceptance, ReplayedAcceptance
from draftgate.backends.sim.device_model import (
    DeviceModel,
    ProfileDevice,
    RooflineDevice,
    ServiceTimeDevice,
)
from draftgate.backends.sim.grammar_tokens import GrammarTokens
from draftgate.backends.sim.model import SimExecutor, SimProposer
from draftgate.backends.sim.oracle import NAME as ORACLE
from draftgate.backends.sim.oracle import Oracle, OracleScheduler
from draftgate.backends.sim.profile import DraftCost, Profile, load_profile, misjudged, slowed
from draftgate.backends.sim.recorded_run import EOS, RecordedRun, RunAcceptance, RunTokens
from draftgate.backends.sim.recording import Recording, load_recording
from draftgate.backends.sim.textless_worker import DeliveryLog, TextlessWorker, TokenWorker
from draftgate.backends.sim.tokens import SimulatedTokens, TrueTokens, printable_vocabulary
from draftgate.backends.sim.virtual_time import loop_time_s
from draftgate.backends.tokenizer import Tokenizer, read_json
from draftgate.backends.types import Capabilities, ModelCard
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.registry import batching_policy, speculation_policy
from draftgate.policies.types import SpeculationMode

BLOCK_TOKENS: Final = 16

DEFAULT_MODEL_LEN: Final = 8192
"""Context of a served model without a context in its configuration, in tokens."""

SIMULATED_MODEL_LEN: Final = 32_768
"""Default context in a simulation, in tokens."""

SIMULATED_VOCABULARY: Final = range(256)
"""Token ids in a simulation. Python keeps one object per small integer, so these ids take
no memory."""

EXACT: Final = Capabilities(exact=True)
"""Capabilities of simulated workers, whose texts are functions of seed, choice and position."""

NGRAM: Final = SpeculationMode.NGRAM.value
"""The default proposer, for which a profile need not have a cost."""


@dataclass(frozen=True, slots=True)
class SimWorker:
    """A worker, its device, the model that it serves, and the access to its KV blocks."""

    worker: WorkerCore
    executor: SimExecutor
    card: ModelCard
    exchange: KvExchange


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
    tokenizer = Tokenizer(directory)
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
    scheduler = _scheduler(
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
        numerics_class=_numerics_class(profile),
        created_s=int(time.time()),
        capabilities=replace(EXACT, formats=True),
        pool_tokens=scheduler.blocks.num_blocks * BLOCK_TOKENS,
        eos_ids=tuple(eos_ids),
        kv_format=_kv_format(profile),
    )
    grammars = LlGrammars(tokenizer, eos_ids)
    worker = WorkerCore(scheduler, tokenizer, max_model_len, grammars)
    exchange = KvExchange(scheduler.blocks, NoMemory())
    return SimWorker(worker, SimExecutor(tokens, device, forms), card, exchange)


@dataclass(frozen=True, slots=True)
class SimEnvironment:
    """The conditions of a simulation: its devices, and the knowledge of their workers.

    Attributes:
        seed: seed of the devices' noise and of the misjudged costs.
        belief_error: share by which the workers' initial step costs are wrong.
        roofline: whether devices follow a roofline with noise, or exactly the profile.
        recording: recorded texts to replay. None selects those of the profile.
        run: recorded run whose requests are simulated, each with its own text, or None.
        slowness: factors for the times of the profile, for the devices in turn.
        delivers_tokens: whether workers report the tokens of every step, which takes longer.
            Requests can move between workers only in this case.
        shares_kv: whether workers of different profiles exchange KV blocks too.
        log: deliveries to all requests.
    """

    seed: int = 0
    belief_error: float = 0.3
    roofline: bool = True
    recording: Recording | None = None
    run: RecordedRun | None = None
    slowness: tuple[float, ...] = (1.0,)
    delivers_tokens: bool = False
    shares_kv: bool = False
    log: DeliveryLog = field(default_factory=DeliveryLog)

    def build_worker(self, config: WorkerConfig) -> SimWorker:
        """Return a worker without text for the device `config.device_index`.

        Raises:
            ValueError: the profile, the policy or a proposer is unknown.
        """
        slowness = self.slowness[config.device_index % len(self.slowness)]
        profile = slowed(load_profile(config.profile), slowness)
        believed = misjudged(profile, self.belief_error, self.seed)
        device = self._device(profile, config.device_index)
        recording = self.recording or load_recording(profile.recording)
        tokens: TrueTokens = SimulatedTokens(SIMULATED_VOCABULARY)
        acceptance: Acceptance = ReplayedAcceptance(recording)
        eos_ids = frozenset[int]()
        if self.run is not None:
            tokens, acceptance = RunTokens(self.run, self.run.ended), RunAcceptance(self.run)
            eos_ids = frozenset({EOS})
        proposers = {
            name: SimProposer(
                name, tokens, acceptance, believed.draft.get(name, DraftCost()), device
            )
            for name in proposer_names(config.proposer, profile, recording)
        }
        scheduler = _scheduler(
            OracleScheduler if config.speculation == ORACLE else Scheduler,
            config,
            profile,
            simulation_policy(config.speculation),
            proposers,
            believed.cost,
            eos_ids,
        )
        max_model_len = config.max_model_len or SIMULATED_MODEL_LEN
        pool_tokens = scheduler.blocks.num_blocks * BLOCK_TOKENS
        name, numerics = profile.name, _numerics_class(profile)
        form = _kv_format(profile)
        card = ModelCard(
            *(name, profile.source, max_model_len, numerics, 0, EXACT, pool_tokens),
            kv_format=structs.replace(form, numerics_class="sim") if self.shares_kv else form,
        )
        parts = scheduler, _shipped_tokenizer(), max_model_len
        worker = TokenWorker(*parts) if self.delivers_tokens else TextlessWorker(*parts, self.log)
        exchange = KvExchange(scheduler.blocks, NoMemory())
        return SimWorker(worker, SimExecutor(tokens, device), card, exchange)

    def _device(self, profile: Profile, index: int) -> DeviceModel:
        if self.roofline:
            return RooflineDevice(profile, self.seed, index, loop_time_s)
        return ProfileDevice(profile)


def _numerics_class(profile: Profile) -> str:
    return f"sim:{profile.name}"


def _kv_format(profile: Profile) -> KvFormat:
    """Return a format with the profile's bytes per token."""
    return KvFormat(_numerics_class(profile), "uint8", BLOCK_TOKENS, 1, profile.kv_token_bytes)


def simulation_policy(spec: str) -> SpeculationPolicy:
    """Return the policy of that name. Simulations also know `oracle`.

    Raises:
        ValueError: the policy is invalid, as in `policies.registry.speculation_policy`.
    """
    return Oracle() if spec == ORACLE else speculation_policy(spec)


def proposer_names(wanted: str | None, profile: Profile, recording: Recording) -> tuple[str, ...]:
    """Return the proposers of a simulated worker.

    Args:
        wanted: names separated by commas, or None for n-gram.
        profile: costs of the device.
        recording: recorded texts to replay.

    Raises:
        ValueError: a proposer was not recorded, or the profile has no cost for it.
    """
    chosen = (NGRAM,) if wanted is None else tuple(wanted.split(","))
    for name in chosen:
        if name not in recording.proposers:
            known = ", ".join(recording.proposers)
            raise ValueError(f"no proposer {name!r} was recorded; expected {known}")
        if name != NGRAM and name not in profile.draft:
            raise ValueError(f"the profile {profile.name} has no cost of drafting with {name!r}")
    return chosen


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


def _scheduler(
    make: type[Scheduler],
    config: WorkerConfig,
    profile: Profile,
    policy: SpeculationPolicy,
    proposers: Mapping[str, SimProposer],
    cost: StepCost,
    eos_ids: frozenset[int] = frozenset(),
) -> Scheduler:
    return make(
        SchedulerConfig(*config.step_limits("cpu"), eos_ids),
        KvBlocks(num_blocks(config, profile), BLOCK_TOKENS),
        policy,
        proposers,
        cost,
        batching_policy(config.batching),
    )


@cache
def _shipped_tokenizer() -> Tokenizer:
    """Return the tokenizer whose vocabulary limits token ids, and which encodes no text."""
    return Tokenizer(SHIPPED_MODEL)
