"""Drafts of a step: who proposes what for which sequence, and what is learned from the outcome.

Proposers that look drafts up are asked first, and the policy shortens what they found; those that
compute drafts are asked for what the policy decided, which may then drop some of it. What a grammar
forces is proposed before anything else, and what it forbids is cut.

Who is asked at all is decided before (`asking.py`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from collections.abc import Sequence as Many
from typing import Final

from draftgate.backends.core.asking import Asking
from draftgate.backends.core.draft_scores import GRAMMAR, DraftScores
from draftgate.backends.core.drafts import NO_DRAFT, ROOT, Draft, DraftRequest, Proposer
from draftgate.backends.core.exploration import Exploration
from draftgate.backends.core.offers import DraftOffer, Terms
from draftgate.backends.core.sequence import Sequence
from draftgate.policies.arbitration import arbitrate
from draftgate.policies.drafting_cost import StepDrafting
from draftgate.policies.types import ANY_PROPOSER, DraftCandidate

FIRST_TOKENS: Final = 64
TOKENS_PER_STEP: Final = 2.5
"""What a sequence is taken to go on for at first, and by how much in a step with drafts: half the
shortest outputs people ask for, and the middle of what drafts gave on held-out code (1.6 to 3.4,
bench/results/proposers.json). Catching up is spread over the steps they give."""


_NOTHING: Final = DraftCandidate(())


class Drafting:
    """Asks proposers and keeps score of them. One step at a time: `offers`, `compute`, `learn`.

    Attributes:
        did: what was done in the last step.
    """

    def __init__(self, proposers: Mapping[str, Proposer]) -> None:
        """Start without a record. `proposers` are ordered, cheapest first."""
        self._proposers = proposers
        self._scores = DraftScores()
        self._proposed: dict[int, list[tuple[str, Draft]]] = {}  # in this step, by sequence key
        self._asking = Asking(proposers, self._scores)
        self._exploration = Exploration()
        self.did = StepDrafting()

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

    def offers(self, sequences: Many[Sequence], terms: Terms) -> list[DraftOffer]:
        """Return what can be verified for sequences that decode, one offer each; begins a step."""
        self._proposed.clear()
        self._exploration.begin(terms.step_s)
        self.did = StepDrafting()
        sequences = self._asking.begin(sequences, terms, may_rest=not self._exploration.is_due)
        if not sequences:
            return []
        found: dict[int, list[DraftOffer]] = {}
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
                if self._asking.is_worth_asking(sequence, name, terms):
                    asked.setdefault(name, []).append(DraftRequest(sequence, most))
        for name, requests in asked.items():
            for offer in self._ask(name, requests, terms):
                found.setdefault(offer.sequence.key, []).append(offer)
        if found:
            self.did.weighed = len(found)
            return _choose(list(found.values()), terms)
        if not self.did.looked_up and all(each.grammar is None for each in sequences):
            self._asking.be_quiet(len(sequences), terms)
        return []

    def compute(self, offers: Many[DraftOffer], slots: Many[int], terms: Terms) -> list[DraftOffer]:
        """Return the offers with their drafts, none longer than its slots.

        Args:
            slots: most slots of each offer.
        """
        if not offers and not self._exploration.has_candidates:
            return []
        asked: dict[str, list[DraftRequest]] = {}
        for offer, most in zip(offers, slots, strict=True):
            if offer.draft is None:
                wanted = asked.setdefault(offer.source, [])
                if most:
                    wanted.append(DraftRequest(offer.sequence, most))
        for name in [name for name, requests in asked.items() if not requests]:
            self._asking.rest(name)
            del asked[name]
        computed: dict[int, DraftOffer] = {}
        for name, requests in asked.items():
            self._asking.wake(name)
            for offer in self._compute(name, requests):
                computed[offer.sequence.key] = offer
        self._explore(asked.keys(), terms)
        return [
            computed.get(offer.sequence.key, _nothing(offer))
            if offer.draft is None
            else offer.first(most)
            for offer, most in zip(offers, slots, strict=True)
        ]

    def took(self, host_s: float) -> None:
        """Learn what the host took of the last step, drafting included."""
        if self.did.explored_s is not None:
            self._exploration.took(host_s - self.did.computed_s - self.did.explored_s)

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

    def _allowed(self, sequence: Sequence, most: int) -> Iterable[str]:
        """Return the proposers that may draft for a sequence."""
        wanted = sequence.request.speculation.proposer
        names = self._proposers if wanted == ANY_PROPOSER else (wanted,)
        for name in names:
            if name is not None and name in self._proposers:
                if not self._asking.looks_up[name]:
                    self._exploration.note(name, DraftRequest(sequence, most))
                yield name

    # --- what is found ------------------------------------------------------------------------

    def _ask(self, name: str, requests: list[DraftRequest], terms: Terms) -> Iterable[DraftOffer]:
        """Return the offers of one proposer, with drafts if looking them up is all they cost."""
        proposer = self._proposers[name]
        if not self._asking.looks_up[name]:
            depth_s = proposer.depth_s(len(requests))
            if self._asking.may_pay(name, requests, depth_s, terms):
                call_s = terms.drafting.calling_s(name, len(requests))
                for request in requests:
                    yield self._unknown(request, name, depth_s, call_s)
            return
        requests = self._asking.paying(name, requests, terms)
        if not requests:
            return
        self.did.looked_up += len(requests)
        for request, draft in zip(requests, proposer.propose(requests), strict=True):
            legal = _legal(request.sequence, draft)
            if legal:
                offer = self._found(request.sequence, name, legal)
                self._asking.learn(name, request.sequence, offer.candidate.survivals, terms)
                yield offer
            else:
                self._asking.learn(name, request.sequence, (), terms)
                self._scores.learn_nothing_found(request.sequence, name)

    def _compute(self, name: str, requests: list[DraftRequest]) -> Iterable[DraftOffer]:
        """Return the drafts of a proposer that computes them, where there are any."""
        proposer, did = self._proposers[name], self.did
        depth = max(request.max_tokens for request in requests)
        behind_s = sum([proposer.catch_up_s(request.sequence) for request in requests])
        did.computed_s += depth * proposer.depth_s(len(requests)) + behind_s
        did.called.append(name)
        did.computed += len(requests)
        drafts = proposer.propose(requests)
        for request, draft in zip(requests, drafts, strict=True):
            legal = _legal(request.sequence, draft.first(request.max_tokens))
            if legal:
                yield self._found(request.sequence, name, legal)

    def _explore(self, used: Container[str], terms: Terms) -> None:
        """Draft a token of one sequence with what is not used, as often as it may cost."""
        for name, request in self._exploration.unused(used, self._proposers, terms.drafting):
            self.did.explored_s = (self.did.explored_s or 0.0) + terms.drafting.calling_s(name, 1)
            for _ in self._compute(name, [request]):
                pass  # what came of it is learned

    def _found(self, sequence: Sequence, source: str, draft: Draft) -> DraftOffer:
        draft, survivals = self._scores.found(sequence, source, draft)
        self._proposed.setdefault(sequence.key, []).append((source, draft))
        return DraftOffer(sequence, source, draft, DraftCandidate(survivals, 0.0, sequence.weight))

    def _unknown(
        self, request: DraftRequest, source: str, depth_s: float, call_s: float
    ) -> DraftOffer:
        """Return the offer of a chain that nobody has computed yet."""
        sequence = request.sequence
        survivals = self._scores.foreseen(sequence, source).of_length(request.max_tokens)
        start_s = self._proposers[source].catch_up_s(sequence) / _steps_left(sequence)
        candidate = DraftCandidate(survivals, depth_s, sequence.weight, start_s, call_s)
        return DraftOffer(sequence, source, None, candidate)


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


def _nothing(offer: DraftOffer) -> DraftOffer:
    return DraftOffer(offer.sequence, offer.source, NO_DRAFT, _NOTHING)


def _choose(options: list[list[DraftOffer]], terms: Terms) -> list[DraftOffer]:
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
