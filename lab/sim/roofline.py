"""A device with noise whose step times follow a roofline.

Workers predict step times from a table with slopes. `RooflineDevice` differs from that on purpose.
It follows a roofline (Williams, Waterman, Patterson, CACM 2009):

    step = launch + max(memory, arithmetic) + OVERLAP_LOST x min(memory, arithmetic)
         + attention + sequences

Memory is the time to read the weights. Arithmetic grows with the tokens in whole tiles. Attention
is the maximum of two times: reading keys and values in whole splits, and processing the pairs of
tokens, including draft slots. The roofline agrees with the profile at the smallest and the largest
step of its table. Between them it has coarser stairs and a knee, which the table lacks. `StepNoise`
adds noise.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Final

import numpy as np

from draftgate.backends.core.steps import StepPlan
from draftgate.backends.sim.device_model import ProfileDevice
from draftgate.backends.sim.profile import Profile
from draftgate.policies.costs.step_cost import StepCost

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
                -(-(start + len(token_ids) + len(draft.token_ids)) // SPLIT_TOKENS)
                for _, start, token_ids, _, draft in plan.work
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
    return max(one_s, other_s) + OVERLAP_LOST * min(one_s, other_s)


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
