"""`auto`: every slot earns more than it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.speculation.allocation import allocate
from draftgate.policies.speculation.draft_forecast import RequestForecast, forecast
from draftgate.policies.speculation.planning import (
    MAX_DRAFT_TOKENS,
    capped,
    choose_proposer,
    no_speculation,
    unweighted,
)
from draftgate.policies.speculation.price import least_slot_price
from draftgate.policies.types import (
    ANY_PROPOSER,
    RequestView,
    SpeculationMode,
    SpeculationPlan,
    StepView,
    WorkerLoad,
)


@dataclass(frozen=True, slots=True)
class Auto:
    """Verify the slots that maximise expected tokens by predicted time (`allocation`).

    Where a worker has several proposers and the client no wish, each step of a sequence is drafted
    by the one that pays most (`arbitration`).

    Attributes:
        weighted: whether tokens count by how late a sequence is and by its priority
            (`weights`); else each counts once, as `auto:unweighted` has it.
    """

    max_draft_tokens: int = MAX_DRAFT_TOKENS
    name: str = "auto"
    weighted: bool = True

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Plan as many slots as would pay in a draft that goes well (`draft_forecast`).

        At least one token is planned while a proposer exists: the load may have passed when the
        request decodes, and the worker decides each step anew.
        """
        proposer, why_not = choose_proposer(request, load)
        if proposer is None:
            return no_speculation(self.name, request, why_not, load.price)
        several = request.mode is SpeculationMode.AUTO and len(load.proposers) > 1
        if several:
            proposer = ANY_PROPOSER
        expected = forecast(request, load, proposer)
        paying = expected.paying_slots(load.price, self.max_draft_tokens)
        cap = capped(max(1, paying), request)
        reason = _reason(cap, paying, self.max_draft_tokens, expected, load.price)
        reason += f"; {_evidence(expected, request)}, {load.running} running"
        if several:
            reason += f"; by {', '.join(load.proposers)}, whichever pays most"
        return SpeculationPlan(self.name, request.mode, proposer, cap, reason, load.price)

    def least_survival(self, step: StepView, cost: StepCost) -> float:
        """Return what no slot can pay below, however many are taken."""
        return least_slot_price(step if self.weighted else unweighted(step), cost)

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        """Take the slots that maximise expected tokens per second."""
        return allocate(step if self.weighted else unweighted(step), cost)


def _reason(cap: int, paying: int, most: int, expected: RequestForecast, price: float) -> str:
    """Return the cap and why it is no longer, in words."""
    up_to = f"up to {cap} draft token{'s' if cap > 1 else ''}"
    if cap < max(1, paying):
        return f"{up_to}, as asked for"
    slot, sign = (paying, "<") if paying == most else (paying + 1, ">")
    times = "" if expected.weight == 1.0 else f"{expected.weight:g} x "
    survival = f"{times}survival {expected.survival(slot):.3g} at slot {slot} of a good draft"
    hope = "" if paying else ", but the load may pass"
    return f"{up_to}: price {price:.3g} {sign} {survival}{hope}"


def _evidence(expected: RequestForecast, request: RequestView) -> str:
    """Return in words what the forecast was made from."""
    words = f"acceptance {expected.acceptance:.2f} {expected.whose}"
    words += f" at temperature {request.temperature:g}"
    if expected.repetition is not None:
        words += f", repetition {expected.repetition:.2f}"
    return words
