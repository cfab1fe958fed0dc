"""The drafts of a step: collection of offers, decision of the policy, and reservation of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Final, NamedTuple

from draftgate.backends.core.drafting import Drafting, legal_draft
from draftgate.backends.core.drafts import NO_DRAFT, Draft
from draftgate.backends.core.kv_blocks import KvBlocks, OutOfBlocks
from draftgate.backends.core.proposer import DraftOffer, DraftTerms
from draftgate.backends.core.saved_time import SavedTime
from draftgate.backends.core.sequence import Sequence, SequenceState
from draftgate.backends.core.steps import StepPlan, StepResult
from draftgate.backends.types import StepTrace
from draftgate.policies.costs.drafting_cost import DraftingMeter, StepDrafting
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.speculation.baselines import MOST_FIXED
from draftgate.policies.speculation.price import LongRunSpeedup, rate, slot_price, step_s
from draftgate.policies.speculation.revision import (
    MOST_REVISIONS,
    PlanRevision,
    RevisionCause,
    SlotWorth,
    revision_cause,
)
from draftgate.policies.speculation.weights import weight
from draftgate.policies.types import SpeculationMode, StepView

TERMS_STEPS: Final = 16
"""Number of steps for which the terms of drafting are reused while the batch stays the same. The
terms change little as sequences grow. Computing them takes most of the host time of a step
without drafts."""


class SpareCapacity(NamedTuple):
    """The capacity of a step beyond its decodes.

    Attributes:
        slots: maximum number of draft tokens.
        blocks: number of KV blocks that no waiting sequence needs.
        prefill_tokens: number of prompt tokens that join the step without drafts.
        free_slots: number of slots that leave all of these prompt tokens in the step.
    """

    slots: int
    blocks: int
    prefill_tokens: int = 0
    free_slots: int = 0


class DraftPlan:
    """Plans the drafts of each step. Drafts never preempt a sequence.

    Attributes:
        saved_time: the time that drafts have saved.
        plans_ahead: whether the worker plans a step while the device runs the previous step. After
            a step with drafts, the device has to wait for the plan.
        drafting_s: predicted seconds to compute the drafts of the last step.
        traces: drafting of the last step's traced sequences, by key, without its outcome.
    """

    def __init__(
        self, policy: SpeculationPolicy, drafting: Drafting, blocks: KvBlocks, cost: StepCost
    ) -> None:
        self._drafting = drafting
        self._policy = policy
        self._blocks = blocks
        self._step = 0
        self._terms = DraftTerms()
        self._terms_key: tuple[float, ...] = ()  # the batch of the current terms
        self._view: StepView | None = None  # of the last step
        self._accepted = 0.0  # weighted tokens that its drafts are expected to add
        self._slots = 0  # of its drafts
        self.traces: dict[int, StepTrace] = {}
        self.drafting_s = 0.0
        self.plans_ahead = False
        self._unproposed: Many[Sequence] = ()  # decodes of a step that was planned ahead
        self._step_work: StepDrafting | None = None  # of the last step, until it is learned from
        self._stopped = False  # whether the last review found that drafts lose time
        self._speedup = LongRunSpeedup()
        self._meter = DraftingMeter(cost.seconds(1, 1, 1), drafting.names)
        self.saved_time = SavedTime(self._meter)

    def plan(
        self,
        decodes: Many[Sequence],
        spare: SpareCapacity,
        cost: StepCost,
        now_s: float | None,
        *,
        traced: bool = False,
        ahead: bool = False,
    ) -> list[tuple[Sequence, Draft]]:
        """Return the drafts to verify, depth first, with blocks reserved for them.

        Args:
            decodes: decoding sequences of the step, not empty.
            spare: capacity for drafts.
            cost: step costs.
            now_s: time if a sequence has a service level, else None.
            traced: whether a sequence may be traced.
            ahead: whether to plan no drafts, because the last tokens are unknown (`draft_pays`).
        """
        self._step += 1
        view = self._without_drafts(decodes, spare)
        if not self._drafting.may_draft(decodes):
            self._unproposed = ()
            self._plan_none(view)
            self.traces = self._traces(decodes, (), (), (), cost) if traced else {}
            return []
        if now_s is not None:
            view = _weighed(view, decodes, cost, now_s)
        terms = self._current_terms(view, decodes, cost)
        drafting: Many[Sequence] = ()
        if sum([sequence.draft_cap for sequence in decodes]):  # otherwise all plans are off
            drafting = self.saved_time.sequences_that_may_draft(decodes, terms)
        self._unproposed = drafting if ahead and self._drafting.names else ()
        if ahead or not drafting:
            self._plan_none(view)
            if not ahead:
                self._step_work = StepDrafting(sequences=len(decodes))
            self.traces = self._traces(decodes, (), (), (), cost) if traced else {}
            return []
        offers = self._drafting.offers(drafting, terms)
        lengths = self._lengths(view, offers, cost) if offers else ()
        slots = self._reserve(offers, lengths, spare)
        self.drafting_s = _drafting_s(offers, slots)
        drafted = computed = self._drafting.compute(offers, slots, self._terms)
        if any(most and offer.draft is None for offer, most in zip(offers, slots, strict=True)):
            # Computed drafts have better survival estimates, so the policy may drop some of them.
            lengths = self._lengths(replace(view, slot_budget=sum(slots)), drafted, cost)
            drafted = [offer.first(most) for offer, most in zip(drafted, lengths, strict=True)]
        self._view, self._accepted = view, sum([offer.expected for offer in drafted])
        lengths = [len(offer.draft) if offer.draft else 0 for offer in drafted]
        self._slots = sum(lengths)
        for offer in drafted:
            offer.sequence.draft_source = offer.source
        self._learn_gains(offers, lengths, cost)
        taken_s = step_s(view, cost, self._slots) + self.drafting_s
        self._speedup.add_step(view.total_weight + self._accepted, rate(view, cost) * taken_s)
        self._step_work = self._drafting.step_work
        self._step_work.sequences = len(decodes)
        self._step_work.verified = sum([1 for offer in drafted if offer.draft])
        self.traces = self._traces(decodes, offers, computed, drafted, cost) if traced else {}
        return [
            (offer.sequence, self._trimmed(offer, reserved))
            for offer, reserved in zip(drafted, slots, strict=True)
            if offer.draft or reserved
        ]

    def _plan_none(self, view: StepView) -> None:
        self._view, self._accepted, self._slots, self.drafting_s = view, 0.0, 0, 0.0

    def take_next(self, sequence: Sequence, most: int) -> Draft:
        """Return the tokens of another worker that follow a sequence, and reserve their blocks.

        They are verified whatever the policy is, and the policy learns nothing from them.

        Args:
            most: maximum number of tokens.
        """
        # The token sampled after the draft may be the last token of the output.
        most = max(0, min(most, sequence.remaining_tokens - 1))
        next_ids, sequence.next_ids = sequence.next_ids[:most], ()
        if sequence.first_token_s is not None:
            return NO_DRAFT  # it was preempted after it has sampled the first of them
        draft, sequence.draft_source = legal_draft(sequence, Draft(next_ids)), ""
        try:
            self._blocks.extend(sequence.block_table, len(sequence.token_ids) + len(draft))
        except OutOfBlocks:
            return NO_DRAFT
        return draft

    def draft_pays(self, cost: StepCost) -> bool:
        """Look up the drafts that the last step lacks because it was planned ahead.

        The tokens before that step are known now.

        Returns:
            Whether the policy would have drafted in that step, or a proposer must be explored. Then
            the next step must not be planned ahead either.
        """
        decodes, self._unproposed = self._unproposed, ()
        decodes = [s for s in decodes if s.state is SequenceState.RUNNING]
        if not decodes or self._view is None:
            return False
        offers = self._drafting.offers(decodes, self._terms)
        lengths = self._lengths(self._view, offers, cost) if offers else ()
        self._learn_gains(offers, lengths, cost)
        if any(lengths) or self._drafting.explores:
            return True
        self._drafting.decline(offers)
        return False

    def review(self, decodes: Many[Sequence], now_s: float, *, due: bool) -> None:
        """Switch drafting on or off for the sequences of the last step, from the next step on.

        Plans with a proposer that the client names are not revised. Grammars may force tokens at no
        cost, so drafting stays on for them.

        Args:
            now_s: present time in seconds.
            due: whether to review all sequences, not only those for which the worker stops or
                resumes drafts.
        """
        stops, stopped = self.saved_time.drafts_lose, self._stopped
        if not (due or stops or stopped):
            return
        self._stopped = stops
        price = self._terms.least_survival
        if price is None or not math.isfinite(price):
            return  # the policy ignores prices, or the step has no slots
        for sequence in decodes:
            before = sequence.drafting
            if not due and before.stopped is stops:
                continue
            if sequence.request.speculation.mode is not SpeculationMode.AUTO:
                continue
            if before.on and sequence.grammar is not None:
                continue
            survival = self._drafting.best_survival(sequence)
            if survival is None:
                continue
            worth = SlotWorth(price, sequence.weight, survival)
            after = sequence.drafting = before.review(worth, self._step, stops=stops)
            if after.on is not before.on and after.revisions <= MOST_REVISIONS:
                cause = RevisionCause.DRAFTS_LOSE
                if after.stopped is before.stopped:
                    cause = revision_cause(before.worth or worth, worth, on=after.on)
                revised = PlanRevision(after.on, cause, sequence.output_tokens, worth, now_s)
                sequence.revisions.append(revised)

    def record_step(self, plan: StepPlan, result: StepResult, cost: StepCost) -> None:
        """Record a step that ended."""
        looked_up = self._step_work.looked_up if self._step_work else 0
        self.saved_time.record_step(plan, result, cost, self.drafting_s, looked_up)

    def observe_time(self, whole_s: float | None, cost: StepCost) -> None:
        """Learn how long the last step took, and how much time its drafts saved.

        Args:
            whole_s: seconds from its beginning to the beginning of the next step, or None if
                unknown.
        """
        step_work, self._step_work = self._step_work, None
        work = self.saved_time.end_step(whole_s, cost)
        if work is None or whole_s is None:
            return
        if step_work is None:  # the device hid the host time of its planning
            return
        # With `least_survival` None, every proposer is called at any cost, so the cost does not
        # matter.
        if self._terms.least_survival is not None:
            self._meter.add_step(step_work, work.step_s, whole_s)
            self._drafting.observe_host_time(whole_s - work.step_s)

    def price(self, cost: StepCost) -> float:
        """Return the price of a slot in the last step, in expected tokens at weight 1."""
        if self._view is None:
            return 0.0
        return slot_price(self._view, cost, self._accepted, self._slots, self.drafting_s)

    def _learn_gains(self, offers: Many[DraftOffer], lengths: Many[int], cost: StepCost) -> None:
        """Learn what the lookups of the step gained with these draft lengths."""
        if self._view is None or not self._drafting.step_work.looked_up:
            return
        slots, slot_tokens = sum(lengths), 0.0
        if slots:
            added_s = step_s(self._view, cost, slots) - step_s(self._view, cost)
            slot_tokens = self._terms.tokens_per_s * added_s / slots
        self._drafting.observe_slots(offers, lengths, slot_tokens)

    def _traces(
        self,
        decodes: Many[Sequence],
        offers: Many[DraftOffer],
        computed: Many[DraftOffer],
        verified: Many[DraftOffer],
        cost: StepCost,
    ) -> dict[int, StepTrace]:
        """Return the traces of the offered, computed and verified drafts."""
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

    def _without_drafts(self, decodes: Many[Sequence], spare: SpareCapacity) -> StepView:
        host = self._meter.cost
        verify_s = host.verify_s
        if self.plans_ahead:  # after drafts, the device waits for the planning of the next step
            verify_s += host.planning_s(len(decodes), self._drafting.step_work.looked_up)
        return StepView(
            tokens=len(decodes) + spare.prefill_tokens,
            kv_tokens=sum([sequence.num_computed for sequence in decodes]) + len(decodes),
            sequences=len(decodes),
            slot_budget=min(spare.slots, MOST_FIXED * len(decodes)),
            candidates=(),
            acceptance=self._drafting.acceptance,
            prefill_tokens=spare.prefill_tokens,
            free_slots=spare.free_slots,
            verify_s=verify_s,
        )

    def _current_terms(self, view: StepView, decodes: Many[Sequence], cost: StepCost) -> DraftTerms:
        """Return the terms of drafting, recomputed only if the worker has proposers."""
        turn = self._step // TERMS_STEPS
        key = view.tokens, view.sequences, view.slot_budget, view.total_weight, turn
        if self._drafting.names and key != self._terms_key:
            self._terms_key = key
            most = 1.0 if view.weight is None else max(sequence.weight for sequence in decodes)
            self._terms = DraftTerms(
                self._policy.least_survival(view, cost),
                self.price(cost),
                cost.seconds(view.tokens, view.kv_tokens, view.sequences),
                rate(view, cost) * self._speedup.ratio,
                most,
                self._meter.cost,
            )
        return self._terms

    def _lengths(self, view: StepView, offers: Many[DraftOffer], cost: StepCost) -> Many[int]:
        return self._policy.draft_lengths(
            StepView(
                view.tokens,
                view.kv_tokens,
                view.sequences,
                view.slot_budget,
                tuple([offer.candidate for offer in offers]),
                view.weight,
                view.acceptance,
                view.prefill_tokens,
                view.free_slots,
                view.verify_s,
            ),
            cost,
        )

    def _reserve(
        self, offers: Many[DraftOffer], lengths: Many[int], spare: SpareCapacity
    ) -> list[int]:
        """Reserve blocks for drafts, and return the number of slots for each offer."""
        spare_blocks, budget, size = spare.blocks, spare.slots, self._blocks.block_size
        slots = []
        for offer, length in zip(offers, lengths, strict=True):
            reserved = min(length, budget)
            table, tokens = offer.sequence.block_table, len(offer.sequence.token_ids)
            held = len(table)
            if tokens + reserved > held * size:  # most drafts fit into the sequence's last block
                reserved = min(reserved, max(0, (held + spare_blocks) * size - tokens))
                self._blocks.extend(table, tokens + reserved)
                spare_blocks -= len(table) - held
            slots.append(reserved)
            budget -= reserved
        return slots

    def _trimmed(self, offer: DraftOffer, reserved: int) -> Draft:
        """Return the draft of an offer depth first, and release the unneeded blocks."""
        draft = offer.draft
        assert draft is not None
        if len(draft.token_ids) < reserved:
            tokens = len(offer.sequence.token_ids) + len(draft.token_ids)
            self._blocks.trim(offer.sequence.block_table, tokens)
        return draft.depth_first()


def _drafting_s(offers: Many[DraftOffer], slots: Many[int]) -> float:
    """Return the predicted seconds of drafting, where offers with equal cost share each depth."""
    depths: dict[float, int] = {}
    calls: dict[float, float] = {}
    for offer, most in zip(offers, slots, strict=True):
        if offer.draft is None and most:
            depth_s = offer.candidate.depth_s
            depths[depth_s] = max(most, depths.get(depth_s, 0))
            calls[depth_s] = offer.candidate.call_s
    return sum(depth_s * depth + calls[depth_s] for depth_s, depth in depths.items())


def _weighed(view: StepView, decodes: Many[Sequence], cost: StepCost, now_s: float) -> StepView:
    """Set the weights of the sequences, and return the step with their total weight."""
    step_s = cost.seconds(view.tokens, view.kv_tokens, view.sequences)
    for sequence in decodes:
        due_in_s = sequence.due_in_s(now_s)
        laxity_s = None if due_in_s is None else due_in_s - step_s
        sequence.weight = weight(laxity_s, sequence.request.service)
    return replace(view, weight=sum(sequence.weight for sequence in decodes))
