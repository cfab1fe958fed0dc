"""Survival estimates of drafts by source and sequence, learned from every draft.

Drafts of texts with different temperatures are counted apart (`draft_prior.temperature_band`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import ge
from typing import Final

from msgspec import Struct

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.sequence import Sequence
from draftgate.policies.speculation.draft_prior import BAND_TEMPERATURES, draft_prior
from draftgate.policies.speculation.survival import (
    EVIDENCE_ROWS,
    FORGETTING,
    OUTCOME_ROWS,
    POSITIONS,
    RESTORED_SHARE,
    AcceptanceRate,
    RequestRecord,
    Row,
    SurvivalModel,
)
from draftgate.policies.speculation.table_counts import TableCounts

GRAMMAR: Final = "grammar"
"""Source of the drafts that a grammar forces."""


class ModelCounts(Struct, frozen=True, forbid_unknown_fields=True):
    """The counts of a source's drafts in a temperature band (`survival.SurvivalModel`)."""

    source: str
    band: int
    by_evidence: TableCounts
    by_outcome: TableCounts


class AcceptanceCounts(Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker has learned about the acceptance of drafts. It contains nothing of a text.

    Attributes:
        accepted, rejected: running counts of all sources (`survival.AcceptanceRate`).
        models: counts by source and temperature band.
    """

    accepted: float = 0.0
    rejected: float = 0.0
    models: tuple[ModelCounts, ...] = ()

    def check(self) -> None:
        """Check the counts.

        Raises:
            ValueError: a number is invalid, or a band or row is unknown.
        """
        if not all(0.0 <= number < math.inf for number in (self.accepted, self.rejected)):
            raise ValueError("counts of accepted and rejected tokens must be finite and at least 0")
        for model in self.models:
            if not 0 <= model.band < len(BAND_TEMPERATURES):
                raise ValueError(f"no temperature band {model.band}")
            model.by_evidence.check(EVIDENCE_ROWS, POSITIONS)
            model.by_outcome.check(OUTCOME_ROWS, POSITIONS)


class DraftScores:
    """Survival estimates of each source of drafts.

    Attributes:
        acceptance: running probability that a draft token is accepted, over all sources.
        models: estimates by source and temperature band.
    """

    def __init__(self) -> None:
        self.models: dict[tuple[str, int], SurvivalModel] = {}
        self.acceptance = AcceptanceRate(forgetting=FORGETTING)

    def best_found(self, source: str, bands: Iterable[int]) -> float:
        """Return the survival of a first token given the strongest evidence.

        Args:
            bands: temperature bands of the sequences.
        """
        return max([self._model(source, band).by_evidence.best_survival for band in bands])

    def best_predicted(self, source: str, bands: Iterable[int]) -> float:
        """Return the survival of a first token after the best outcome of the last draft.

        Args:
            bands: temperature bands of the sequences.
        """
        return max([self._model(source, band).by_outcome.best_survival for band in bands])

    def best_for(self, sequence: Sequence, source: str, *, looks_up: bool) -> float:
        """Return the survival of a sequence's first token with the strongest evidence."""
        model, record = self._model(source, sequence.draft_band), _record(sequence, source)
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
        return self._model(source, sequence.draft_band).next_draft(_record(sequence, source))

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
        record, survivals = _record(sequence, source), self._model(source, sequence.draft_band)
        if draft.distributions is None:
            survivals.add_draft(
                record, draft.evidence, accepted, rejected=rejected, agreement=draft.agreement
            )
        else:
            survivals.add_outcome(record, accepted, rejected=rejected)

    def learn_nothing_found(self, sequence: Sequence, source: str) -> None:
        """Learn that a source had no proposal."""
        model = self._model(source, sequence.draft_band)
        model.add_outcome(_record(sequence, source), 0, rejected=True)

    def refresh(self) -> None:
        """Apply everything learned so far to the estimates immediately."""
        for survivals in self.models.values():
            survivals.by_evidence.refresh()
            survivals.by_outcome.refresh()

    def _row(self, sequence: Sequence, source: str, draft: Draft) -> Row:
        record, survivals = _record(sequence, source), self._model(source, sequence.draft_band)
        if draft.distributions is None:
            return survivals.draft(record, draft.evidence, draft.agreement)
        return survivals.next_draft(record)

    def counts(self) -> AcceptanceCounts:
        """Return everything learned so far, for the next start of the worker."""
        return AcceptanceCounts(
            round(self.acceptance.accepted, 2),
            round(self.acceptance.rejected, 2),
            tuple(
                ModelCounts(*key, model.by_evidence.counts(), model.by_outcome.counts())
                for key, model in self.models.items()
            ),
        )

    def restore(self, counts: AcceptanceCounts) -> None:
        """Start from the checked counts of an earlier worker, with less weight."""
        self.acceptance.accepted = RESTORED_SHARE * counts.accepted
        self.acceptance.rejected = RESTORED_SHARE * counts.rejected
        for one in counts.models:
            model = self._model(one.source, one.band)
            model.by_evidence.restore(one.by_evidence)
            model.by_outcome.restore(one.by_outcome)

    def _model(self, source: str, band: int) -> SurvivalModel:
        # Do not use `setdefault`, which would create a table with every call.
        key = source, band
        survivals = self.models.get(key)
        if survivals is None:
            survivals = self.models[key] = SurvivalModel(*draft_prior(source, band))
        return survivals


def _record(sequence: Sequence, source: str) -> RequestRecord:
    record = sequence.draft_records.get(source)
    if record is None:
        record = sequence.draft_records[source] = RequestRecord()
    return record
