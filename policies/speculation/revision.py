"""Revision of a plan while its request runs: drafting is switched on or off for one sequence.

A draft slot is worth at most weight x survival, with the strongest evidence that the sequence may
still get. Drafting is switched off while this worth is at most the price, and on when it exceeds
the price by `HYSTERESIS`. The worker reviews its sequences every `REVIEW_STEPS` steps.

A worker whose drafts lose time (`savings`) stops them for all sequences at once, and switches these
sequences on again when the account has recovered.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final, NamedTuple

from draftgate.policies.speculation.plan_reason import LOSS_REASON, compare

REVIEW_STEPS: Final = 16
"""Steps between two reviews of a sequence, for which the terms of drafting hold in a steady batch
(`backends.core.draft_plan`). (Chosen, not tuned. With 16 and 64 streams of the shipped model and
outputs of 64 tokens, up to 12 of 32 requests were switched on, each once, and none was switched
off: Zen 5, bench/results/speculation.md, 2026-11-22.)"""

LEAST_ON_STEPS: Final = 64
"""Least number of steps between switching drafting on and off again. A request of 1,000 steps then
has at most 25 revisions. (Chosen for a short record, not tuned, 2026-11-22.)"""

OFF_REVIEWS: Final = 2
"""Consecutive reviews that must find drafting unprofitable, because a single review may meet a
short burst of prompts. (Chosen, not tuned, 2026-11-22.)"""

HYSTERESIS: Final = 1.25
"""Factor by which the worth must exceed the price to switch drafting on. Prices of steady batches
vary by a tenth with their lengths. (Chosen, not tuned, 2026-11-22.)"""

MOST_REVISIONS: Final = 64
"""Maximum number of reported revisions of a sequence, after which only a loss of the worker
switches drafting. A trace has at most 128 events per span."""

REPAID_REASON: Final = "this worker has made up for the time that drafts cost"
"""Why drafting is switched on again after a loss."""

_LEAST: Final = 1e-9


class RevisionCause(StrEnum):
    """The value whose change explains most of a revision."""

    PRICE = "price"
    EVIDENCE = "evidence"
    DEADLINE = "deadline"
    DRAFTS_LOSE = "drafts_lose"
    """Drafts have cost the worker time, or have repaid it (`PlanCause.DRAFTS_LOSE`)."""


class SlotWorth(NamedTuple):
    """The values that a review compares.

    Attributes:
        price: weight x survival that a slot must exceed.
        weight: present weight of the sequence's tokens (`weights`).
        survival: survival of a first draft token with the strongest evidence.
    """

    price: float
    weight: float
    survival: float

    @property
    def most(self) -> float:
        """The most that a slot can be worth, in weighted tokens."""
        return self.weight * self.survival


class DraftingSwitch(NamedTuple):
    """The state of drafting for one sequence.

    Attributes:
        on: whether drafting is on.
        since_step: step of the last revision, or None before the first.
        worth: values at the last revision or first review, or None before.
        unprofitable: number of consecutive reviews that found drafting unprofitable.
        revisions: number of revisions, of which `MOST_REVISIONS` are reported.
        stopped: whether drafting is off because drafts lose time on the worker.
    """

    on: bool
    since_step: int | None = None
    worth: SlotWorth | None = None
    unprofitable: int = 0
    revisions: int = 0
    stopped: bool = False

    def review(self, worth: SlotWorth, step: int, *, stops: bool = False) -> DraftingSwitch:
        """Return the state after a review, which switches drafting if its worth has changed.

        Args:
            step: number of the step. Reviews are `REVIEW_STEPS` apart, except for those in which
                `stops` changes.
            stops: whether drafts lose time on the worker.
        """
        if (self.on and stops) or (self.stopped and not stops):
            return self._switched(worth, step)._replace(stopped=stops)
        if stops:
            return self
        first = self if self.worth is not None else self._replace(worth=worth)
        if self.revisions >= MOST_REVISIONS:
            return first
        if not self.on:
            pays = worth.most > HYSTERESIS * worth.price
            return self._switched(worth, step) if pays else first
        if worth.most > worth.price:
            return first._replace(unprofitable=0)
        doubted = first._replace(unprofitable=self.unprofitable + 1)
        settled = self.since_step is None or step - self.since_step >= LEAST_ON_STEPS
        off = doubted.unprofitable >= OFF_REVIEWS and settled
        return self._switched(worth, step) if off else doubted

    def _switched(self, worth: SlotWorth, step: int) -> DraftingSwitch:
        return DraftingSwitch(not self.on, step, worth, 0, self.revisions + 1)


class PlanRevision(NamedTuple):
    """A revision of the plan of a running request.

    Attributes:
        on: whether drafting was switched on.
        cause: the value that changed most.
        output_tokens: length of the output at the revision.
        worth: the compared values.
        at_s: time of the revision, on the clock of `backends.types.Phases`.
    """

    on: bool
    cause: RevisionCause
    output_tokens: int
    worth: SlotWorth
    at_s: float

    @property
    def reason(self) -> str:
        """The revision in words."""
        switched = f"drafting switched {'on' if self.on else 'off'} after {self.output_tokens}"
        if self.cause is RevisionCause.DRAFTS_LOSE:
            words = REPAID_REASON if self.on else LOSS_REASON
            return f"{switched} tokens: {words}"
        price, sign, most = compare(self.worth.price, self.worth.most)
        return (
            f"{switched} tokens, by {self.cause.value}: price {price} {sign} {most}, "
            "the most that a slot can be worth"
        )


def revision_cause(before: SlotWorth, worth: SlotWorth, *, on: bool) -> RevisionCause:
    """Return which value changed most in favour of a revision, by its ratio.

    Args:
        before: values at the last revision, or at the first review.
        worth: present values.
        on: whether drafting is switched on.
    """
    sign = 1.0 if on else -1.0
    changes = {
        RevisionCause.PRICE: sign * _log_ratio(before.price, worth.price),
        RevisionCause.EVIDENCE: sign * _log_ratio(worth.survival, before.survival),
        RevisionCause.DEADLINE: sign * _log_ratio(worth.weight, before.weight),
    }
    return max(changes, key=changes.__getitem__)


def _log_ratio(over: float, under: float) -> float:
    return math.log(max(over, _LEAST) / max(under, _LEAST))
