"""The simulated device: what steps truly take, which is not what the worker believes.

A roofline (Williams, Waterman, Patterson, CACM 2009) in place of a table with slopes:

    step = launch + larger of (memory, arithmetic) + OVERLAP_LOST x smaller + attention + sequences

Memory is reading the weights; arithmetic grows with the tokens in whole tiles. Attention is such a
maximum itself, of reading keys and values in whole splits and of the pairs of tokens, draft slots
included. The parameters are those with which steps of the least and of the most tokens in the
profile's table take what it says; between them the roofline has its knee, where a table of slopes
has none, and coarser stairs. On top comes `Weather`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from draftgate.backends.core.steps import StepPlan
from draftgate.backends.sim.profile import Profile
from draftgate.policies.costs.step_cost import StepCost

LAUNCH_SHARE: Final = 0.1
"""Of the shortest step, what is neither reading nor arithmetic: launches and samplers. Assumed."""

OVERLAP_LOST: Final = 0.5
"""Of the smaller of memory and arithmetic, what does not hide behind the larger. At 0 the step is a
pure roofline, at 1 a sum, as the published fits have it; a half is furthest from both. Assumed."""

TILES_TO_RIDGE: Final = 8
"""Tiles until arithmetic takes as long as reading the weights: of 32 tokens on an H100."""

SPLIT_TOKENS: Final = 64
"""Keys and values are read in splits of so many tokens."""

SPREAD: Final = 0.04
"""Standard deviation of the logarithm of a step's time: P99 is 10 % above the median. Assumed."""

STALL_CHANCE: Final = 1e-3
STALL_STEPS: Final = 5.0
"""A step in a thousand is held up, by five shortest steps on average (exponential). Assumed: what
collections of garbage, clocks and neighbours do to a server."""

WEATHER_INSTANTS: Final = 1 << 16
"""Instants until the weather repeats itself: seven minutes of H100 steps."""


class Device(Protocol):
    """Knows how long things take. Drafting is spent when it happens, before its step."""

    def draft(self, proposer: str, sequences: int, depth: int) -> None:
        """Spend the time of one draft for each of so many sequences, `depth` tokens deep."""
        ...

    def step_s(self, plan: StepPlan, emitted: Many[tuple[int, ...]]) -> float:
        """Return the seconds of a step that emitted these tokens, without drafting."""
        ...

    def drafting_s(self) -> float:
        """Return the seconds spent on drafts since the last call."""
        ...


class ProfileDevice:
    """Takes exactly what a profile says."""

    def __init__(self, profile: Profile) -> None:
        self._cost = profile.cost
        self._draft = profile.draft
        self._drafting_s = 0.0

    def draft(self, proposer: str, sequences: int, depth: int) -> None:
        """See `Device`."""
        cost = self._draft.get(proposer)
        if cost is not None:
            self._drafting_s += cost.call_s + depth * cost.depth_s(sequences)

    def step_s(self, plan: StepPlan, emitted: Many[tuple[int, ...]]) -> float:
        """See `Device`."""
        work = Work.of(plan)
        step_s = self._cost.seconds(work.tokens, work.kv_tokens, len(plan.work))
        return step_s + self._cost.pair_s * work.pairs

    def drafting_s(self) -> float:
        """See `Device`."""
        spent_s, self._drafting_s = self._drafting_s, 0.0
        return spent_s


class RooflineDevice(ProfileDevice):
    """Takes what a roofline through the profile's ends says, in changing weather."""

    def __init__(self, profile: Profile, seed: int, index: int, now_s: Callable[[], float]) -> None:
        """Seed the weather.

        Args:
            seed: of the simulation.
            index: which of its devices this is; each has a weather of its own.
            now_s: the clock.
        """
        super().__init__(profile)
        self._roofline = Roofline.through(profile.cost)
        self._weather = Weather(self._roofline.shortest_s, seed, index)
        self._now_s = now_s

    def step_s(self, plan: StepPlan, emitted: Many[tuple[int, ...]]) -> float:
        """See `Device`."""
        work = Work.of(plan)
        dense_s = self._roofline.seconds(work.tokens)
        read_s = self._cost.kv_token_s * work.split_tokens
        attention_s = _overlapped(read_s, self._cost.pair_s * work.pairs)
        clear_s = dense_s + attention_s + self._cost.sequence_s * len(plan.work)
        return self._weather.step_s(clear_s, self._now_s())

    def drafting_s(self) -> float:
        """See `Device`. Drafts have the weather's noise; it is their step that stalls."""
        return super().drafting_s() * self._weather.factor(self._now_s())


