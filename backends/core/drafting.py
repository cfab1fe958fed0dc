"""Drafts of a step: who proposes what for which sequence, and what is learned from the outcome.

Proposers that look drafts up are asked first, and the policy shortens what they found; those that
compute drafts are asked for what the policy decided, which may then drop some of it. What a grammar
forces is proposed before anything else, and what it forbids is cut.

Where no slot can pay, asking would be for nothing: sequences from which nothing is expected are
asked now and then, so that a change is noticed, and where nothing is expected from anybody, one
sequence stands for all.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from collections.abc import Sequence as Many
from typing import Final

from backends.core.draft_scores import GRAMMAR, DraftScores
from backends.core.drafts import NO_DRAFT, ROOT, Draft, DraftRequest, Proposer
from backends.core.exploration import Exploration
from backends.core.offers import Offer, Terms
from backends.core.sequence import Sequence
from backends.types import Pace
from policies.arbitration import arbitrate
from policies.types import ANY_PROPOSER, DraftCandidate

HOPELESS_TURNS: Final = 16
"""A sequence whose next draft is not worth a slot is asked for in each so many steps: where it
begins to repeat something it is noticed within as many tokens, for a sixteenth of the look-ups."""

RESTING_TURNS: Final = 8
"""A proposer that costs something, was offered and not taken by anybody, is offered again behind so
many steps: what is expected of it changes over tens of drafts, and to decide against it takes 0.1
to 0.5 ms of the host in every step (batches of 8 and 256, one core, Zen 4, 2026-11-21)."""

PROBED_TURNS: Final = 64
"""Where no draft of anybody can be worth a slot, one sequence is asked for in each so many steps. A
look-up takes 10 to 20 microseconds, so it adds less than 1% to a step of 100 (one core, Zen 4,
2026-11-21)."""


FIRST_TOKENS: Final = 64
TOKENS_PER_STEP: Final = 2.5
"""What a sequence is taken to go on for at first, and by how much in a step with drafts: half the
shortest outputs people ask for, and the middle of what drafts gave on held-out code (1.6 to 3.4,
docs/measurements/proposers.json). Catching up is spread over the steps they give."""


_NOTHING: Final = DraftCandidate(())


class Drafting:
    """Asks proposers and keeps score of them. One step at a time: `offers`, `compute`, `learn`."""

    def __init__(self, proposers: Mapping[str, Proposer]) -> None:
        """Start without a record. `proposers` are ordered, cheapest first."""
        self._proposers = proposers
        self._scores = DraftScores()
        self._turn = 0
        self._proposed: dict[int, list[tuple[str, Draft]]] = {}  # in this step, by sequence key
        self._resting: dict[str, int] = {}  # proposers, and the turn until which they are not asked
        self._exploration = Exploration()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the proposers, cheapest first."""
        return tuple(self._proposers)

    @property
    def acceptance(self) -> float:
        """Running chance of a drafted token."""
        return self._scores.acceptance.rate()

    def may_draft(self, sequence: Sequence) -> bool:
        """Return whether some proposer may draft for a sequence, now or later."""
        plan = sequence.request.speculation
        if plan.max_draft_tokens < 1 or plan.proposer is None:
            return False
        return (
            bool(self._proposers)
            if plan.proposer == ANY_PROPOSER
            else plan.proposer in self._proposers
        )

    def offers(self, sequences: Many[Sequence], terms: Terms) -> list[Offer]:
        """Return what can be verified for sequences that decode, one offer each; begins a step."""
        self._turn += 1
        self._proposed.clear()
        self._exploration.begin(terms.step_s)
        probed = None
        if not self._is_hopeful(terms):
            probed = self._probed(sequences)
            sequences = [s for s in sequences if s.grammar is not None or s is probed]
        found: dict[int, list[Offer]] = {}
        asked: dict[str, list[DraftRequest]] = {}
        for sequence in sequences:
            most = _most_tokens(sequence)
            if most < 1:
                continue
            forced = () if sequence.grammar is None else sequence.grammar.forced(most)
            if forced:
                found[sequence.key] = [self._found(sequence, GRAMMAR, Draft(forced))]
                continue
            for name in self._allowed(sequence, most):
                if sequence is probed or self._is_worth_asking(sequence, name, terms):
                    asked.setdefault(name, []).append(DraftRequest(sequence, most))
        for name, requests in asked.items():
            for offer in self._ask(name, requests, terms):
                found.setdefault(offer.sequence.key, []).append(offer)
        return _choose(list(found.values()), terms)

    def compute(self, offers: Many[Offer], slots: Many[int]) -> list[Offer]:
        """Return the offers with their drafts, none longer than its slots.

        Args:
            slots: most slots of each offer.
        """
        asked: dict[str, list[DraftRequest]] = {}
        for offer, most in zip(offers, slots, strict=True):
            if offer.draft is None:
                wanted = asked.setdefault(offer.source, [])
                if most:
                    wanted.append(DraftRequest(offer.sequence, most))
        for name in [name for name, requests in asked.items() if not requests]:
            self._resting[name] = self._turn + RESTING_TURNS
            del asked[name]
        computed: dict[int, Offer] = {}
        for name, requests in asked.items():
            for offer in self._compute(name, requests):
                computed[offer.sequence.key] = offer
        self._explore(used=asked.keys())
        return [
            computed.get(offer.sequence.key, _nothing(offer))
            if offer.draft is None
            else offer.first(most)
            for offer, most in zip(offers, slots, strict=True)
        ]

    def learn(self, sequence: Sequence, emitted: tuple[int, ...]) -> None:
        """Learn from the drafts: from what was verified, and from what was merely offered.

        A draft that was not verified still agrees or not with the token that came, so a policy
        that stopped drafting notices when drafting would pay again.
        """
        for source, draft in self._proposed.pop(sequence.key, ()):
            self._scores.learn(sequence, source, draft, emitted)

    def forget(self, sequence: Sequence) -> None:
        """Drop what proposers keep for a sequence; it has finished."""
        for proposer in self._proposers.values():
            proposer.forget(sequence)

    # --- who is asked -------------------------------------------------------------------------

    def _is_hopeful(self, terms: Terms) -> bool:
        """Return whether a slot could pay if the evidence for it were the best there is."""
        for name, proposer in self._proposers.items():
            is_free = proposer.depth_s(1) <= 0.0
            best = self._scores.best_found(name) if is_free else self._scores.best_foreseen(name)
            if terms.least_survival is None or terms.most_weight * best > terms.least_survival:
                return True
        return False

    def _probed(self, sequences: Many[Sequence]) -> Sequence | None:
        """Return the sequence that stands for all in this step, if one does: the oldest."""
        if not self._proposers or self._turn % PROBED_TURNS:
            return None
        self._scores.refresh()  # what probes teach is little, and all there is
        may = (sequence for sequence in sequences if sequence.pace is Pace.FULL)
        return min(may, key=lambda sequence: sequence.key, default=None)

    def _allowed(self, sequence: Sequence, most: int) -> Iterable[str]:
        """Return the proposers that may draft for a sequence."""
        wanted = sequence.request.speculation.proposer
        names = self._proposers if wanted == ANY_PROPOSER else (wanted,)
        for name in names:
            if name is not None and name in self._proposers:
                if self._proposers[name].depth_s(1) > 0.0:
                    self._exploration.note(name, DraftRequest(sequence, most))
                yield name

    def _is_worth_asking(self, sequence: Sequence, name: str, terms: Terms) -> bool:
        """Return whether the next draft may be worth a slot, or it is time to see for oneself."""
        if not terms.least_survival:
            return True
        if not (self._turn + sequence.key) % HOPELESS_TURNS:
            return True
        first = self._scores.foreseen(sequence, name).survivals[0]
        return sequence.weight * first > terms.least_survival

    def _may_pay(
        self, name: str, requests: list[DraftRequest], depth_s: float, terms: Terms
    ) -> bool:
        """Return whether a first token for all of them can be worth the time it takes.

        If it is not, no depth is: each brings less than the one before. And what was not used in a
        step will hardly be in the next ones.
        """
        if self._turn <= self._resting.get(name, 0):
            return False
        worth = 0.0
        for request in requests:
            sequence = request.sequence
            worth += sequence.weight * self._scores.foreseen(sequence, name).survivals[0]
        return worth >= depth_s * terms.tokens_per_s

    # --- what is found ------------------------------------------------------------------------

    def _ask(self, name: str, requests: list[DraftRequest], terms: Terms) -> Iterable[Offer]:
        """Return the offers of one proposer, with drafts if looking them up is all they cost."""
        proposer = self._proposers[name]
        depth_s = proposer.depth_s(len(requests))
        if depth_s > 0.0:
            if terms.least_survival is None or self._may_pay(name, requests, depth_s, terms):
                for request in requests:
                    yield self._unknown(request, name, depth_s)
            return
        for request, draft in zip(requests, proposer.propose(requests), strict=True):
            legal = _legal(request.sequence, draft)
            if legal:
                yield self._found(request.sequence, name, legal)
            else:
                self._scores.learn_nothing_found(request.sequence, name)

    def _compute(self, name: str, requests: list[DraftRequest]) -> Iterable[Offer]:
        """Return the drafts of a proposer that computes them, where there are any."""
        drafts = self._proposers[name].propose(requests)
        for request, draft in zip(requests, drafts, strict=True):
            legal = _legal(request.sequence, draft.first(request.max_tokens))
            if legal:
                yield self._found(request.sequence, name, legal)

    def _explore(self, used: Container[str]) -> None:
        """Draft a token of one sequence with what is not used, as often as it may cost."""
        for name, request in self._exploration.unused(used, self._proposers):
            for _ in self._compute(name, [request]):
                pass  # what came of it is learned

    def _found(self, sequence: Sequence, source: str, draft: Draft) -> Offer:
        draft, survivals = self._scores.found(sequence, source, draft)
        self._proposed.setdefault(sequence.key, []).append((source, draft))
        return Offer(sequence, source, draft, DraftCandidate(survivals, 0.0, sequence.weight))

    def _unknown(self, request: DraftRequest, source: str, depth_s: float) -> Offer:
        """Return the offer of a chain that nobody has computed yet."""
        sequence = request.sequence
        survivals = self._scores.foreseen(sequence, source).of_length(request.max_tokens)
        start_s = self._proposers[source].catch_up_s(sequence) / _steps_left(sequence)
        candidate = DraftCandidate(survivals, depth_s, sequence.weight, start_s)
        return Offer(sequence, source, None, candidate)


