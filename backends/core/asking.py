"""Who is asked for drafts: those from whom more is expected than asking takes.

Where no slot can pay, asking would be for nothing: sequences from which nothing is expected are
asked now and then, so that a change is noticed, and where nothing is expected from anybody, one
sequence stands for all. A step in which nobody is asked is as good as one without proposers.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Final

from draftgate.backends.core.draft_scores import DraftScores
from draftgate.backends.core.drafts import DraftRequest, Proposer
from draftgate.backends.core.offers import Terms
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.types import Pace
from draftgate.policies.lookup_gain import LookupGains

HOPELESS_TURNS: Final = 16
"""Sequences whose next drafts are not worth a slot are asked for in each so many steps: where one
begins to repeat something it is noticed within as many tokens, for a sixteenth of the look-ups. All
in the same step, for it is the first that costs most."""

LOOKED_UP_SHARE: Final = 0.01
"""Share of the time of steps for look-ups that do not pay, so that a change is noticed as soon as
that allows: within 3 to 4 tokens alone on a Zen 5 with the shipped model (2026-11-22)."""

RESTING_TURNS: Final = 8
MOST_RESTING_TURNS: Final = 64
"""A proposer that costs something, was offered and not taken by anybody, is offered again behind so
many steps, and each time behind twice as many: what is expected of it changes over tens of drafts,
and to decide against it takes 0.1 to 0.5 ms of the host in every step (batches of 8 and 256, one
core, Zen 4, 2026-11-21)."""

PROBED_TURNS: Final = 64
"""Where no draft of anybody can be worth a slot, one sequence is asked for in each so many steps. A
look-up takes 10 to 20 microseconds, so it adds less than 1% to a step of 100 (one core, Zen 4,
2026-11-21)."""


class Asking:
    """Decides in each step who is asked by whom.

    Attributes:
        looks_up: of each proposer, whether looking drafts up is all they cost.
    """

    def __init__(self, proposers: Mapping[str, Proposer], scores: DraftScores) -> None:
        """Keep them."""
        self.looks_up = {name: each.depth_s(1) <= 0.0 for name, each in proposers.items()}
        self._scores = scores
        self._turn = 0
        self._probed: Sequence | None = None
        # Proposers that nobody used, how long they rest, and the turn until which they do.
        self._resting: dict[str, tuple[int, int]] = {}
        self._quiet: Terms | None = None  # with which nobody is asked
        self._quiet_until = 0
        self._gains = {name: LookupGains() for name, looks_up in self.looks_up.items() if looks_up}

    def begin(self, sequences: Many[Sequence], terms: Terms, *, may_rest: bool) -> Many[Sequence]:
        """Begin a step; return the sequences that may be asked for, those of grammars always.

        Args:
            may_rest: whether all may be left alone in this step; else who drafts is to be known.
        """
        self._turn += 1
        self._probed = None
        if may_rest and terms is self._quiet and self._turn < self._quiet_until:
            return ()
        self._quiet = None
        if self._is_hopeful(terms):
            return sequences
        self._probed = self._representative(sequences)
        return [s for s in sequences if s.grammar is not None or s is self._probed]

    def is_worth_asking(self, sequence: Sequence, name: str, terms: Terms) -> bool:
        """Return whether the next draft may be worth a slot, or it is time to see for oneself."""
        if not terms.least_survival or sequence is self._probed:
            return True
        if not self._turn % HOPELESS_TURNS:
            return True
        first = self._scores.foreseen(sequence, name).survivals[0]
        return sequence.weight * first > terms.least_survival

    def be_quiet(self, sequences: int, terms: Terms) -> None:
        """Ask nobody while the terms are the same, until it is time to: nobody was worth it.

        Nothing is learned from those who are not asked, so nothing changes.
        """
        if terms.least_survival is not None:
            turns = self._turns(sequences, terms)
            rested = [until + 1 for _, until in self._resting.values() if until >= self._turn]
            self._quiet = terms
            self._quiet_until = min([self._turn + turns - self._turn % turns, *rested])

    def paying(self, name: str, requests: list[DraftRequest], terms: Terms) -> list[DraftRequest]:
        """Return for whom a proposer is to look drafts up; nobody if it does not pay for all.

        What a look-up for a sequence is expected to bring over the price, found or not, must exceed
        what it takes at the rate of the step; what is left of that, summed over all, must exceed
        what any look-up takes. Now and then that does not matter.
        """
        cost = terms.drafting
        if terms.least_survival is None or not (cost.look_up_s or cost.sequence_s):
            return requests
        if not self._turn % self._turns(len(requests), terms):
            return requests
        each, once = cost.sequence_s * terms.tokens_per_s, cost.look_up_s * terms.tokens_per_s
        paying, together, gains = [], 0.0, self._gains[name]
        for request in requests:
            sequence = request.sequence
            expected = gains.expected(self._scores.last_outcome(sequence, name))
            gain = sequence.weight * expected - each
            if gain > 0.0:
                paying.append(request)
                together += gain
        return paying if together > once else []

    def learn(self, name: str, sequence: Sequence, survivals: Many[float], terms: Terms) -> None:
        """Learn what a look-up found: the survivals of its slots, none if there was nothing."""
        price = terms.price / sequence.weight
        gain = sum([survival - price for survival in survivals if survival > price])
        self._gains[name].observe(self._scores.last_outcome(sequence, name), gain)

    def may_pay(
        self, name: str, requests: list[DraftRequest], depth_s: float, terms: Terms
    ) -> bool:
        """Return whether a first token for all of them can be worth the time it takes to compute.

        If it is not, no depth is: each brings less than the one before. And what was not used in a
        step will hardly be in the next ones.
        """
        if terms.least_survival is None:
            return True
        if self._turn <= self._resting.get(name, (0, 0))[1]:
            return False
        worth = 0.0
        for request in requests:
            sequence = request.sequence
            worth += sequence.weight * self._scores.foreseen(sequence, name).survivals[0]
        least_s = depth_s + terms.drafting.calling_s(name, len(requests))
        return worth >= least_s * terms.tokens_per_s

    def rest(self, name: str) -> None:
        """Let a proposer that computes rest: it was offered, and nobody used it."""
        rested, _ = self._resting.get(name, (RESTING_TURNS // 2, 0))
        turns = min(2 * rested, MOST_RESTING_TURNS)
        self._resting[name] = turns, self._turn + turns

    def wake(self, name: str) -> None:
        """Let a proposer rest no longer: it was used."""
        self._resting.pop(name, None)

    def _is_hopeful(self, terms: Terms) -> bool:
        """Return whether a slot could pay if the evidence for it were the best there is."""
        for name, looks_up in self.looks_up.items():
            best = self._scores.best_found(name) if looks_up else self._scores.best_foreseen(name)
            if terms.least_survival is None or terms.most_weight * best > terms.least_survival:
                return True
        return False

    def _representative(self, sequences: Many[Sequence]) -> Sequence | None:
        """Return the sequence that stands for all in this step, if one does: the oldest."""
        if not self.looks_up or self._turn % PROBED_TURNS:
            return None
        self._scores.refresh()  # what probes teach is little, and all there is
        may = (sequence for sequence in sequences if sequence.pace is Pace.FULL)
        return min(may, key=lambda sequence: sequence.key, default=None)

    def _turns(self, sequences: int, terms: Terms) -> int:
        """Return in how many steps the time is put by to look up for so many sequences.

        A power of two up to `PROBED_TURNS`; `HOPELESS_TURNS` where looking up takes no time.
        """
        cost_s = terms.drafting.look_up_s + sequences * terms.drafting.sequence_s
        saved_s, turns = LOOKED_UP_SHARE * terms.step_s, 1 if cost_s else HOPELESS_TURNS
        while turns < PROBED_TURNS and turns * saved_s < cost_s:
            turns *= 2
        return turns
