"""Collection of a step's drafts from proposers, and learning from their outcome.

Lookup proposers are called first, and the policy shortens their drafts. Computing proposers are
called with the length that the policy chose, and the policy may then drop part of the result.
Tokens that a grammar forces take precedence over any proposer. They compete only with lookups whose
drafts begin with them, and continue after them. Tokens that it forbids are removed.

`proposer_gate` decides beforehand which proposers are called at all.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from collections.abc import Sequence as Many

from draftgate.backends.core.draft_scores import GRAMMAR, DraftScores
from draftgate.backends.core.drafts import NO_DRAFT, PREDICTION, ROOT, Draft
from draftgate.backends.core.proposer import (
    NO_CANDIDATE,
    DraftOffer,
    DraftRequest,
    DraftTerms,
    Proposer,
)
from draftgate.backends.core.proposer_gate import Exploration, ProposerGate
from draftgate.backends.core.sequence import Sequence
from draftgate.policies.costs.drafting_cost import StepDrafting
from draftgate.policies.speculation.arbitration import arbitrate
from draftgate.policies.speculation.catching_up import CatchingUp, expected_tokens
from draftgate.policies.types import ANY_PROPOSER, DraftCandidate


class Drafting:
    """Calls proposers and scores their drafts, with `offers`, `compute` and `learn` in each step.

    Attributes:
        step_work: drafting work of the last step.
    """

    def __init__(self, proposers: Mapping[str, Proposer]) -> None:
        """Start without a record.

        Args:
            proposers: proposers, cheapest first. `PREDICTION` drafts only for sequences with a
                prediction.
        """
        self._proposers = proposers
        self._names = tuple([name for name in proposers if name != PREDICTION])
        self._scores = DraftScores()
        self._proposed: dict[int, list[tuple[str, Draft]]] = {}  # by sequence key
        self._gate = ProposerGate(proposers, self._scores)
        self._exploration = Exploration()
        looks_up = self._gate.looks_up
        self._catching_up = {name: CatchingUp() for name in proposers if not looks_up[name]}
        self.step_work = StepDrafting()

    @property
    def scores(self) -> DraftScores:
        """Survival estimates of the drafts."""
        return self._scores

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the proposers that draft for any sequence, cheapest first."""
        return self._names

    @property
    def acceptance(self) -> float:
        """Running probability that a draft token is accepted."""
        return self._scores.acceptance.rate()

    @property
    def explores(self) -> bool:
        """Whether `compute` may explore an unused proposer in this step."""
        return self._exploration.has_candidates

    def may_draft(self, sequences: Many[Sequence]) -> bool:
        """Return whether a proposer or a grammar may draft for any of these sequences."""
        return bool(self._proposers) or any(one.grammar is not None for one in sequences)

    def best_survival(self, sequence: Sequence) -> float | None:
        """Return the survival of a sequence's first draft token with the strongest evidence.

        The result is None if no proposer of the worker may draft for the sequence.
        """
        names = self._allowed_names(sequence)
        if not names:
            return None
        looks_up, best_for = self._gate.looks_up, self._scores.best_for
        return max([best_for(sequence, name, looks_up=looks_up[name]) for name in names])

    def offers(self, sequences: Many[Sequence], terms: DraftTerms) -> list[DraftOffer]:
        """Begin a step, and return at most one offer for each decoding sequence."""
        self._proposed.clear()
        self._exploration.begin_step(terms.step_s)
        self.step_work = StepDrafting()
        sequences = self._gate.begin_step(sequences, terms, may_skip=not self._exploration.is_due)
        if not sequences:
            return []
        found: dict[int, list[DraftOffer]] = {}
        for name, requests in self._requests(sequences, terms, found).items():
            for offer in self._offers_of(name, requests, terms):
                others = found.setdefault(offer.sequence.key, [])
                if not others or _may_compete(offer, others[0]):
                    others.append(offer)
        if found:
            self.step_work.weighed = len(found)
            return _choose(list(found.values()), terms)
        if (
            not self.step_work.looked_up
            and all(s.grammar is None for s in sequences)
            and any(_most_tokens(s) >= 1 for s in sequences)
        ):
            self._gate.skip_coming_steps(sequences, terms)
        return []

    def _requests(
        self, sequences: Many[Sequence], terms: DraftTerms, found: dict[int, list[DraftOffer]]
    ) -> dict[str, list[DraftRequest]]:
        """Return the sequences to call each proposer for.

        Args:
            found: gets the offers of forced tokens.
        """
        requested: dict[str, list[DraftRequest]] = {}
        looks_up = self._gate.looks_up
        admits_all, may_be_worthwhile = self._gate.admits_all(terms), self._gate.may_be_worthwhile
        for sequence in sequences:
            most = _most_tokens(sequence)
            if most < 1:
                continue
            forced = () if sequence.grammar is None else sequence.grammar.forced(most)
            if forced:
                found[sequence.key] = [self._found(sequence, GRAMMAR, Draft(forced))]
            for name in self._allowed_names(sequence):
                if not looks_up[name]:
                    if forced:
                        continue
                    self._exploration.add_candidate(name, sequence)
                if admits_all or may_be_worthwhile(sequence, name, terms):
                    requested.setdefault(name, []).append(DraftRequest(sequence, most))
        return requested

    def compute(
        self, offers: Many[DraftOffer], slots: Many[int], terms: DraftTerms
    ) -> list[DraftOffer]:
        """Return the offers with drafts that are at most as long as their slots.

        Args:
            slots: maximum number of slots of each offer.
        """
        if not offers and not self._exploration.has_candidates:
            return []
        requested: dict[str, list[DraftRequest]] = {}
        for offer, most in zip(offers, slots, strict=True):
            if offer.draft is None:
                wanted = requested.setdefault(offer.source, [])
                if most:
                    wanted.append(DraftRequest(offer.sequence, most))
        computed: dict[int, DraftOffer] = {}
        used = {name: requests for name, requests in requested.items() if requests}
        for name in requested:
            if name not in used:
                self._gate.rest(name)
        for name, requests in used.items():
            self._gate.end_rest(name)
            for offer in self._compute(name, requests):
                computed[offer.sequence.key] = offer
        for name, catching_up in self._catching_up.items():
            catching_up.end_step([request.sequence.key for request in used.get(name, ())])
        self._explore(used, terms)
        return [
            computed.get(offer.sequence.key) or _without_draft(offer)
            if offer.draft is None
            else offer.first(most)
            for offer, most in zip(offers, slots, strict=True)
        ]

    def observe_slots(
        self, offers: Many[DraftOffer], lengths: Many[int], slot_tokens: float
    ) -> None:
        """Learn the gains of the step's lookups from the chosen slots.

        Args:
            lengths: number of slots of each offer.
            slot_tokens: mean cost of a slot, in weighted tokens.
        """
        gains = {}
        for offer, length in zip(offers, lengths, strict=True):
            if length and offer.draft is not None:
                cost = length * slot_tokens / offer.candidate.weight
                gain = sum(offer.candidate.survivals[:length]) - cost
                gains[offer.source, offer.sequence.key] = gain
        self._gate.learn_gains(gains)

    def decline(self, offers: Many[DraftOffer]) -> None:
        """End a step that uses none of its offers, without calling a proposer that computes."""
        for name in dict.fromkeys(offer.source for offer in offers if offer.draft is None):
            self._gate.rest(name)

    def observe_host_time(self, host_s: float) -> None:
        """Learn the host time of the last step, including drafting."""
        if self.step_work.explored_s is not None:
            drafting_s = self.step_work.computed_s + self.step_work.explored_s
            self._exploration.charge_overrun(host_s - drafting_s)

    @property
    def has_proposed(self) -> bool:
        """Whether a sequence has drafts that `learn` compares with its next tokens."""
        return bool(self._proposed)

    def learn(self, sequence: Sequence, emitted: tuple[int, ...]) -> None:
        """Learn from the sequence's verified and unverified drafts.

        An unverified draft can also be compared with the token that followed. So a policy that has
        stopped drafting notices when drafts become worth their time again.
        """
        for source, draft in self._proposed.pop(sequence.key, ()):
            self._scores.learn(sequence, source, draft, emitted)

    def forget(self, sequence: Sequence) -> None:
        """Drop the proposers' state of a finished sequence."""
        for proposer in self._proposers.values():
            proposer.forget(sequence)

    def _allowed_names(self, sequence: Sequence) -> tuple[str, ...]:
        """Return the proposers that may draft for a sequence, cheapest first."""
        wanted, names = sequence.proposer, self._names
        if wanted is None:
            return ()
        if wanted != ANY_PROPOSER:
            names = (wanted,) if wanted in names else ()
        if sequence.has_prediction and PREDICTION in self._proposers:
            return (PREDICTION, *names)
        return names

    def _offers_of(
        self, name: str, requests: list[DraftRequest], terms: DraftTerms
    ) -> Iterable[DraftOffer]:
        """Yield the offers of one proposer, which contain drafts only for a lookup proposer."""
        proposer = self._proposers[name]
        if not self._gate.looks_up[name]:
            depth_s = proposer.depth_s(len(requests))
            if self._gate.may_pay(name, requests, depth_s, terms):
                call_s = terms.drafting.calling_s(name, len(requests))
                for request in requests:
                    yield self._uncomputed(request, name, depth_s, call_s)
            return
        requests = self._gate.worthwhile_lookups(name, requests, terms)
        if not requests:
            return
        self.step_work.looked_up += len(requests)
        add_lookup = self._gate.add_lookup
        for request, draft in zip(requests, proposer.propose(requests), strict=True):
            sequence = request.sequence
            legal = draft if sequence.grammar is None else legal_draft(sequence, draft)
            add_lookup(name, sequence, terms)
            if legal.token_ids:
                yield self._found(sequence, name, legal)
            else:
                self._scores.learn_nothing_found(sequence, name)

    def _compute(self, name: str, requests: list[DraftRequest]) -> Iterable[DraftOffer]:
        """Yield the drafts that a computing proposer finds."""
        proposer, step_work = self._proposers[name], self.step_work
        depth = max(request.max_tokens for request in requests)
        catch_up_s = sum([proposer.catch_up_s(request.sequence) for request in requests])
        step_work.computed_s += depth * proposer.depth_s(len(requests)) + catch_up_s
        step_work.called.append(name)
        step_work.computed += len(requests)
        drafts = proposer.propose(requests)
        for request, draft in zip(requests, drafts, strict=True):
            legal = legal_draft(request.sequence, draft.first(request.max_tokens))
            if legal:
                yield self._found(request.sequence, name, legal)

    def _explore(self, used: Container[str], terms: DraftTerms) -> None:
        """Draft one token with unused proposers, as far as the saved time allows."""
        cost = terms.drafting
        for name, requests in self._exploration.spend_on_unused(used, self._proposers, cost):
            calling_s = cost.calling_s(name, len(requests))
            self.step_work.explored_s = (self.step_work.explored_s or 0.0) + calling_s
            for _ in self._compute(name, requests):
                pass  # recorded in `_proposed`, from which `learn` takes it

    def _found(self, sequence: Sequence, source: str, draft: Draft) -> DraftOffer:
        draft, survivals = self._scores.found(sequence, source, draft)
        self._proposed.setdefault(sequence.key, []).append((source, draft))
        return DraftOffer(sequence, source, draft, DraftCandidate(survivals, 0.0, sequence.weight))

    def _uncomputed(
        self, request: DraftRequest, source: str, depth_s: float, call_s: float
    ) -> DraftOffer:
        """Return the offer of a chain that is not computed yet."""
        sequence = request.sequence
        survivals = self._scores.predicted(sequence, source).of_length(request.max_tokens)
        catching_up, catch_up_s = (
            self._catching_up[source],
            self._proposers[source].catch_up_s(sequence),
        )
        if catch_up_s <= depth_s:
            catching_up.add_offer(sequence.key)
        left = expected_tokens(sequence.output_tokens, sequence.remaining_tokens)
        start_s = catching_up.step_s(catch_up_s, left, 1.0 + sum(survivals))
        candidate = DraftCandidate(survivals, depth_s, sequence.weight, start_s, call_s)
        return DraftOffer(sequence, source, None, candidate)


