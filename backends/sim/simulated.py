"""Workers for a simulation: no text, acceptance as recorded, a device that is not what they think.

*Truth* is the roofline in its weather and the recorded texts. *Belief* is what policies see: step
costs that begin with an error, acceptance that they learn from outcomes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Final

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.core.admission import Admission
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.sim.acceptance import ReplayedAcceptance
from draftgate.backends.sim.belief import misjudged
from draftgate.backends.sim.clock import Clock
from draftgate.backends.sim.device import Device, ProfileDevice, RooflineDevice
from draftgate.backends.sim.executor import SimExecutor
from draftgate.backends.sim.oracle import NAME as ORACLE
from draftgate.backends.sim.oracle import Oracle, OracleScheduler
from draftgate.backends.sim.parts import BLOCK_TOKENS, EXACT, Parts, num_blocks
from draftgate.backends.sim.profile import DraftCost, Profile, load_profile, slowed
from draftgate.backends.sim.proposer import SimProposer
from draftgate.backends.sim.recording import load_recording
from draftgate.backends.sim.truth import Truth
from draftgate.backends.sim.worker import Ledger, TextlessWorker
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import ModelCard
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.registry import batching_policy, speculation_policy
from draftgate.policies.types import SpeculationMode

VOCABULARY: Final = range(256)
"""Token ids of prompts and outputs: small whole numbers take no memory of their own."""

MAX_MODEL_LEN: Final = 32_768
"""Context of a simulated model where none is asked for."""

LOOKED_UP: Final = SpeculationMode.NGRAM.value
"""The proposer that needs no price: what its look-ups take, if anything, is in the profile."""


@dataclass(frozen=True, slots=True)
class World:
    """What is true of a simulation, and how far its workers are from knowing it.

    Attributes:
        seed: of the devices' weather and of what is misjudged.
        belief_error: share by which the workers' step costs are off at first.
        roofline: whether devices are rooflines in weather; else they do just what the profile says.
        slowness: by what times of the profile are multiplied, of the devices in turn.
        ledger: what came, and when.
    """

    seed: int = 0
    belief_error: float = 0.3
    roofline: bool = True
    slowness: tuple[float, ...] = (1.0,)
    ledger: Ledger = field(default_factory=Ledger)

    def parts(self, config: WorkerConfig, clock: Clock) -> Parts:
        """Put a worker together; `config.device_index` tells workers apart.

        Raises:
            ValueError: the profile, the policy or a proposer is not known.
        """
        slowness = self.slowness[config.device_index % len(self.slowness)]
        profile = slowed(load_profile(config.profile), slowness)
        believed = misjudged(profile, self.belief_error, self.seed)
        device = self._device(profile, config.device_index, clock)
        truth = Truth(VOCABULARY)
        acceptance = ReplayedAcceptance(load_recording())
        proposers = {
            name: SimProposer(name, truth, acceptance, _priced(believed, name), device)
            for name in proposer_names(config.proposer, profile)
        }
        make = OracleScheduler if config.speculation == ORACLE else Scheduler
        blocks = KvBlocks(num_blocks(config.kv_bytes, profile), BLOCK_TOKENS)
        scheduler = make(
            SchedulerConfig(config.max_num_seqs, config.max_step_tokens),
            blocks,
            simulation_policy(config.speculation),
            proposers,
            believed.cost,
            batching_policy(config.batching),
        )
        tokenizer = _tokenizer()
        max_model_len = config.max_model_len or MAX_MODEL_LEN
        pool_tokens = blocks.num_blocks * BLOCK_TOKENS
        admission = Admission(tokenizer, max_model_len, pool_tokens)
        name, numerics = profile.name, f"sim:{profile.name}"
        card = ModelCard(name, profile.source, max_model_len, numerics, 0, EXACT, pool_tokens)
        worker = TextlessWorker(scheduler, admission, self.ledger)
        return Parts(worker, SimExecutor(truth, device), tokenizer, card)

    def _device(self, profile: Profile, index: int, clock: Clock) -> Device:
        if self.roofline:
            return RooflineDevice(profile, self.seed, index, clock.now_s)
        return ProfileDevice(profile)


def simulation_policy(spec: str) -> SpeculationPolicy:
    """Return the policy of that name; `oracle` is known here, too.

    Raises:
        ValueError: as `policies.registry.speculation_policy`.
    """
    return Oracle() if spec == ORACLE else speculation_policy(spec)


def proposer_names(asked: str | None, profile: Profile) -> tuple[str, ...]:
    """Return what a simulated worker drafts with: names with commas between; None is n-gram.

    Raises:
        ValueError: one was not recorded, or the profile has no price for it.
    """
    chosen = (LOOKED_UP,) if asked is None else tuple(asked.split(","))
    recorded = load_recording().proposers
    for name in chosen:
        if name not in recorded:
            raise ValueError(f"no proposer {name!r} was recorded; there are {', '.join(recorded)}")
        if name != LOOKED_UP and name not in profile.draft:
            raise ValueError(f"the profile {profile.name} does not say what {name!r} costs")
    return chosen


@cache
def _tokenizer() -> Tokenizer:
    """Return the tokenizer whose vocabulary bounds token ids; nothing is encoded with it."""
    return Tokenizer(SHIPPED_MODEL)


def _priced(believed: Profile, name: str) -> DraftCost:
    return believed.draft.get(name, DraftCost())
