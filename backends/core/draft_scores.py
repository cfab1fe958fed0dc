"""Survival estimates of drafts by source and sequence, learned from every draft."""

from __future__ import annotations

from operator import ge
from typing import Final

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.sequence import Sequence
from draftgate.policies.speculation.survival import (
    FORGETTING,
    AcceptanceRate,
    RequestRecord,
    Row,
    SurvivalModel,
)

GRAMMAR: Final = "grammar"
"""Source of the drafts that a grammar forces."""


class DraftScores:
    """Survival estimates of each source of drafts.

    Attributes:
        acceptance: running probability that a draft token is accepted, over all sources.
    """

    def __init__(self) -> None:
        self._sources: dict[str, SurvivalModel] = {}
        self.acceptance = AcceptanceRate(forgetting=FORGETTING)

    def best_found(self, source: str) -> float:
        """Return the survival of a first token given the strongest evidence."""
        return self._source(source).by_evidence.best_survival

    def best_predicted(self, source: str) -> float:
        """Return the survival of a first token after the best outcome of the last draft."""
        return self._source(source).by_outcome.best_survival

    def best_for(self, sequence: Sequence, source: str, *, looks_up: bool) -> float:
        """Return the survival of a sequence's first token with the strongest evidence."""
        model, record = self._source(source), _record(sequence, source)
        if looks_up:
            return model.by_evidence.best_for(record.by_evidence)
        return model.by_outcome.best_for(record.by_outcome)

    def found(
        self, sequence: Sequence, source: str, draft: Draft
    ) -> tuple[Draft, tuple[float, ...]]:
        """Return a draft and its survivals, with the best tokens first.

        A sampled token is accepted with probability p/q. Its own probability must not affect how
        many tokens are verified, so its survivals use only information from before the sampling.
        """
        row = self._row(sequence, source, draft)
        if not draft.parents and not draft.shares:
            return draft, row.of_length(len(draft.token_ids))
        survivals = draft.survivals(row.chances)
        if all(map(ge, survivals, survivals[1:])):
            return draft, survivals
        # A stable order in which no token precedes its parent.
        order = sorted(range(len(survivals)), key=survivals.__getitem__, reverse=True)
        return draft.select(order), tuple([survivals[place] for place in order])

    def predicted(self, sequence: Sequence, source: str) -> Row:
        """Return the expected survivals of a draft that is not computed yet."""
        return self._source(source).next_draft(_record(sequence, source))

    def last_outcome(self, sequence: Sequence, source: str) -> int:
        """Return how a sequence's last draft of a source ended (`survival.outcome_row`)."""
        record = sequence.draft_records.get(source)
        return 0 if record is None else record.last_outcome

    def learn(
        self, sequence: Sequence, source: str, draft: Draft, emitted: tuple[int, ...]
    ) -> None:
        """Learn from a draft and the tokens that followed."""
        places = draft.accepted_places(emitted)
        accepted, rejected = len(places), draft.was_rejected(places, emitted)
        self.acceptance.add_draft(accepted, rejected=rejected)
        record, survivals = _record(sequence, source), self._source(source)
        if draft.distributions is None:
            survivals.add_draft(
                record, draft.evidence, accepted, rejected=rejected, agreement=draft.agreement
            )
        else:
            survivals.add_outcome(record, accepted, rejected=rejected)

    def learn_nothing_found(self, sequence: Sequence, source: str) -> None:
        """Learn that a source had no proposal."""
        self._source(source).add_outcome(_record(sequence, source), 0, rejected=True)

    def refresh(self) -> None:
        """Apply everything learned so far to the estimates immediately."""
        for survivals in self._sources.values():
            survivals.by_evidence.refresh()
            survivals.by_outcome.refresh()

    def _row(self, sequence: Sequence, source: str, draft: Draft) -> Row:
        record, survivals = _record(sequence, source), self._source(source)
        if draft.distributions is None:
            return survivals.draft(record, draft.evidence, draft.agreement)
        return survivals.next_draft(record)

    def _source(self, source: str) -> SurvivalModel:
        # Do not use `setdefault`, which would create a table with every call.
        survivals = self._sources.get(source)
        if survivals is None:
            survivals = self._sources[source] = SurvivalModel()
        return survivals


def _record(sequence: Sequence, source: str) -> RequestRecord:
    record = sequence.draft_records.get(source)
    if record is None:
        record = sequence.draft_records[source] = RequestRecord()
    return record
