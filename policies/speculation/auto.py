"""`auto`, the default: verify the slots that earn more than they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.speculation.allocation import allocate
from draftgate.policies.speculation.draft_forecast import DraftForecast, forecast_drafts
from draftgate.policies.speculation.planning import (
    MAX_DRAFT_TOKENS,
    capped,
    choose_proposer_or_any,
    no_speculation,
    unweighted,
)
from draftgate.policies.speculation.price import least_slot_price
from draftgate.policies.types import (
    ANY_PROPOSER,
    RequestView,
    SpeculationPlan,
    StepView,
    WorkerLoad,
)


@dataclass(frozen=True, slots=True)
class Auto:
    """Verifies the slots that maximise expected tokens per predicted time (`allocation`).

    If a worker has several proposers and the client names none, `arbitration` chooses the proposer
    for each step of a sequence.

    Attributes:
        weighted: whether tokens count by the lateness and the priority of their sequence
            (`weights`). `auto:unweighted` counts all tokens alike.
    """

    max_draft_tokens: int = MAX_DRAFT_TOKENS
    name: str = "auto"
    weighted: bool = True

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Plan the slots that would be worth their price in a good draft (`draft_forecast`).

        The plan has at least one token if the worker has a proposer. The load may have fallen when
        the request decodes, and the worker decides each step separately.
        """
        proposer, why_not = choose_proposer_or_any(request, load)
        if proposer is None:
            return no_speculation(self.name, request, why_not, load.price)
        expected = forecast_drafts(request, load, proposer)
        paying = expected.paying_slots(load.price, self.max_draft_tokens)
        cap = capped(max(1, paying), request)
        reason = _reason(cap, paying, self.max_draft_tokens, expected, load.price)
        reason += f"; {_evidence(expected, request)}, {load.running} running"
        if proposer == ANY_PROPOSER:
            reason += f"; by {', '.join(load.proposers)}, whichever pays most"
        return SpeculationPlan(self.name, request.mode, proposer, cap, reason, load.price)

    def least_survival(self, step: StepView, cost: StepCost) -> float:
        return least_slot_price(step if self.weighted else unweighted(step), cost)

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        return allocate(step if self.weighted else unweighted(step), cost)


def _reason(cap: int, paying: int, most: int, expected: DraftForecast, price: float) -> str:
    """Return the cap and its cause in words."""
    up_to = f"up to {cap} draft token{'s' if cap > 1 else ''}"
    if cap < max(1, paying):
        return f"{up_to}, as asked for"
    slot, sign = (paying, "<") if paying == most else (paying + 1, ">")
    times = "" if expected.weight == 1.0 else f"{expected.weight:g} x "
    survival = f"{times}survival {expected.survival(slot):.3g} at slot {slot} of a good draft"
    hope = "" if paying else ", but the load may pass"
    return f"{up_to}: price {price:.3g} {sign} {survival}{hope}"


def _evidence(expected: DraftForecast, request: RequestView) -> str:
    """Return the basis of the forecast in words."""
    words = f"acceptance {expected.acceptance:.2f} {expected.source}"
    words += f" at temperature {request.temperature:g}"
    if expected.repetition is not None:
        words += f", repetition {expected.repetition:.2f}"
    return words
