"""`auto`: every slot earns more than it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from policies.allocation import allocate
from policies.speculation.planning import (
    MAX_DRAFT_TOKENS,
    capped,
    choose_proposer,
    no_speculation,
    unweighted,
)
from policies.step_cost import StepCost, least_slot_price
from policies.types import (
    ANY_PROPOSER,
    RequestView,
    SpeculationMode,
    SpeculationPlan,
    StepView,
    WorkerLoad,
)


@dataclass(frozen=True, slots=True)
class Auto:
    """Verify the slots that maximise expected tokens by predicted time (`policies.allocation`).

    Where a worker has several proposers and the client no wish, each step of a sequence is drafted
    by the one that pays most (`policies.arbitration`).

    Attributes:
        weighted: whether tokens count by how late a sequence is and by its priority
            (`policies.weights`); else each counts once, as `auto:unweighted` has it.
    """

    max_draft_tokens: int = MAX_DRAFT_TOKENS
    name: str = "auto"
    weighted: bool = True

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Plan the longest draft whose last slot is likelier to survive than the price.

        At least one token is planned while a proposer exists: the load may have passed when the
        request decodes, and the worker decides each step anew.
        """
        proposer, why_not = choose_proposer(request, load)
        if proposer is None:
            return no_speculation(self.name, request, why_not, load.price)
        paying = _paying_slots(load.acceptance, load.price, self.max_draft_tokens)
        cap = capped(max(1, paying), request)
        reason = (
            f"up to {cap} draft tokens: acceptance {load.acceptance:.2f}, "
            f"price {load.price:.3f} tokens per slot, {load.running} running"
        )
        if request.mode is SpeculationMode.AUTO and len(load.proposers) > 1:
            proposer = ANY_PROPOSER
            reason += f"; by {', '.join(load.proposers)}, whichever pays most"
        return SpeculationPlan(self.name, request.mode, proposer, cap, reason, load.price)

    def least_survival(self, step: StepView, cost: StepCost) -> float:
        """Return what no slot can pay below, however many are taken."""
        return least_slot_price(cost, step if self.weighted else unweighted(step))

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        """Take the slots that maximise expected tokens per second."""
        return allocate(step if self.weighted else unweighted(step), cost)


def _paying_slots(acceptance: float, price: float, most: int) -> int:
    """Return how many slots survive with more than the price: the largest k with a^k > price."""
    if price <= 0.0 or acceptance >= 1.0:
        return most
    if acceptance <= price:
        return 0
    return min(most, math.ceil(math.log(price) / math.log(acceptance)) - 1)
