"""Construction of workers without text for simulations.

The device and the recorded texts define the true costs and outcomes. The worker starts from
misjudged step costs, learns acceptance from outcomes, and decides by these alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

from msgspec import structs

from draftgate.backends.core.draft_scores import GRAMMAR
from draftgate.backends.core.scheduler import Scheduler
from draftgate.backends.kv_transfer.exchange import KvExchange, NoMemory
from draftgate.backends.sim.acceptance import Acceptance
from draftgate.backends.sim.assembly import (
    BLOCK_TOKENS,
    EXACT,
    NGRAM,
    SimWorker,
    kv_format_of,
    make_scheduler,
    sim_numerics_class,
)
from draftgate.backends.sim.device_model import ProfileDevice
from draftgate.backends.sim.model import SimExecutor, SimProposer
from draftgate.backends.sim.profile import DraftCost, HostCost, Profile, load_profile
from draftgate.backends.sim.tokens import SimulatedTokens, TrueTokens, shipped_tokenizer
from draftgate.backends.types import ModelCard
from draftgate.backends.worker_config import WorkerConfig
from draftgate.lab.sim.oracle import (
    Knowledge,
    informed_policy,
    informed_scheduler,
    knowledge,
    recorded_rates,
)
from draftgate.lab.sim.recorded_run import EOS, RecordedRun, RunAcceptance, RunTokens
from draftgate.lab.sim.recording import Recording, ReplayedAcceptance, load_recording
from draftgate.lab.sim.roofline import RooflineDevice
from draftgate.lab.sim.textless_worker import DeliveryLog, TextlessWorker, TokenWorker
from draftgate.lab.sim.virtual_time import loop_time_s
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.registry import speculation_policy


def slowed(profile: Profile, times: float) -> Profile:
    """Return the profile of a device whose times are all `times` as long."""
    if times == 1.0:
        return profile
    return replace(_scaled(profile, lambda: times), name=f"{profile.name} x {times:g}")


def misjudged(profile: Profile, error: float, seed: int) -> Profile:
    """Return the initial belief of a worker, in which every value is wrong by a share.

    Each value has its own sign. In a table, the first bucket and the increase over it are wrong
    independently.

    Args:
        error: share, at least 0 and less than 1.
        seed: seed of the signs.

    Raises:
        ValueError: the share is out of range.
    """
    if not 0.0 <= error < 1.0:
        raise ValueError(f"the belief error must be at least 0 and less than 1, not {error}")
    random = Random(seed)
    return _scaled(profile, lambda: 1.0 + error * (1 if random.random() < 0.5 else -1))


def _scaled(profile: Profile, factor: Callable[[], float]) -> Profile:
    """Return the profile with each value multiplied by a factor of its own."""

    def table(steps: tuple[float, ...]) -> tuple[float, ...]:
        first, rest = factor(), factor()
        return tuple(steps[0] * first + (step_s - steps[0]) * rest for step_s in steps)

    def cost(true: StepCost) -> StepCost:
        return StepCost(
            true.token_buckets,
            table(true.step_s),
            true.kv_token_s * factor(),
            true.sequence_s * factor(),
            true.pair_s * factor(),
            # Most profiles lack this value, and their signs must not depend on it.
            true.sample_s * factor() if true.sample_s else 0.0,
        )

    scaled = cost(profile.cost)
    draft = {
        name: DraftCost(cost(true.depths), true.call_s * factor(), true.sequence_s * factor())
        for name, true in sorted(profile.draft.items())
    }
    true_host = profile.host
    host = HostCost(
        true_host.step_s * factor(), true_host.sequence_s * factor(), true_host.launches_ahead
    )
    return replace(profile, cost=scaled, draft=draft, host=host)


SIMULATED_MODEL_LEN: Final = 32_768
"""Default context in a simulation, in tokens."""

SIMULATED_VOCABULARY: Final = range(256)
"""Token ids in a simulation. Python keeps one object per small integer, so these ids take
no memory."""


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
        known, make = knowledge(config.speculation), Scheduler
        cost, draft_costs = believed.cost, believed.draft
        if known is not None:
            rates = recorded_rates(recording) if Knowledge.RATES in known else {}
            make = informed_scheduler(known, rates)
            if Knowledge.COST in known:
                cost, draft_costs = (
                    device.usual_cost(config.step_limits("cpu").tokens),
                    profile.draft,
                )
        tokens: TrueTokens = SimulatedTokens(SIMULATED_VOCABULARY)
        acceptance: Acceptance = ReplayedAcceptance(recording)
        eos_ids = frozenset[int]()
        if self.run is not None:
            tokens, acceptance = RunTokens(self.run, self.run.ended), RunAcceptance(self.run)
            eos_ids = frozenset({EOS})
        proposers = {
            name: SimProposer(name, tokens, acceptance, draft_costs.get(name, DraftCost()), device)
            for name in proposer_names(config.proposer, profile, recording)
        }
        scheduler = make_scheduler(
            make,
            config,
            profile,
            simulation_policy(config.speculation),
            proposers,
            cost,
            eos_ids,
        )
        max_model_len = config.max_model_len or SIMULATED_MODEL_LEN
        pool_tokens = scheduler.blocks.num_blocks * BLOCK_TOKENS
        form = kv_format_of(profile)
        card = ModelCard(
            model_id=profile.name,
            root=profile.source,
            max_model_len=max_model_len,
            numerics_class=sim_numerics_class(profile),
            created_s=0,
            capabilities=EXACT,
            pool_tokens=pool_tokens,
            kv_format=structs.replace(form, numerics_class="sim") if self.shares_kv else form,
        )
        parts = scheduler, shipped_tokenizer(), max_model_len
        worker = TokenWorker(*parts) if self.delivers_tokens else TextlessWorker(*parts, self.log)
        exchange = KvExchange(scheduler.blocks, NoMemory())
        return SimWorker(worker, SimExecutor(tokens, device), card, exchange)

    def _device(self, profile: Profile, index: int) -> ProfileDevice:
        if self.roofline:
            return RooflineDevice(profile, self.seed, index, loop_time_s)
        return ProfileDevice(profile)


def simulation_policy(spec: str) -> SpeculationPolicy:
    """Return the policy of that name. Simulations also know `oracle` and `auto+KIND`.

    Raises:
        ValueError: the policy is invalid, as in `policies.registry.speculation_policy`.
    """
    return speculation_policy(spec) if knowledge(spec) is None else informed_policy(spec)


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
        if name not in (NGRAM, GRAMMAR) and name not in profile.draft:
            raise ValueError(f"the profile {profile.name} has no cost of drafting with {name!r}")
    return chosen
