"""The choice of the proposers to call: the proposers whose expected gain exceeds their cost.

If no slot can be worth its price, no proposer is called. Sequences with poor drafts are tried only
occasionally, to detect a change. If all sequences have poor drafts, a single sequence represents
the batch. A step without calls costs no more than a step without proposers.

A proposer that is too expensive would never be noticed when it becomes worth its price.
`Exploration` therefore saves a bounded share of the step time and spends it on drafts of one token
by such proposers. These tokens are not verified, only compared with the token that follows.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from collections.abc import Sequence as Many
from typing import Final

from draftgate.backends.core.draft_scores import DraftScores
from draftgate.backends.core.drafts import PREDICTION
from draftgate.backends.core.proposer import DraftRequest, DraftTerms, Proposer
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.types import Pace
from draftgate.policies.costs.drafting_cost import DraftingCost
from draftgate.policies.speculation.lookup_gain import LookupGains

HOPELESS_STEPS: Final = 16
"""Steps between two trials of a sequence whose next draft is not worth a slot. If its text starts
to repeat, the worker notices this within 16 tokens, for a sixteenth of the lookups. All such
sequences are tried in the same step, because the first lookup of a step costs the most."""

LOOKUP_SHARE: Final = 0.02
"""Share of the step time for lookups that are not worth their time, which notice a change of the
text. In model time with frozen costs and lookups of 0.35 ms, 2% is 2.6% faster than 1%, and 4% is
5% faster (ten cells of code, prose and retrieval with 1 to 16 streams in turn, Zen 4, 2026-11-23).
More than 2% would also be lost where all drafts are wrong."""

RESTING_STEPS: Final = 8
MOST_RESTING_STEPS: Final = 64
"""Steps after which an unused computing proposer is offered again. The interval doubles each time,
up to 64, because the expected value changes slowly, over tens of drafts. A negative decision
takes 0.1 to 0.5 ms per step (batches of 8 and 256, one core, Zen 4, 2026-11-21)."""

PROBE_STEPS: Final = 64
"""Steps between two probes of a single sequence while no draft can be worth a slot. A lookup takes
7 to 10 microseconds in C, less than 1% of a step of 100 sequences (one core, Zen 4, 2026-11-22)."""

EXPLORED_SHARE: Final = 0.005
"""Share of the step time for exploring unused proposers: half of the one percent by which `auto`
may be slower than `off`. With steps of 10 ms and depths of 1 ms, one step in 20 explores."""

MOST_EXPLORED: Final = 16
TIMES_SINGLE: Final = 2.0
"""Most sequences for which an unused proposer drafts in one call, and the most seconds of the call,
as a multiple of those for one sequence. Drafts for several sequences read the weights once: for 16
sequences, `sparse_self` takes 1.15 times as long as for one (Llama-2-7B on 8 A100, simulated). With
one sequence per call, `auto` had not noticed after 1,900 steps that these drafts make a batch of 64
with 8,192 tokens each 1.7 times as fast (bench/results/speculation.md, 2026-11-27)."""

MOST_SAVED_STEPS: Final = 5.0
"""Limit of the saved time, in steps. Catching up with a long sequence may take several steps."""


class ProposerGate:
    """Decides in each step which proposers are called, and for which sequences.

    Attributes:
        looks_up: whether a lookup is the proposer's only cost, by proposer.
    """

    def __init__(self, proposers: Mapping[str, Proposer], scores: DraftScores) -> None:
        self.looks_up = {name: each.depth_s(1) <= 0.0 for name, each in proposers.items()}
        self._scores = scores
        self._step = 0
        self._probed: Sequence | None = None
        # For each unused proposer, the number of steps that it rests, and the last of these steps.
        self._resting: dict[str, tuple[int, int]] = {}
        self._quiet_terms: DraftTerms | None = None  # with these terms no proposer is called
        self._quiet_until = 0
        self._newest = -1  # key of the newest sequence at that time
        self._looked_up: list[tuple[str, int, int, float]] = []
        self._gains = {name: LookupGains() for name, looks_up in self.looks_up.items() if looks_up}

    def begin_step(
        self, sequences: Many[Sequence], terms: DraftTerms, *, may_skip: bool
    ) -> Many[Sequence]:
        """Begin a step, and return the sequences to draft for.

        The result includes all sequences with a grammar.

        Args:
            may_skip: whether the step may omit drafts. False if exploration needs the candidates.
        """
        self._step += 1
        self._probed = None
        quiet = terms is self._quiet_terms and sequences[-1].key == self._newest
        if may_skip and quiet and self._step < self._quiet_until:
            return ()
        self._quiet_terms = None
        if self._is_hopeful(sequences, terms):
            return sequences
        self._probed = self._representative(sequences)
        return [s for s in sequences if s.grammar is not None or s is self._probed]

    def admits_all(self, terms: DraftTerms) -> bool:
        """Return whether all sequences of the step may draft, because a check is due."""
        return not terms.least_survival or not self._step % HOPELESS_STEPS

    def may_be_worthwhile(self, sequence: Sequence, name: str, terms: DraftTerms) -> bool:
        """Return whether the sequence's next draft may be worth a slot."""
        if terms.least_survival is None or sequence is self._probed:
            return True
        first = self._scores.predicted(sequence, name).survivals[0]
        return sequence.weight * first > terms.least_survival

    def skip_coming_steps(self, sequences: Many[Sequence], terms: DraftTerms) -> None:
        """Skip drafting until the terms change, a sequence joins, or the next check is due.

        The method is called when no draft was worth its time. Skipped steps contain no information,
        so the expectations stay the same.
        """
        if terms.least_survival is not None:
            steps = self._check_interval(len(sequences), terms)
            rested = [until + 1 for _, until in self._resting.values() if until >= self._step]
            self._quiet_terms, self._newest = terms, sequences[-1].key
            self._quiet_until = min([self._step + steps - self._step % steps, *rested])

    def worthwhile_lookups(
        self, name: str, requests: list[DraftRequest], terms: DraftTerms
    ) -> list[DraftRequest]:
        """Return the requests for which a lookup is worth its time.

        The expected gain of a lookup must exceed its time at the long-run rate. The remaining gain
        of all lookups together must exceed their common cost, or the result is empty. When a check
        is due, the result is all requests.
        """
        cost = terms.drafting
        if terms.least_survival is None or not (cost.look_up_s or cost.sequence_s):
            return requests
        if not self._step % self._check_interval(len(requests), terms):
            return requests
        each, once = cost.sequence_s * terms.tokens_per_s, cost.look_up_s * terms.tokens_per_s
        paying, total, gains = [], 0.0, self._gains[name]
        for request in requests:
            sequence = request.sequence
            row = self._scores.last_outcome(sequence, name)
            expected = gains.expected(row, terms.price / sequence.weight)
            gain = sequence.weight * expected - each
            if gain > 0.0:
                paying.append(request)
                total += gain
        return paying if total > once else []

    def add_lookup(self, name: str, sequence: Sequence, terms: DraftTerms) -> None:
        """Record a lookup, whose gain `learn_gains` learns when the step's slots are chosen."""
        row = self._scores.last_outcome(sequence, name)
        self._looked_up.append((name, sequence.key, row, terms.price / sequence.weight))

    def learn_gains(self, gains: Mapping[tuple[str, int], float]) -> None:
        """Learn the gains of the step's lookups.

        Args:
            gains: tokens of the sequence that its draft adds beyond the cost of its slots, by
                proposer and sequence key. Lookups without an entry gained nothing.
        """
        for name, key, row, price in self._looked_up:
            self._gains[name].add_lookup(row, price, gains.get((name, key), 0.0))
        self._looked_up.clear()

    def may_pay(
        self, name: str, requests: list[DraftRequest], depth_s: float, terms: DraftTerms
    ) -> bool:
        """Return whether computing drafts for all requests can be worth the time.

        The gain of all depths together must exceed the cost of the call. Later depths gain less
        than earlier ones. An unused proposer rests, because the next steps will hardly use it
        either.
        """
        if terms.least_survival is None:
            return True
        if self._step <= self._resting.get(name, (0, 0))[1]:
            return False
        drafts = [
            (request.sequence.weight, self._scores.predicted(request.sequence, name).survivals)
            for request in requests
        ]
        missing = terms.drafting.calling_s(name, len(requests)) * terms.tokens_per_s
        for depth in range(max([request.max_tokens for request in requests])):
            gain = sum([weight * rates[depth] for weight, rates in drafts if depth < len(rates)])
            gain -= depth_s * terms.tokens_per_s
            missing -= gain
            if gain < 0.0 or missing <= 0.0:
                break
        return missing <= 0.0

    def rest(self, name: str) -> None:
        """Let a computing proposer rest after a step that offered it but did not use it."""
        rested, _ = self._resting.get(name, (RESTING_STEPS // 2, 0))
        steps = min(2 * rested, MOST_RESTING_STEPS)
        self._resting[name] = steps, self._step + steps

    def end_rest(self, name: str) -> None:
        """Offer a proposer in every step again after a step that used it."""
        self._resting.pop(name, None)

    def _is_hopeful(self, sequences: Many[Sequence], terms: DraftTerms) -> bool:
        """Return whether a slot could be worth its price with the best possible evidence."""
        least, scores = terms.least_survival, self._scores
        bands = {sequence.draft_band for sequence in sequences}
        for name, looks_up in self.looks_up.items():
            best_of = scores.best_found if looks_up else scores.best_predicted
            best = best_of(name, bands)
            hopeful = least is None or terms.most_weight * best > least
            if hopeful and (name != PREDICTION or any(s.has_prediction for s in sequences)):
                return True
        return False

    def _representative(self, sequences: Many[Sequence]) -> Sequence | None:
        """Return the oldest sequence if this step probes for the whole batch, else None."""
        if not self.looks_up or self._step % PROBE_STEPS:
            return None
        self._scores.refresh()  # probes are rare and the only evidence, so apply it now
        eligible = (sequence for sequence in sequences if sequence.pace is Pace.FULL)
        return min(eligible, key=lambda sequence: sequence.key, default=None)

    def _check_interval(self, sequences: int, terms: DraftTerms) -> int:
        """Return after how many steps all lookups together take `LOOKUP_SHARE` of the time.

        The result is a power of two up to `PROBE_STEPS`, or `HOPELESS_STEPS` if lookups take no
        time.
        """
        cost_s = terms.drafting.look_up_s + sequences * terms.drafting.sequence_s
        saved_s, steps = LOOKUP_SHARE * terms.step_s, 1 if cost_s else HOPELESS_STEPS
        while steps < PROBE_STEPS and steps * saved_s < cost_s:
            steps *= 2
        return steps


class Exploration:
    """Decides when an unused proposer drafts, and for which sequences, without randomness."""

    def __init__(self) -> None:
        self._saved_s = 0.0
        self._most_s = 0.0
        self._needed_s = 0.0  # seconds of the cheapest call at the last check
        self._candidates: dict[str, list[DraftRequest]] = {}  # by proposer

    def begin_step(self, step_s: float) -> None:
        """Begin a step of a predicted length and save its share."""
        self._candidates.clear()
        self._most_s = MOST_SAVED_STEPS * step_s
        self._saved_s = min(self._saved_s + EXPLORED_SHARE * step_s, self._most_s)

    def add_candidate(self, proposer: str, sequence: Sequence) -> None:
        """Add a sequence that the proposer could draft for."""
        self._candidates.setdefault(proposer, []).append(DraftRequest(sequence, 1))

    def charge_overrun(self, overrun_s: float) -> None:
        """Charge the time by which an exploring step exceeded its forecast."""
        self._saved_s -= max(overrun_s, 0.0)

    @property
    def is_due(self) -> bool:
        """Whether the saved time covers the cheapest call of the last check."""
        return 0.0 < self._needed_s <= self._saved_s

    @property
    def has_candidates(self) -> bool:
        """Whether a sequence is available, and the saved time may cover a draft for it."""
        return bool(self._candidates) and self._saved_s >= min(self._needed_s, self._most_s)

    def spend_on_unused(
        self, used: Container[str], proposers: Mapping[str, Proposer], cost: DraftingCost
    ) -> Iterator[tuple[str, list[DraftRequest]]]:
        """Yield the affordable calls of unused proposers, and subtract their cost."""
        needed_s = math.inf
        for name, requests in self._candidates.items():
            if name in used:
                continue
            explored, cost_s = self._cheap_call(name, requests, proposers[name], cost)
            needed_s = min(needed_s, cost_s)
            if cost_s <= self._saved_s:
                self._saved_s -= cost_s
                yield name, explored
        self._needed_s = needed_s if needed_s < math.inf else 0.0

    def _cheap_call(
        self, name: str, requests: list[DraftRequest], proposer: Proposer, cost: DraftingCost
    ) -> tuple[list[DraftRequest], float]:
        """Return the oldest sequences whose common call is cheap, and the seconds of the call."""
        oldest = sorted(requests, key=lambda request: request.sequence.key)[:MOST_EXPLORED]
        explored, catch_up_s, cost_s, most_s = 0, 0.0, 0.0, math.inf
        for request in oldest:
            catch_up_s += proposer.catch_up_s(request.sequence)
            calling_s = cost.calling_s(name, explored + 1)
            more_s = proposer.depth_s(explored + 1) + catch_up_s + calling_s
            if more_s > most_s:
                break
            explored, cost_s = explored + 1, more_s
            if explored == 1:
                most_s = max(more_s, min(TIMES_SINGLE * more_s, self._most_s))
        return oldest[:explored], cost_s
