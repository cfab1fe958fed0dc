"""Speculation policies: `off`, `fixed:K` and `auto`.

Each is a value that decides twice: `decide` for a request at the gateway, `draft_lengths` for a
step in the worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from policies.step_cost import StepCost
from policies.types import (
    PROPOSER_MODES,
    RequestView,
    SpeculationMode,
    SpeculationPlan,
    StepView,
    WorkerLoad,
)

MAX_DRAFT_TOKENS: Final = 16
"""Longest draft `auto` plans for: the rows of one CPU tile, the least a GPU tile holds."""


MOST_FIXED: Final = 64
"""Longest draft of `fixed:K`: what a verify tile of a GPU kernel holds; metrics count by slot."""


@dataclass(frozen=True, slots=True)
class Off:
    """Never speculate."""

    name: str = "off"

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Plan no drafts."""
        del load
        return _no_speculation(self.name, request, "speculation is off on this server")

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        """Allow no drafts."""
        del cost
        return [0] * len(step.candidates)


@dataclass(frozen=True, slots=True)
class Fixed:
    """Draft up to K tokens in every step, whatever the load: the baseline of other engines."""

    draft_tokens: int

    def __post_init__(self) -> None:
        """Check the length.

        Raises:
            ValueError: K is not from 1 to `MOST_FIXED`.
        """
        if not 1 <= self.draft_tokens <= MOST_FIXED:
            raise ValueError(f"fixed:K needs K from 1 to {MOST_FIXED}, not {self.draft_tokens}")

    @property
    def name(self) -> str:
        """`fixed:K`."""
        return f"fixed:{self.draft_tokens}"

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Plan K tokens, or the client's cap if that is less."""
        proposer, why_not = _choose_proposer(request, load)
        if proposer is None:
            return _no_speculation(self.name, request, why_not)
        cap = _cap(self.draft_tokens, request)
        reason = f"fixed at {cap} draft tokens per step"
        return SpeculationPlan(self.name, request.mode, proposer, cap, reason)

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        """Allow K slots each, first come first served within the budget."""
        del cost
        wanted = [min(self.draft_tokens, c.max_draft_tokens) for c in step.candidates]
        return _within_budget(wanted, step.slot_budget)


@dataclass(frozen=True, slots=True)
class Auto:
    """Draft as long as it pays: lengths from the running acceptance and the batch.

    A first, simple form. All sequences share one cap k per step; each drafts
    `min(k, what it offers)`, and k maximises expected tokens per second, the sum over sequences of
    1 + survivals by `T(step)` and the time of drafting, so a full batch or a poor acceptance
    shortens drafts by itself (the goodput of SmartSpec, arXiv 2406.14066, with an acceptance per
    sequence).
    """

    max_draft_tokens: int = MAX_DRAFT_TOKENS
    name: str = "auto"

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Plan the longest draft whose last slot is likelier to survive than the price.

        At least one token is planned while a proposer exists: the load may have passed when the
        request decodes, and the worker decides each step anew.
        """
        proposer, why_not = _choose_proposer(request, load)
        if proposer is None:
            return _no_speculation(self.name, request, why_not, load.price)
        paying = _paying_slots(load.acceptance, load.price, self.max_draft_tokens)
        cap = _cap(max(1, paying), request)
        reason = (
            f"up to {cap} draft tokens: acceptance {load.acceptance:.2f}, "
            f"price {load.price:.3f} tokens per slot, {load.running} running"
        )
        return SpeculationPlan(self.name, request.mode, proposer, cap, reason, load.price)

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        """Choose the cap k that maximises expected tokens per second, and apply it."""
        longest = max((c.max_draft_tokens for c in step.candidates), default=0)
        best, best_rate = [0] * len(step.candidates), 0.0
        for cap in range(longest + 1):
            wanted = [min(cap, c.max_draft_tokens) for c in step.candidates]
            lengths = _within_budget(wanted, step.slot_budget)
            rate = _tokens_per_s(step, cost, lengths)
            if rate > best_rate:
                best, best_rate = lengths, rate
        return best


def _tokens_per_s(step: StepView, cost: StepCost, lengths: Sequence[int]) -> float:
    """Return the expected tokens per second of the step with these drafts."""
    chosen = list(zip(step.candidates, lengths, strict=True))
    drafted = sum(sum(candidate.survivals[:length]) for candidate, length in chosen)
    slots = sum(lengths)
    step_s = cost.seconds(step.tokens + slots, step.kv_tokens, step.sequences, slots)
    # Proposers draft one after the other, each for all its sequences at once.
    deepest: dict[float, int] = {}
    for candidate, length in chosen:
        deepest[candidate.depth_s] = max(length, deepest.get(candidate.depth_s, 0))
    draft_s = sum(depth_s * depth for depth_s, depth in deepest.items())
    return (step.sequences + drafted) / max(step_s + draft_s, 1e-9)


def _paying_slots(acceptance: float, price: float, most: int) -> int:
    """Return how many slots survive with more than the price: the largest k with a^k > price."""
    if price <= 0.0 or acceptance >= 1.0:
        return most
    if acceptance <= price:
        return 0
    return min(most, math.ceil(math.log(price) / math.log(acceptance)) - 1)


def _choose_proposer(request: RequestView, load: WorkerLoad) -> tuple[str | None, str]:
    """Return the proposer the request may use, or None and why."""
    if request.mode is SpeculationMode.OFF or request.max_draft_tokens == 0:
        return None, "the request asked for no speculation"
    if not load.proposers:
        return None, "the worker has no proposer"
    if request.mode in PROPOSER_MODES:
        if request.mode.value not in load.proposers:
            return None, f"the worker has no proposer {request.mode.value!r}"
        return request.mode.value, ""
    return load.proposers[0], ""


def _cap(draft_tokens: int, request: RequestView) -> int:
    """Return the draft length, bounded by what the client asked for."""
    asked = request.max_draft_tokens
    return draft_tokens if asked is None else min(draft_tokens, asked)


def _no_speculation(
    policy: str, request: RequestView, reason: str, price: float | None = None
) -> SpeculationPlan:
    return SpeculationPlan(policy, request.mode, None, 0, reason, price)


def _within_budget(wanted: Sequence[int], budget: int) -> list[int]:
    """Grant what is wanted in order until the budget is spent."""
    granted = []
    for length in wanted:
        granted.append(min(length, max(budget, 0)))
        budget -= granted[-1]
    return granted