@dataclass(frozen=True, slots=True)
class Work:
    """What a step feeds and reads.

    Attributes:
        tokens: fed, drafts included.
        kv_tokens: KV tokens read.
        split_tokens: the same, each sequence's rounded up to whole splits.
        pairs: a token fed behind the first of its sequence with each KV token that it attends to.
    """

    tokens: int
    kv_tokens: int
    split_tokens: int
    pairs: int

    @classmethod
    def of(cls, plan: StepPlan) -> Work:
        """Add up a plan."""
        tokens = kv_tokens = splits = pairs = 0
        for work in plan.work:
            fed = len(work.token_ids) + len(work.draft.token_ids)
            end = work.start + fed
            tokens += fed
            kv_tokens += end
            splits += -(-end // SPLIT_TOKENS)
            if fed > 1:
                pairs += (fed - 1) * work.start + fed * (fed + 1) // 2 - 1
        return cls(tokens, kv_tokens, splits * SPLIT_TOKENS, pairs)


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds of a step's products from its tokens.

    Attributes:
        launch_s: of any step.
        memory_s: reading the weights.
        token_s: arithmetic of a token.
        tile_tokens: arithmetic comes in tiles of so many.
    """

    launch_s: float
    memory_s: float
    token_s: float
    tile_tokens: int

    @classmethod
    def through(cls, cost: StepCost) -> Roofline:
        """Return the roofline which takes what the table says at its first and last bucket."""
        most = cost.token_buckets[-1]
        shortest_s, longest_s = cost.step_s[0], cost.step_s[-1]
        launch_s = LAUNCH_SHARE * shortest_s
        memory_s = shortest_s - launch_s
        for _ in range(20):  # the first bucket's own arithmetic is small: this converges at once
            arithmetic_s = longest_s - launch_s - OVERLAP_LOST * memory_s
            if arithmetic_s < memory_s:
                arithmetic_s = (longest_s - launch_s - memory_s) / OVERLAP_LOST
            token_s = max(arithmetic_s, 0.0) / most
            first_s = token_s * cost.token_buckets[0]
            memory_s = max(shortest_s - launch_s - OVERLAP_LOST * first_s, 0.0)
        ridge = memory_s / token_s if token_s > 0.0 else 1.0
        tile = 1 << max(0, int(ridge / TILES_TO_RIDGE).bit_length() - 1)
        return cls(launch_s, memory_s, token_s, tile)

    @property
    def shortest_s(self) -> float:
        """The seconds of a step of one token."""
        return self.seconds(1)

    def seconds(self, tokens: int) -> float:
        """Return the seconds of so many tokens, at least one."""
        padded = -(-tokens // self.tile_tokens) * self.tile_tokens
        return self.launch_s + _overlapped(self.memory_s, self.token_s * padded)


def _overlapped(one_s: float, other_s: float) -> float:
    """Return the seconds of two things that overlap in part."""
    return max(one_s, other_s) + OVERLAP_LOST * min(one_s, other_s)


class Weather:
    """Noise that depends on the instant, not on the step: the same for every policy.

    Two policies meet the same slow moments, though their steps begin at other times (common random
    numbers). Noise is lognormal with mean 1; now and then a step stalls.
    """

    def __init__(self, instant_s: float, seed: int, index: int) -> None:
        """Draw it. It changes every `instant_s`."""
        random = np.random.default_rng((seed, index))
        normal = random.standard_normal(WEATHER_INSTANTS)
        stalled = random.random(WEATHER_INSTANTS) < STALL_CHANCE
        stall_s = random.exponential(STALL_STEPS * instant_s, WEATHER_INSTANTS)
        factors = np.exp(SPREAD * normal - SPREAD * SPREAD / 2)
        self._factors: list[float] = factors.tolist()
        self._stalls: list[float] = np.where(stalled, stall_s, 0.0).tolist()
        self._instant_s = instant_s

    def factor(self, now_s: float) -> float:
        """Return how much longer than usual things take."""
        return self._factors[int(now_s / self._instant_s) % WEATHER_INSTANTS]

    def step_s(self, clear_s: float, now_s: float) -> float:
        """Return the seconds of a step that begins now and usually takes `clear_s`."""
        at = int(now_s / self._instant_s) % WEATHER_INSTANTS
        return clear_s * self._factors[at] + self._stalls[at]
