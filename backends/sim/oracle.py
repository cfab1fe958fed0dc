"""The oracle: a policy that knows how much of each draft will be accepted. For simulation only.

What it gains over speculating without foresight is the most that better evidence could.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from backends.core.drafting import Drafting
from backends.core.kv_blocks import KvBlocks
from backends.core.offers import Offer, Terms
from backends.core.scheduler import Scheduler, SchedulerConfig
from backends.core.sequence import Sequence as Tokens
from backends.sim.proposer import SimProposer
from policies.protocols import BatchingPolicy, SpeculationPolicy
from policies.speculation import MAX_DRAFT_TOKENS, Fixed
from policies.step_cost import StepCost
from policies.types import RequestView, SpeculationPlan, StepView, WorkerLoad

NAME: Final = "oracle"


class OracleDrafting(Drafting):
    """Tells survivals of 1 for slots that will be accepted, and leaves out all others."""

    def __init__(self, proposers: Mapping[str, SimProposer]) -> None:
        super().__init__(proposers)
        self._simulated = proposers

    def offers(self, sequences: Sequence[Tokens], terms: Terms) -> list[Offer]:
        """Return what can be verified and will be accepted."""
        return list(self._foreseen(super().offers(sequences, terms)))

    def _foreseen(self, offers: Iterable[Offer]) -> Iterator[Offer]:
        for offer in offers:
            most = offer.candidate.max_draft_tokens
            agreed = self._simulated[offer.source].agreed(offer.sequence, most)
            if agreed:
                candidate = replace(offer.candidate, survivals=(1.0,) * agreed)
                yield replace(offer.first(agreed), candidate=candidate)


class OracleScheduler(Scheduler):
    """The production scheduler with the oracle's drafting."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: KvBlocks,
        policy: SpeculationPolicy,
        proposers: Mapping[str, SimProposer],
        cost: StepCost,
        batching: BatchingPolicy,
    ) -> None:
        super().__init__(config, blocks, policy, proposers, cost, batching)
        self._drafts.drafting = OracleDrafting(proposers)


class Oracle:
    """Gives slots to drafts that will be accepted, as many as maximise tokens per second.

    All slots are worth one token, so only their number and the depth of drafting matter: slots are
    taken by depth, and every number of them is tried at which a depth ends or a stair of the cost
    does. The costs are what the worker believes: it foresees tokens, not times.
    """

    name = NAME

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Plan the longest draft: steps decide."""
        plan = Fixed(MAX_DRAFT_TOKENS).decide(request, load)
        return replace(plan, policy=self.name, reason=f"foreseen: {plan.reason}")

    def least_survival(self, step: StepView, cost: StepCost) -> float:
        """Ask everybody: what is foreseen costs nothing."""
        del step, cost
        return 0.0

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        """Return how much of each draft to verify."""
        lengths = [candidate.max_draft_tokens for candidate in step.candidates]
        by_depth = _counts(lengths)
        best, best_rate = 0, 0.0
        for slots in _edges(by_depth, step, cost):
            rate = (step.sequences + slots) / _seconds(slots, by_depth, step, cost)
            if rate > best_rate:
                best, best_rate = slots, rate
        return _granted(lengths, best)


def _counts(lengths: Sequence[int]) -> list[int]:
    """Return how many drafts reach each depth, from 1 on."""
    deepest = max(lengths, default=0)
    return [sum(length > depth for length in lengths) for depth in range(deepest)]


def _edges(by_depth: Sequence[int], step: StepView, cost: StepCost) -> Iterator[int]:
    """Yield the numbers of slots that may be best, 0 first."""
    yield 0
    before, most = 0, min(sum(by_depth), step.slot_budget)
    for count in by_depth:
        behind = min(before + count, most)
        edge = cost.next_edge(step.tokens + before) - step.tokens
        while before < edge < behind:
            yield edge
            edge = cost.next_edge(step.tokens + edge) - step.tokens
        if behind > before:
            yield behind
        before = behind


def _seconds(slots: int, by_depth: Sequence[int], step: StepView, cost: StepCost) -> float:
    step_s = cost.seconds(step.tokens + slots, step.kv_tokens, step.sequences, slots)
    deepest, left = 0, slots
    while left > 0:
        left -= by_depth[deepest]
        deepest += 1
    costs = {candidate.depth_s for candidate in step.candidates}
    return max(step_s + deepest * sum(costs), 1e-9)


def _granted(lengths: Sequence[int], slots: int) -> list[int]:
    """Give out slots depth by depth, in order."""
    granted = [0] * len(lengths)
    depth = 0
    while slots > 0:
        for index, length in enumerate(lengths):
            if length > depth and slots > 0:
                granted[index] += 1
                slots -= 1
        depth += 1
    return granted
