"""Drafts whose host time exceeds their gain, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.core.sequence import Sequence
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.registry import speculation_policy
from tests.core.fakes import FakeExecutor, FakeProposer, request
from tests.examples import grid

TOKENS = 1600
COST = StepCost(tuple(range(1, 33)), tuple(1e-3 + 5e-5 * n for n in range(1, 33)))

LOOKED_UP, COMPUTED = (5e-4, 0.0), (1e-3, 1e-4)
"""Host times of a proposer per call and per draft position, in seconds."""

CASES = grid(
    (1, 4), (LOOKED_UP, COMPUTED), quick=lambda *case: case in {(1, LOOKED_UP), (4, COMPUTED)}
)


class VirtualClock:
    """A virtual clock that proposers advance."""

    def __init__(self) -> None:
        self.now_s = 0.0


class SlowProposer(FakeProposer):
    """A proposer that spends host time in each call."""

    def __init__(
        self, clock: VirtualClock, call_s: float, wrong: float, depth_s: float = 0.0
    ) -> None:
        super().__init__(
            is_wrong=lambda key, position: Random(key * 7919 + position).random() < wrong,
            depth_s=depth_s,
        )
        self._clock, self._call_s = clock, call_s

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        depth = max(each.max_tokens for each in requests)
        self._clock.now_s += self._call_s + depth * self.depth_s(len(requests))
        return super().propose(requests)


@cache
def tokens_per_s(policy: str, sequences: int, call_s: float, wrong: float, depth_s=0.0) -> float:
    """Return the throughput of a worker whose steps take their predicted time plus host time.

    Only the second half counts, because the worker learns in the first half.
    """
    clock, executor = VirtualClock(), FakeExecutor()
    name = "draft_model" if depth_s else "ngram"
    scheduler = Scheduler(
        SchedulerConfig(16, 64),
        KvBlocks(sequences * (TOKENS + 64) // 16, 16),
        speculation_policy(policy),
        {name: SlowProposer(clock, call_s, wrong, depth_s)},
        COST,
    )
    drafts = 0 if policy == "off" else 4
    for key in range(sequences):
        generation = request(prompt=4, max_tokens=TOKENS, drafts=drafts, proposer=name)
        scheduler.add(Sequence.for_choice(key, generation, generation.choices[0]))
    tokens = []
    while (plan := scheduler.plan(clock.now_s)) is not None:
        result = executor.execute(plan)
        step_s = COST.seconds(plan.num_tokens)
        clock.now_s += step_s
        scheduler.apply(plan, replace(result, step_s=step_s), clock.now_s)
        tokens.append((clock.now_s, sum(map(len, result.emitted))))
    half_s = clock.now_s / 2
    return sum(count for ended_s, count in tokens if ended_s > half_s) / half_s


@pytest.mark.parametrize(("sequences", "costs_s"), CASES)
def test_drafts_that_cost_more_host_time_than_they_gain_are_avoided(sequences, costs_s) -> None:
    """Throughput is at most 2% below `off` with expensive calls and one correct draft in eight.

    A call takes at least half a step. The device time alone would favour drafts in every step.
    """
    call_s, depth_s = costs_s
    plain = tokens_per_s("off", sequences, 0.0, 0.0)
    assert tokens_per_s("auto", sequences, call_s, 0.88, depth_s) > 0.98 * plain
    assert tokens_per_s("fixed:1", sequences, call_s, 0.88, depth_s) < 0.9 * plain


@pytest.mark.parametrize(("sequences", "costs_s"), CASES)
def test_drafts_that_gain_more_than_their_host_time_are_made(sequences, costs_s) -> None:
    """The scheduler makes expensive calls almost always when nine of ten tokens are correct."""
    call_s, depth_s = costs_s
    best = tokens_per_s("fixed:4", sequences, call_s, 0.1, depth_s)
    assert best > 1.3 * tokens_per_s("off", sequences, 0.0, 0.0)
    assert tokens_per_s("auto", sequences, call_s, 0.1, depth_s) > 0.97 * best
