"""The drafts of a step: what is offered, what the policy takes of it, and the blocks it needs."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Final, NamedTuple

from draftgate.backends.core.drafting import Drafting
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.proposer import DraftOffer, DraftTerms, Proposer
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.types import StepTrace
from draftgate.policies.drafting_cost import DraftingMeter, StepDrafting
from draftgate.policies.price import rate, slot_price
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.speculation import MOST_FIXED
from draftgate.policies.step_cost import StepCost
from draftgate.policies.types import StepView
from draftgate.policies.weights import weight

TERMS_STEPS: Final = 16
"""Steps of a batch that stays the same for which the terms of drafting are computed once: they
change by little as sequences grow, and where nothing can be drafted they are most of the cost."""


class Room(NamedTuple):
    """What a step has left beside its decodes.

    Attributes:
        slots: tokens that drafts may take.
        blocks: KV blocks that nobody is waiting for.
        prefill_tokens: prompt tokens that join it if nothing is drafted.
        free_slots: beside so many slots all of them join.
    """

    slots: int
    blocks: int
    prefill_tokens: int = 0
    free_slots: int = 0


class DraftPlan:
    """Plans the drafts of each step. Drafts preempt nobody.

    Attributes:
        drafting_s: predicted seconds of computing the drafts of the last step.
        traces: what was drafted in it for those of its sequences that are traced, by key; what came
            of it is still to be filled in.
    """

    def __init__(
        self,
        policy: SpeculationPolicy,
        proposers: Mapping[str, Proposer],
        blocks: KvBlocks,
        cost: StepCost,
    ) -> None:
        """Start without a record. `proposers` are ordered, cheapest first; `cost` is of steps."""
        self.drafting = Drafting(proposers)
        self._policy = policy
        self._blocks = blocks
        self._turn = 0
        self._terms = DraftTerms()
        self._batch: tuple[float, ...] = ()  # what the terms are of
        self._view: StepView | None = None  # the last step
        self._accepted = 0.0  # weighted tokens that its drafts are expected to bring
        self.traces: dict[int, StepTrace] = {}
        self.drafting_s = 0.0
        self._did: StepDrafting | None = None  # of the last step, until it is learned from
        self._meter = DraftingMeter(cost.seconds(1, 1, 1), tuple(proposers))

    def plan(
        self,
        decodes: Many[Sequence],
        room: Room,
        cost: StepCost,
        now_s: float | None,
        *,
        traced: bool = False,
    ) -> list[tuple[Sequence, Draft]]:
        """Return the drafts to verify, laid out. The sequences have blocks for them.

        Args:
            decodes: the sequences of the step that will sample; at least one.
            room: what is left for drafts.
            cost: of steps.
            now_s: the time, if any sequence has a service level to weigh; else None.
            traced: whether some of the sequences may be traced.
        """
        self._turn += 1
        view = self._without_drafts(decodes, room)
        if now_s is not None:
            view = _weighed(view, decodes, cost, now_s)
        offers = self.drafting.offers(decodes, self._terms_of(view, decodes, cost))
        lengths = self._lengths(view, offers, cost) if offers else ()
        slots = self._reserve(offers, lengths, room)
        self.drafting_s = _drafting_s(offers, slots)
        drafted = computed = self.drafting.compute(offers, slots, self._terms)
        if any(most and offer.draft is None for offer, most in zip(offers, slots, strict=True)):
            lengths = self._lengths(replace(view, slot_budget=sum(slots)), drafted, cost)
            drafted = [offer.first(most) for offer, most in zip(drafted, lengths, strict=True)]
        self._view, self._accepted = view, sum(offer.expected for offer in drafted)
        self._did = self.drafting.did
        self._did.sequences = len(decodes)
        self._did.verified = sum([1 for offer in drafted if offer.draft])
        self.traces = self._traces(decodes, offers, computed, drafted, cost) if traced else {}
        return [
            (offer.sequence, self._settled(offer, reserved))
            for offer, reserved in zip(drafted, slots, strict=True)
            if offer.draft or reserved
        ]

    def took(self, step_s: float, whole_s: float) -> None:
        """Learn what the last step that was planned took.

        Args:
            step_s: of the device.
            whole_s: from its planning to that of the next one.
        """
        if self._did is not None and self._terms.least_survival is not None:  # else nobody asks
            self._meter.observe(self._did, step_s, whole_s)
            self.drafting.observe_host_time(whole_s - step_s)
        self._did = None

    def price(self, cost: StepCost) -> float:
        """Return what a slot had to promise in the last step, in tokens of weight 1."""
        return 0.0 if self._view is None else slot_price(self._view, cost, self._accepted)

    def _traces(
        self,
        decodes: Many[Sequence],
        offers: Many[DraftOffer],
        computed: Many[DraftOffer],
        verified: Many[DraftOffer],
        cost: StepCost,
    ) -> dict[int, StepTrace]:
        """Return the traces of a step: what was offered, then computed, and is verified of it."""
        traced = [sequence.key for sequence in decodes if sequence.request.traced]
        if not traced:
            return {}
        price = self.price(cost)
        traces = dict.fromkeys(traced, StepTrace(0, price=price))
        for offer, found, kept in zip(offers, computed, verified, strict=True):
            key = offer.sequence.key
            proposed = (found if offer.draft is None else offer).draft
            if key in traces and proposed and kept.draft is not None:
                ids = kept.draft.token_ids
                survivals = kept.candidate.survivals[: len(ids)]
                traces[key] = StepTrace(0, offer.source, len(proposed), ids, 0, survivals, price)
        return traces

    def _without_drafts(self, decodes: Many[Sequence], room: Room) -> StepView:
        """Return the step as it is without drafts."""
        return StepView(
            tokens=len(decodes) + room.prefill_tokens,
            kv_tokens=sum([sequence.num_computed for sequence in decodes]) + len(decodes),
            sequences=len(decodes),
            slot_budget=min(room.slots, MOST_FIXED * len(decodes)),
            candidates=(),
            acceptance=self.drafting.acceptance,
            prefill_tokens=room.prefill_tokens,
            free_slots=room.free_slots,
            verify_s=self._meter.cost.verify_s,
        )

    def _terms_of(self, view: StepView, decodes: Many[Sequence], cost: StepCost) -> DraftTerms:
        """Return what drafts of the step are weighed with; nothing matters without proposers."""
        turn = self._turn // TERMS_STEPS
        batch = view.tokens, view.sequences, view.slot_budget, view.total_weight, turn
        if self.drafting.names and batch != self._batch:
            self._batch = batch
            most = 1.0 if view.weight is None else max(sequence.weight for sequence in decodes)
            self._terms = DraftTerms(
                self._policy.least_survival(view, cost),
                self.price(cost),
                cost.seconds(view.tokens, view.kv_tokens, view.sequences),
                rate(view, cost),
                most,
                self._meter.cost,
            )
        return self._terms

    def _lengths(self, view: StepView, offers: Many[DraftOffer], cost: StepCost) -> Many[int]:
        candidates = tuple([offer.candidate for offer in offers])
        return self._policy.draft_lengths(replace(view, candidates=candidates), cost)

    def _reserve(self, offers: Many[DraftOffer], lengths: Many[int], room: Room) -> list[int]:
        """Take blocks for drafts; return the slots each gets."""
        spare_blocks, budget = room.blocks, room.slots
        slots = []
        for offer, length in zip(offers, lengths, strict=True):
            table, tokens = offer.sequence.block_table, len(offer.sequence.token_ids)
            held = len(table)
            most = max(0, (held + spare_blocks) * self._blocks.block_size - tokens)
            slots.append(min(length, budget, most))
            self._blocks.extend(table, tokens + slots[-1])
            spare_blocks -= len(table) - held
            budget -= slots[-1]
        return slots

    def _settled(self, offer: DraftOffer, reserved: int) -> Draft:
        """Return an offer's draft, laid out; the blocks it leaves over are given back."""
        assert offer.draft is not None
        if len(offer.draft) < reserved:
            tokens = len(offer.sequence.token_ids) + len(offer.draft)
            self._blocks.trim(offer.sequence.block_table, tokens)
        return offer.draft.depth_first()


def _drafting_s(offers: Many[DraftOffer], slots: Many[int]) -> float:
    """Return the seconds of drafting so deep; a depth is paid once by all with the same cost."""
    depths: dict[float, int] = {}
    calls: dict[float, float] = {}
    for offer, most in zip(offers, slots, strict=True):
        if offer.draft is None and most:
            depth_s = offer.candidate.depth_s
            depths[depth_s] = max(most, depths.get(depth_s, 0))
            calls[depth_s] = offer.candidate.call_s
    return sum(depth_s * depth + calls[depth_s] for depth_s, depth in depths.items())


def _weighed(view: StepView, decodes: Many[Sequence], cost: StepCost, now_s: float) -> StepView:
    """Weigh sequences by how late they are; return the step with what its tokens are worth."""
    step_s = cost.seconds(view.tokens, view.kv_tokens, view.sequences)
    for sequence in decodes:
        due_s = sequence.next_due_s
        laxity_s = None if due_s is None else due_s - now_s - step_s
        sequence.weight = weight(laxity_s, sequence.request.service)
    return replace(view, weight=sum(sequence.weight for sequence in decodes))