def _most_tokens(sequence: Sequence) -> int:
    """Return the longest allowed draft, which is 0 for a slow reader and while drafting is off."""
    if sequence.pace or not sequence.drafting.on:
        return 0
    # The token sampled after the draft may be the last token of the output.
    return min(sequence.draft_cap, sequence.most_tokens - len(sequence.token_ids) - 1)


def _without_draft(offer: DraftOffer) -> DraftOffer:
    return DraftOffer(offer.sequence, offer.source, NO_DRAFT, NO_CANDIDATE)


def _may_compete(offer: DraftOffer, first: DraftOffer) -> bool:
    """Return whether an offer begins with the tokens of the first one, if a grammar forces them."""
    if first.source != GRAMMAR or first.draft is None:
        return True
    forced = first.draft.token_ids
    return offer.draft is not None and offer.draft.token_ids[: len(forced)] == forced


def _choose(options: list[list[DraftOffer]], terms: DraftTerms) -> list[DraftOffer]:
    """Return one offer of each sequence."""
    if max(map(len, options)) == 1:
        return [offers[0] for offers in options]
    candidates = [[offer.candidate for offer in offers] for offers in options]
    chosen = arbitrate(candidates, terms.price, terms.tokens_per_s)
    return [offers[index] for offers, index in zip(options, chosen, strict=True)]


def legal_draft(sequence: Sequence, draft: Draft) -> Draft:
    """Return the draft without the tokens that the sequence's grammar forbids."""
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
    return draft.select([place for place in paths if place != ROOT])
