"""The time that drafts save: per sequence for responses, and by the clock for a bound."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

from draftgate.backends.core.proposer import DraftTerms
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import StepPlan, StepResult
from draftgate.policies.costs.drafting_cost import DraftingMeter
from draftgate.policies.costs.step_cost import StepCost, StepSize
from draftgate.policies.speculation.savings import MOST_TIMES, DraftSavings
from draftgate.policies.types import SpeculationMode


class DecodeWork(NamedTuple):
    """A step of decodes without prompts.

    Attributes:
        decodes: number of its sequences.
        kv_tokens: number of KV tokens that they read.
        slots: number of verified draft tokens.
        looked_up: number of its sequences with lookups.
        tokens: number of emitted tokens.
        step_s: seconds of the device.
    """

    decodes: int
    kv_tokens: int
    slots: int
    looked_up: int
    tokens: int
    step_s: float


class SavedTime:
    """Compares steps with drafts to steps without them."""

    def __init__(self, meter: DraftingMeter) -> None:
        """Start with an open account.

        Args:
            meter: host time of drafting.
        """
        self._meter = meter
        self._savings = DraftSavings()
        self._last: DecodeWork | None = None  # the last step, if it fed no prompt
        self._host_s = 0.0  # mean of the time of steps without drafts beside that of the device

    @property
    def drafts_lose(self) -> bool:
        """Whether drafts have cost too much time, and are stopped."""
        return self._savings.stops_drafts

    def sequences_that_may_draft(
        self, decodes: Many[Sequence], terms: DraftTerms
    ) -> Many[Sequence]:
        """Return the sequences that may have drafts in the next step.

        Drafts stop while they have cost too much time by the clock, and those of a sequence while
        they have used up its trial. This applies to policies that weigh costs. Drafts that the
        client asks for by name, and those of a grammar, continue.
        """
        if terms.least_survival is None:
            return decodes
        if self._savings.omits_drafts:
            return ()
        stops = self._savings.stops_drafts
        return [
            sequence
            for sequence in decodes
            if not (stops or sequence.trial_is_used_up)
            or sequence.grammar is not None
            or sequence.request.speculation.mode is not SpeculationMode.AUTO
        ]

    def record_step(
        self, plan: StepPlan, result: StepResult, cost: StepCost, drafting_s: float, looked_up: int
    ) -> None:
        """Record a step that ended, and add the seconds that its drafts saved to its sequences.

        Each further token saves a sequence a step without drafts. All sequences of the step pay for
        its drafts, but only those with drafts are charged for their trials, by length.

        Args:
            cost: step costs.
            drafting_s: predicted seconds to compute its drafts.
            looked_up: number of sequences with lookups.
        """
        size, self._last = plan.size, None
        if plan.decodes_only and not plan.chunks:  # the usual case without drafts
            decodes, kv_tokens, step_s = size.sequences, size.kv_tokens, result.step_s
            self._last = DecodeWork(decodes, kv_tokens, 0, looked_up, decodes, step_s)
            return
        slots, decoded = 0, []
        for work, path in zip(plan.work, result.accepted, strict=True):
            drafts = len(work.draft.token_ids)
            slots += drafts
            if work.samples and len(work.token_ids) == 1:
                decoded.append((work.sequence, len(path), drafts))
        decodes, kv_tokens = len(decoded), size.kv_tokens - slots
        if not decodes:
            return
        if not plan.chunks:
            tokens = sum([1 + accepted for _, accepted, _ in decoded])
            self._last = DecodeWork(decodes, kv_tokens, slots, looked_up, tokens, result.step_s)
        if not slots:
            return
        # Without its drafts, the step would have had this size.
        pairs = max(size.pairs - slots * kv_tokens // size.sequences, 0)
        plain = StepSize(
            size.tokens - slots, kv_tokens, size.sequences, pairs, size.sampled - slots
        )
        drafting_s += self._meter.cost.verify_s + self._looking_up_s(looked_up)
        # The time of prompts is predicted less well than the difference that drafts make.
        with_s = result.step_s
        if plan.chunks:
            with_s = self._savings.plain_s(cost.size_s(size))
        extra_s = drafting_s + with_s - self._savings.plain_s(cost.size_s(plain))
        plain_s = self._savings.plain_s(
            self._plain_s(cost, decodes, kv_tokens * decodes // size.sequences)
        )
        # A step that the machine disturbs says little about its drafts.
        slot_tokens = min(extra_s / plain_s, MOST_TIMES) * decodes / slots if plain_s else 0.0
        # The time without drafts contains the rest of a step on the host. That of this step is not
        # over yet, so it is assumed to be as long.
        host_s = 0.0 if plan.chunks else self._host_s
        for sequence, accepted, drafts in decoded:
            sequence.saved_s += accepted * plain_s - extra_s - host_s
            sequence.lost_tokens += drafts * slot_tokens - accepted

    def end_step(self, whole_s: float | None, cost: StepCost) -> DecodeWork | None:
        """Learn from the time between two plannings, and return the step between them.

        Args:
            whole_s: seconds from the beginning of the last step to that of the next one, or None if
                unknown.

        Returns:
            None if the step fed prompts, or its time is unknown.
        """
        work, self._last = self._last, None
        if work is None or whole_s is None:
            return None
        predicted_s = self._plain_s(cost, work.decodes, work.kv_tokens)
        if work.slots:
            self._savings.add_drafted_step(work.tokens / work.decodes, predicted_s, whole_s)
        else:
            # Lookups that find nothing are no part of a step without drafts.
            without_s = max(whole_s - self._looking_up_s(work.looked_up), work.step_s)
            self._savings.add_plain_step(predicted_s, without_s)
            host_s, steps = without_s - work.step_s, max(self._savings.plain_steps, 1)
            self._host_s += (host_s - self._host_s) / steps
        return work

    def interrupt(self) -> None:
        """Record that other workers may use the device before the next step."""
        self._last = None

    def _looking_up_s(self, looked_up: int) -> float:
        """Return the predicted seconds of a step's lookups."""
        if not looked_up:
            return 0.0
        host = self._meter.cost
        return host.planning_s(1, looked_up) - host.planning_s(1, 0)

    def _plain_s(self, cost: StepCost, decodes: int, kv_tokens: int) -> float:
        """Return the predicted seconds of a step of decodes without drafts, planning included."""
        return cost.seconds(decodes, kv_tokens, decodes) + self._meter.cost.planning_s(decodes, 0)
