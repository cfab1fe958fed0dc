"""What drafts are worth: survivals by source and sequence, learned from every draft there was."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.sequence import Sequence
from draftgate.policies.survival import FORGETTING, Acceptance, RequestRecord, Row, Survivals

GRAMMAR: Final = "grammar"
"""The source of drafts that a grammar forces."""


class DraftScores:
    """The score of each source of drafts.

    Attributes:
        acceptance: running chance of a drafted token, over all sources.
    """

    def __init__(self) -> None:
        """Start without a record."""
        self._sources: dict[str, Survivals] = {}
        self.acceptance = Acceptance(forgetting=FORGETTING)

    def best_found(self, source: str) -> float:
        """Return the survival of a first token where there is the best evidence for it."""
        return self._source(source).found.best_survival

    def best_predicted(self, source: str) -> float:
        """Return the survival of a first token behind the best of last drafts."""
        return self._source(source).predicted.best_survival

    def found(
        self, sequence: Sequence, source: str, draft: Draft
    ) -> tuple[Draft, tuple[float, ...]]:
        """Return a draft, its best tokens first, with its survivals.

        Tokens that were drawn are evidence of themselves: where they come with their law, to be
        kept or not by p/q, their probability must not decide how many are verified (design,
        section 1), so what is known is what was known before they were drawn.
        """
        row = self._row(sequence, source, draft)
        if draft.is_chain and not draft.shares:
            return draft, row.of_length(len(draft))
        survivals = draft.survivals(row.chance)
        if all(after <= before for before, after in pairwise(survivals)):
            return draft, survivals
        order = sorted(range(len(draft)), key=lambda place: -survivals[place])
        return draft.select(order), tuple(survivals[place] for place in order)

    def predicted(self, sequence: Sequence, source: str) -> Row:
        """Return what is expected of a draft before it is there."""
        return self._source(source).of_predicted(_record(sequence, source))

    def last_outcome(self, sequence: Sequence, source: str) -> int:
        """Return how a sequence's last draft of a source ended (`survival.outcome_row`)."""
        return _record(sequence, source).last_outcome

    def learn(
        self, sequence: Sequence, source: str, draft: Draft, emitted: tuple[int, ...]
    ) -> None:
        """Learn from a draft and the tokens that came."""
        path = draft.accepted_places(emitted)
        agreed, rejected = len(path), draft.was_rejected(path, emitted)
        self.acceptance.observe(agreed, rejected=rejected)
        record, survivals = _record(sequence, source), self._source(source)
        if draft.distributions is None:
            survivals.learn(record, draft.evidence, agreed, rejected=rejected)
        else:
            survivals.learn_predicted(record, agreed, rejected=rejected)

    def learn_nothing_found(self, sequence: Sequence, source: str) -> None:
        """Learn that a source had nothing to propose."""
        self._source(source).learn_predicted(_record(sequence, source), 0, rejected=True)

    def refresh(self) -> None:
        """Let all that was learned count now."""
        for survivals in self._sources.values():
            survivals.found.refresh()
            survivals.predicted.refresh()

    def _row(self, sequence: Sequence, source: str, draft: Draft) -> Row:
        record, survivals = _record(sequence, source), self._source(source)
        if draft.distributions is None:
            return survivals.of_found(record, draft.evidence)
        return survivals.of_predicted(record)

    def _source(self, source: str) -> Survivals:
        found = self._sources.get(source)
        if found is None:
            found = self._sources[source] = Survivals()
        return found


def _record(sequence: Sequence, source: str) -> RequestRecord:
    found = sequence.draft_records.get(source)
    if found is None:
        found = sequence.draft_records[source] = RequestRecord()
    return found
