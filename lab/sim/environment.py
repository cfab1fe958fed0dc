"""Construction of workers without text for simulations.

The device and the recorded texts define the true costs and outcomes. The worker starts from
misjudged step costs, learns acceptance from outcomes, and decides by these alone.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

import numpy as np
from msgspec import structs

from draftgate.backends.core.draft_scores import GRAMMAR
from draftgate.backends.core.scheduler import Scheduler
from draftgate.backends.core.steps import StepPlan
from draftgate.backends.sim.acceptance import Acceptance
from draftgate.backends.sim.assembly import (
    BLOCK_TOKENS,
    EXACT,
    NGRAM,
    SimWorker,
    kv_format_of,
    make_scheduler,
    sim_numerics_class,
    timed_exchange,
)
from draftgate.backends.sim.device_model import ProfileDevice
from draftgate.backends.sim.engine_costs import HostCost
from draftgate.backends.sim.model import SimExecutor, SimProposer
from draftgate.backends.sim.profile import DraftCost, Profile, load_profile
from draftgate.backends.sim.tokens import SimulatedTokens, TrueTokens, shipped_tokenizer
from draftgate.backends.types import ModelCard
from draftgate.backends.worker_config import WorkerConfig
from draftgate.lab.sim.oracle import (
    INFORMED,
    Knowledge,
    informed_policy,
    informed_scheduler,
    knowledge,
    recorded_rates,
)
from draftgate.lab.sim.recorded_run import EOS, RecordedRun, RunAcceptance, RunTokens
from draftgate.lab.sim.recording import Recording, ReplayedAcceptance, load_recording
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
        exchange = timed_exchange(scheduler.blocks, profile)
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
    if knowledge(spec) is None:
        return speculation_policy(spec, INFORMED)
    return informed_policy(spec)


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


# --- A device with noise whose step times follow a roofline ---------------------------------------
#
# Workers predict step times from a table with slopes. `RooflineDevice` differs from that on
# purpose. It follows a roofline (Williams, Waterman, Patterson, CACM 2009):
#
#     step = launch + max(memory, arithmetic) + OVERLAP_LOST x min(memory, arithmetic)
#          + attention + sequences
#
# Memory is the time to read the weights. Arithmetic grows with the tokens in whole tiles. Attention
# is the maximum of two times: reading keys and values in whole splits, and processing the pairs of
# tokens, including draft slots. The roofline agrees with the profile at the smallest and the
# largest step of its table. Between them it has coarser stairs and a knee, which the table lacks.
# `StepNoise` adds noise.


LAUNCH_SHARE: Final = 0.1
"""Share of the shortest step that is neither memory nor arithmetic: launches, samplers. The value
is assumed."""

OVERLAP_LOST: Final = 0.5
"""Share of the smaller of memory and arithmetic that does not overlap with the larger. 0 is a pure
roofline, and 1 is a sum, as in the published fits. Assumed, because one half is furthest from
both."""

TILES_TO_RIDGE: Final = 8
"""Tiles until arithmetic takes as long as reading the weights: tiles of 32 tokens on an H100."""

SPLIT_TOKENS: Final = 64
"""Size of the splits in which keys and values are read, in tokens."""

SPREAD: Final = 0.04
"""Standard deviation of the logarithm of a step's time: P99 is 10% above the median. The value is
assumed."""

STALL_CHANCE: Final = 1e-3
STALL_STEPS: Final = 5.0
"""Share of steps that stall, and their mean stall in shortest steps (exponential). Assumed, for
garbage collection, clock changes and neighbours on a server."""

NOISE_PERIOD: Final = 1 << 16
"""Number of instants after which the noise repeats: seven minutes of H100 steps."""


class RooflineDevice(ProfileDevice):
    """A device with noise whose times follow a roofline through the ends of a profile's table."""

    def __init__(self, profile: Profile, seed: int, index: int, now_s: Callable[[], float]) -> None:
        """Draw the noise.

        Args:
            seed: seed of the simulation.
            index: number of the device, which determines its noise.
            now_s: clock in seconds.
        """
        super().__init__(profile)
        self._roofline = Roofline.fit(profile.cost)
        self._noise = StepNoise(self._roofline.seconds(1), seed, index)
        self._now_s = now_s

    def step_s(self, plan: StepPlan, emitted: Many[tuple[int, ...]]) -> float:
        """See `DeviceModel`."""
        size = plan.size
        splits = sum(
            [
                -(-(work.start + len(work.token_ids) + len(work.draft.token_ids)) // SPLIT_TOKENS)
                for work in plan.work
            ]
        )
        read_s = self._cost.kv_token_s * (splits * SPLIT_TOKENS)
        attention_s = _overlapped(read_s, self._cost.pair_s * size.pairs)
        dense_s = self._roofline.seconds(size.tokens)
        usual_s = dense_s + attention_s + self._cost.sequence_s * size.sequences
        usual_s += self._cost.sample_s * size.sampled
        return self._noise.step_s(usual_s, self._now_s())

    def usual_cost(self, most_tokens: int) -> StepCost:
        """Return the seconds of decode steps without noise, for tables of up to `most_tokens`.

        Reading keys and values takes longer than processing pairs in such steps. Half of a split
        is read in vain for each sequence.
        """
        tile = self._roofline.tile_tokens
        buckets = tuple(range(tile, most_tokens + tile, tile))
        return StepCost(
            buckets,
            tuple(map(self._roofline.seconds, buckets)),
            self._cost.kv_token_s,
            self._cost.sequence_s + self._cost.kv_token_s * (SPLIT_TOKENS - 1) / 2,
            OVERLAP_LOST * self._cost.pair_s,
            self._cost.sample_s,
        )

    def pop_host_s(self, sequences: int) -> float:
        """See `DeviceModel`. Drafts have the noise of their instant, but only steps stall."""
        return super().pop_host_s(sequences) * self._noise.factor(self._now_s())


@dataclass(frozen=True, slots=True)
class Roofline:
    """The seconds of a step's matrix products as a function of its tokens.

    Attributes:
        launch_s: fixed seconds of every step.
        memory_s: seconds to read the weights.
        token_s: seconds of arithmetic per token.
        tile_tokens: number of tokens in a tile.
    """

    launch_s: float
    memory_s: float
    token_s: float
    tile_tokens: int

    @classmethod
    def fit(cls, cost: StepCost) -> Roofline:
        """Return the roofline that agrees with the first and the last bucket of a table."""
        most = cost.token_buckets[-1]
        shortest_s, longest_s = cost.step_s[0], cost.step_s[-1]
        launch_s = LAUNCH_SHARE * shortest_s
        memory_s = shortest_s - launch_s
        # Memory and arithmetic depend on each other through the overlap. The first bucket has
        # little arithmetic, so this fixed-point iteration converges after few rounds.
        for _ in range(20):
            arithmetic_s = longest_s - launch_s - OVERLAP_LOST * memory_s
            if arithmetic_s < memory_s:
                arithmetic_s = (longest_s - launch_s - memory_s) / OVERLAP_LOST
            token_s = max(arithmetic_s, 0.0) / most
            first_s = token_s * cost.token_buckets[0]
            memory_s = max(shortest_s - launch_s - OVERLAP_LOST * first_s, 0.0)
        ridge = memory_s / token_s if token_s > 0.0 else 1.0
        tile = 1 << max(0, int(ridge / TILES_TO_RIDGE).bit_length() - 1)
        return cls(launch_s, memory_s, token_s, tile)

    def seconds(self, tokens: int) -> float:
        """Return the seconds for a number of tokens, at least one."""
        padded = -(-tokens // self.tile_tokens) * self.tile_tokens
        return self.launch_s + _overlapped(self.memory_s, self.token_s * padded)


def _overlapped(one_s: float, other_s: float) -> float:
    """Return the seconds of two activities that partly overlap."""
    if one_s < other_s:
        one_s, other_s = other_s, one_s
    return one_s + OVERLAP_LOST * other_s


class StepNoise:
    """Noise that depends on the instant, not on the step, so all policies get the same noise.

    Two policies see the same slow moments although their steps begin at different times (common
    random numbers). The noise is lognormal with mean 1, and a few instants stall.

    The noise changes every `instant_s` seconds.
    """

    def __init__(self, instant_s: float, seed: int, index: int) -> None:
        random = np.random.default_rng((seed, index))
        normal = random.standard_normal(NOISE_PERIOD)
        stalled = random.random(NOISE_PERIOD) < STALL_CHANCE
        stall_s = random.exponential(STALL_STEPS * instant_s, NOISE_PERIOD)
        factors = np.exp(SPREAD * normal - SPREAD * SPREAD / 2)
        self._factors: list[float] = factors.tolist()
        self._stalls: list[float] = np.where(stalled, stall_s, 0.0).tolist()
        self._instant_s = instant_s

    def factor(self, now_s: float) -> float:
        """Return the present ratio of durations to usual durations."""
        return self._factors[int(now_s / self._instant_s) % NOISE_PERIOD]

    def step_s(self, usual_s: float, now_s: float) -> float:
        """Return the seconds of a step that begins now and usually takes `usual_s`."""
        at = int(now_s / self._instant_s) % NOISE_PERIOD
        return usual_s * self._factors[at] + self._stalls[at]
