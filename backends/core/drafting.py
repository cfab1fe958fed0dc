"""Drafts of a step: who proposes what for which sequence, and what is learned from the outcome.

Proposers that look drafts up are asked first, and the policy shortens what they found; those that
compute drafts are asked for what the policy decided. What a grammar forces is proposed before
anything else, and what it forbids is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Final

from backends.core.drafts import ROOT, Draft, DraftRequest, Proposer
from backends.core.sequence import Sequence
from policies.survival import FORGETTING, Acceptance
from policies.types import DraftCandidate

GRAMMAR: Final = "grammar"
"""The source of drafts that a grammar forces."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a sequence could verify in the next step.

    Attributes:
        source: the proposer's name, or `GRAMMAR`.
        max_tokens: most slots it may take.
        draft: what was looked up; None if it is still to be computed.
        candidate: the offer, as a policy sees it.
    """

    sequence: Sequence
    source: str
    max_tokens: int
    draft: Draft | None
    candidate: DraftCandidate


class Drafting:
    """Asks proposers and keeps score of them. One step at a time: `offers`, `drafts`, `learn`."""

    def __init__(self, proposers: Mapping[str, Proposer]) -> None:
        """Start without a record. `proposers` are ordered, cheapest first."""
        self._proposers = proposers
        self._records: dict[str, Acceptance] = {}  # by source
        self._proposed: dict[int, tuple[str, Draft]] = {}  # in the planned step, by sequence key
        self.acceptance = Acceptance(forgetting=FORGETTING)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the proposers, cheapest first."""
        return tuple(self._proposers)

    def offers(self, sequences: Iterable[Sequence]) -> list[Offer]:
        """Return what can be verified for sequences that decode; begins a step."""
        self._proposed.clear()
        found: list[Offer] = []
        asked: dict[str, list[DraftRequest]] = {}
        for sequence in sequences:
            plan = sequence.request.speculation
            if sequence.grammar is None and (plan.proposer is None or not plan.max_draft_tokens):
                continue
            # The token sampled behind a draft is the last one that may be generated.
            most = min(plan.max_draft_tokens, sequence.remaining_tokens - 1)
            if most < 1:
                continue
            forced = () if sequence.grammar is None else sequence.grammar.forced(most)
            if forced:
                found.append(self._found(sequence, GRAMMAR, most, Draft(forced)))
            elif plan.proposer is not None and plan.proposer in self._proposers:
                asked.setdefault(plan.proposer, []).append(DraftRequest(sequence, most))
        for name, requests in asked.items():
            found.extend(self._ask(name, requests))
        return found

    def drafts(self, offers: Many[Offer], slots: Many[int]) -> dict[int, Draft]:
        """Return the drafts to verify by sequence key, laid out; nothing where there is none.

        Args:
            slots: most slots of each offer.
        """
        chosen: dict[int, Draft] = {}
        computed: dict[str, list[DraftRequest]] = {}
        for offer, most in zip(offers, slots, strict=True):
            if offer.draft is not None:
                self._proposed[offer.sequence.key] = offer.source, offer.draft
                chosen[offer.sequence.key] = offer.draft.first(most).laid_out()
            elif most:
                computed.setdefault(offer.source, []).append(DraftRequest(offer.sequence, most))
        for name, requests in computed.items():
            found = self._proposers[name].propose(requests)
            for request, draft in zip(requests, found, strict=True):
                legal = _legal(request.sequence, draft.first(request.max_tokens))
                self._proposed[request.sequence.key] = name, legal
                chosen[request.sequence.key] = legal.laid_out()
        return {key: draft for key, draft in chosen.items() if draft}

    def learn(self, sequence: Sequence, emitted: tuple[int, ...]) -> None:
        """Learn from the draft: from what was verified, and from what was merely offered.

        A draft that was not verified still agrees or not with the token that came, so a policy
        that stopped drafting notices when drafting would pay again.
        """
        proposed = self._proposed.get(sequence.key)
        if proposed is None or not proposed[1]:
            return
        source, draft = proposed
        path = draft.walk(emitted)
        refuted = draft.refutes(path, emitted)
        records = [self.acceptance, self._record(source)]
        if source != GRAMMAR:
            records.append(sequence.acceptance)
        for record in records:
            record.observe(len(path), refuted=refuted)

    def forget(self, sequence: Sequence) -> None:
        """Drop what proposers keep for a sequence; it has finished."""
        for proposer in self._proposers.values():
            proposer.forget(sequence)

    def _ask(self, name: str, requests: list[DraftRequest]) -> Iterable[Offer]:
        """Return the offers of one proposer, with drafts if looking them up is all they cost."""
        proposer = self._proposers[name]
        depth_s = proposer.depth_s(len(requests))
        if depth_s > 0.0:
            for request in requests:
                yield self._unknown(request, name, depth_s)
            return
        for request, draft in zip(requests, proposer.propose(requests), strict=True):
            legal = _legal(request.sequence, draft)
            if legal:
                yield self._found(request.sequence, name, request.max_tokens, legal)

    def _found(self, sequence: Sequence, source: str, most: int, draft: Draft) -> Offer:
        candidate = DraftCandidate(draft.survivals(self._chance(sequence, source)))
        return Offer(sequence, source, most, draft, candidate)

    def _unknown(self, request: DraftRequest, source: str, depth_s: float) -> Offer:
        """Return the offer of a chain that nobody has computed yet."""
        sequence, most = request.sequence, request.max_tokens
        survivals = Draft((0,) * most).survivals(self._chance(sequence, source))
        return Offer(sequence, source, most, None, DraftCandidate(survivals, depth_s))

    def _chance(self, sequence: Sequence, source: str) -> float:
        """Return the estimated chance of a token of that source, given all before it were right."""
        overall = self._record(source).rate()
        return overall if source == GRAMMAR else sequence.acceptance.rate(prior=overall)

    def _record(self, source: str) -> Acceptance:
        return self._records.setdefault(source, Acceptance(forgetting=FORGETTING))


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
