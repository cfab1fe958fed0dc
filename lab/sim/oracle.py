"""Policies for simulations that know what no worker can know.

`oracle` knows which draft tokens will be accepted. Its gain over a policy without this knowledge
limits the possible gain of better evidence. `auto+KIND+KIND` is `auto` with the true values of some
`Knowledge`, so the loss of `auto` can be attributed to its parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import ClassVar, Final, cast

from draftgate.backends.core.drafting import Drafting
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.proposer import DraftOffer, DraftRequest, DraftTerms, Proposer
from draftgate.backends.core.scheduler import Scheduler
from draftgate.backends.core.sequence import Sequence as Tokens
from draftgate.backends.sim.model import SimProposer
from draftgate.lab.sim.recording import Recording
from draftgate.policies.costs.step_cost import StepCost, StepSize
from draftgate.policies.costs.step_cost_fit import StepCostFit
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.speculation.allocation import allocate
from draftgate.policies.speculation.auto import Auto
from draftgate.policies.speculation.baselines import Fixed
from draftgate.policies.speculation.draft_prior import BAND_TEMPERATURES
from draftgate.policies.speculation.plan_reason import PlanCause
from draftgate.policies.speculation.planning import (
    MAX_DRAFT_TOKENS,
    choose_proposer_or_any,
    plan_up_to,
)
from draftgate.policies.speculation.survival import RequestRecord, SurvivalModel
from draftgate.policies.types import RequestView, SpeculationPlan, StepView, WorkerLoad

_NAME: Final = "oracle"

_PREFIX: Final = "auto+"

INFORMED: Final = (_NAME, f"{_PREFIX}KIND")
"""The names of policies that only simulations have."""


class Knowledge(StrEnum):
    """What a simulated worker may know from the beginning.

    Attributes:
        RATES: the mean acceptance of the replayed texts by evidence, as if the survival tables had
            learned from all of them before.
        ACCEPTANCE: which draft tokens will be accepted.
        COST: the seconds of steps and depths, without their noise.
        DRAFTS: all drafts of a step, before it chooses their lengths. Only drafts that are verified
            take time.
    """

    RATES = "rates"
    ACCEPTANCE = "acceptance"
    COST = "cost"
    DRAFTS = "drafts"


def knowledge(spec: str) -> frozenset[Knowledge] | None:
    """Return what a policy knows by its name, or None for a policy that workers have, too.

    Raises:
        ValueError: the name has an unknown kind of knowledge.
    """
    if spec == _NAME:
        return frozenset({Knowledge.ACCEPTANCE})
    if not spec.startswith(_PREFIX):
        return None
    kinds = spec.removeprefix(_PREFIX).split("+")
    if unknown := set(kinds) - set(Knowledge):
        expected = ", ".join(Knowledge)
        raise ValueError(f"{spec!r}: expected auto+KIND with {expected}, not {min(unknown)!r}")
    return frozenset(map(Knowledge, kinds))


class InformedDrafting(Drafting):
    """Drafting with some `Knowledge`, which a subclass names."""

    known: ClassVar[AbstractSet[Knowledge]]

    def best_survival(self, sequence: Tokens) -> float | None:
        """Return 1 if drafts are known, because any draft may be right."""
        return 1.0 if Knowledge.DRAFTS in self.known else super().best_survival(sequence)

    def offers(self, sequences: Sequence[Tokens], terms: DraftTerms) -> list[DraftOffer]:
        """Return the offers, of all sequences if drafts are known."""
        if Knowledge.DRAFTS in self.known:
            terms = terms._replace(least_survival=None)
        return super().offers(sequences, terms)

    def compute(
        self, offers: Sequence[DraftOffer], slots: Sequence[int], terms: DraftTerms
    ) -> list[DraftOffer]:
        """Return the drafts. Known lookups take time only if their drafts are verified."""
        if Knowledge.DRAFTS in self.known:
            requested: dict[str, list[DraftRequest]] = {}
            for offer, most in zip(offers, slots, strict=True):
                if offer.draft is not None and most:
                    request = DraftRequest(offer.sequence, most)
                    requested.setdefault(offer.source, []).append(request)
            for name, requests in requested.items():
                self._proposers[name].propose(requests)
                self.step_work.looked_up += len(requests)
        return super().compute(offers, slots, terms)

    def _offers_of(
        self, name: str, requests: list[DraftRequest], terms: DraftTerms
    ) -> Iterable[DraftOffer]:
        if Knowledge.DRAFTS not in self.known or not self._gate.looks_up[name]:
            yield from super()._offers_of(name, requests, terms)
            return
        for request in requests:
            sequence = request.sequence
            draft = self._simulated(name).draft(sequence, request.max_tokens)
            if draft:
                offer = self._found(sequence, name, draft)
                candidate = replace(offer.candidate, start_s=terms.drafting.sequence_s)
                yield replace(offer, candidate=candidate)
            else:
                self._scores.learn_nothing_found(sequence, name)

    def _found(self, sequence: Tokens, source: str, draft: Draft) -> DraftOffer:
        """Return the offer, shortened to the right tokens if acceptance is known."""
        offer = super()._found(sequence, source, draft)
        if Knowledge.ACCEPTANCE not in self.known:
            return offer
        assert offer.draft is not None
        right = self._simulated(source).accepted(sequence, offer.draft)
        candidate = replace(offer.candidate, survivals=(1.0,) * len(right))
        return replace(offer, draft=right, candidate=candidate)

    def _uncomputed(
        self, request: DraftRequest, source: str, depth_s: float, call_s: float
    ) -> DraftOffer:
        offer = super()._uncomputed(request, source, depth_s, call_s)
        sequence, most = request.sequence, request.max_tokens
        if Knowledge.ACCEPTANCE in self.known:
            survivals = (1.0,) * self._simulated(source).agreed(sequence, most)
        elif Knowledge.DRAFTS in self.known:
            draft = self._simulated(source).draft(sequence, most)
            survivals = self._scores.found(sequence, source, draft)[1]
        else:
            return offer
        return replace(offer, candidate=replace(offer.candidate, survivals=survivals))

    def _simulated(self, name: str) -> SimProposer:
        return cast(SimProposer, self._proposers[name])


class KnownCost(StepCostFit):
    """Step costs that are known, so measured steps do not change them."""

    @property
    def relative_error(self) -> float:
        """Return 0: only noise remains, which cannot be known."""
        return 0.0

    def add_step(self, size: StepSize, step_s: float) -> None:
        """Ignore the measurement."""


def informed_scheduler(
    kinds: AbstractSet[Knowledge], rates: Mapping[str, SurvivalModel]
) -> type[Scheduler]:
    """Return the production scheduler with some knowledge.

    Args:
        kinds: what it knows. If it knows the costs, its `cost` must be true from the beginning.
        rates: survival tables of each proposer, which only a scheduler with `Knowledge.RATES` uses.
    """

    class Informed(InformedDrafting):
        known = kinds

        def __init__(self, proposers: Mapping[str, Proposer]) -> None:
            super().__init__(proposers)
            if Knowledge.RATES in kinds:
                for name, band in product(rates, range(len(BAND_TEMPERATURES))):
                    self._scores.models[name, band] = deepcopy(rates[name])

    class InformedScheduler(Scheduler):
        drafting_class = Informed
        cost_class = KnownCost if Knowledge.COST in kinds else StepCostFit

    return InformedScheduler


def recorded_rates(recording: Recording) -> dict[str, SurvivalModel]:
    """Return the survival tables after all texts of a recording, with the longest drafts."""
    models = {name: SurvivalModel() for name in recording.proposers}
    for name, model in models.items():
        for text in recording.all_texts:
            record, position = RequestRecord(), 0
            while position < text.length:
                guess = text.guess(name, position)
                position += 1 + guess.agreed
                if guess.proposed:
                    rejected = guess.agreed < guess.proposed
                    model.add_draft(
                        record,
                        guess.evidence,
                        guess.agreed,
                        rejected=rejected,
                        agreement=guess.agreement,
                    )
                else:
                    model.add_outcome(record, 0, rejected=True)
        model.by_evidence.refresh()
        model.by_outcome.refresh()
    return models


class Oracle:
    """Allocates slots to tokens that will be accepted, to maximise the rate (`allocate`).

    The oracle uses the worker's believed costs, because it knows tokens in advance but not times.
    """

    name = _NAME

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Return a plan with the longest draft, of which each step verifies a part."""
        plan = Fixed(MAX_DRAFT_TOKENS).decide(request, load)
        return replace(plan, policy=self.name, reason=f"oracle: {plan.reason}")

    def least_survival(self, step: StepView, cost: StepCost) -> float | None:
        """Return None to call every proposer, because the oracle's knowledge costs nothing."""
        del step, cost
        return None

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        """Return how many tokens of each draft to verify."""
        return allocate(step, cost)


@dataclass(frozen=True, slots=True)
class InformedAuto(Auto):
    """`auto` with a plan that excludes no draft, if it sees all drafts before it chooses."""

    sees_drafts: bool = False

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Return the plan of `auto`, or one with the longest draft."""
        if not self.sees_drafts:
            return Auto.decide(self, request, load)
        plan = plan_up_to(self.name, MAX_DRAFT_TOKENS, request, load, PlanCause.LONGEST_DRAFT)
        return replace(plan, proposer=plan.proposer and choose_proposer_or_any(request, load))


def informed_policy(spec: str) -> SpeculationPolicy:
    """Return `oracle`, or `auto` with the knowledge that its name lists."""
    if spec == _NAME:
        return Oracle()
    known = knowledge(spec) or frozenset()
    return InformedAuto(name=spec, sees_drafts=Knowledge.DRAFTS in known)