def _most_tokens(sequence: Sequence) -> int:
    """Return how long a draft of a sequence may be: nothing where it is to give way to others.

    The token sampled behind a draft is the last one that may be generated.
    """
    if sequence.pace:
        return 0
    return min(sequence.request.speculation.max_draft_tokens, sequence.remaining_tokens - 1)


def _steps_left(sequence: Sequence) -> float:
    """Return in how many steps catching up with a sequence can pay.

    It is expected to go on for as long as it has gone on, as lives of unknown law are (Lindy's
    rule), and some tokens more while that says little.
    """
    expected = min(sequence.remaining_tokens, FIRST_TOKENS + sequence.output_tokens)
    return max(expected / TOKENS_PER_STEP, 1.0)


def _nothing(offer: Offer) -> Offer:
    return Offer(offer.sequence, offer.source, NO_DRAFT, _NOTHING)


def _choose(options: list[list[Offer]], terms: Terms) -> list[Offer]:
    """Return one offer of each sequence."""
    if all(len(offers) == 1 for offers in options):
        return [offers[0] for offers in options]
    candidates = [[offer.candidate for offer in offers] for offers in options]
    chosen = arbitrate(candidates, terms.price, terms.tokens_per_s)
    return [offers[index] for offers, index in zip(options, chosen, strict=True)]


def _legal(sequence: Sequence, draft: Draft) -> Draft:
    """Return the draft without what the sequence's grammar forbids."""
    grammar = sequence.grammar
    if grammar is None or not draft:
        return draft
    if draft.is_chain:
        return draft.first(grammar.legal(draft.token_ids))
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    for place, token in enumerate(draft.token_ids):
        before = paths.get(draft.parent(place))
        if before is not None and grammar.legal((*before, token)) == len(before) + 1:
            paths[place] = (*before, token)
    return draft.pick([place for place in paths if place != ROOT])
