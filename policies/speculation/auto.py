"""`auto`, the default: verify the slots that earn more than they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.speculation.allocation import allocate
from draftgate.policies.speculation.draft_forecast import DraftForecast, forecast_drafts
from draftgate.policies.speculation.plan_reason import PlanCause, PlanFigures, render_reason
from draftgate.policies.speculation.planning import (
    MAX_DRAFT_TOKENS,
    capped,
    choose_proposer_or_any,
    no_proposer,
    no_speculation,
    unweighted,
)
from draftgate.policies.speculation.price import least_slot_price
from draftgate.policies.types import (
    RequestView,
    SpeculationMode,
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

        A slot is worth at most the weight of its token. If the price is not less, the plan is off,
        unless the client names a proposer, and the worker may switch drafting on later. Otherwise
        the plan has at least one token, because the request may get a better draft, and the worker
        decides each step separately.
        """
        proposer = choose_proposer_or_any(request, load)
        if proposer is None:
            return no_proposer(self.name, request, load, load.price)
        expected = forecast_drafts(request, load, proposer)
        paying = expected.paying_slots(load.price, self.max_draft_tokens)
        figures = _figures(paying, self.max_draft_tokens, expected, request, load)
        dear = load.price >= expected.weight
        if (dear or load.drafts_lose) and request.mode is SpeculationMode.AUTO:
            cause = PlanCause.PRICE_TOO_HIGH if dear else PlanCause.DRAFTS_LOSE
            off = no_speculation(self.name, request, cause, figures, load.price)
            later = capped(self.max_draft_tokens, request)
            return replace(off, later_proposer=proposer, later_draft_tokens=later)
        cap = capped(max(1, paying), request)
        cause = PlanCause.LONGEST_DRAFT if paying == self.max_draft_tokens else PlanCause.PRICE
        if cap < max(1, paying):
            cause = PlanCause.CLIENT_CAP
        return SpeculationPlan(
            policy=self.name,
            mode=request.mode,
            proposer=proposer,
            max_draft_tokens=cap,
            reason=render_reason(cause, figures, cap),
            price=load.price,
            cause=cause,
            figures=figures,
        )

    def least_survival(self, step: StepView, cost: StepCost) -> float:
        return least_slot_price(step if self.weighted else unweighted(step), cost)

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        return allocate(step if self.weighted else unweighted(step), cost)


def _figures(
    paying: int, most: int, expected: DraftForecast, request: RequestView, load: WorkerLoad
) -> PlanFigures:
    """Return the values that decide the cap, with the first slot that does not pay or the last."""
    slot = min(paying + 1, most)
    several = request.mode is SpeculationMode.AUTO and len(load.proposers) > 1
    return PlanFigures(
        price=load.price,
        slot=slot,
        survival=expected.survival(slot),
        weight=expected.weight,
        acceptance=expected.acceptance,
        source=expected.source,
        temperature=request.temperature,
        repetition=expected.repetition,
        running=load.running,
        proposers=load.proposers if several else (),
    )
