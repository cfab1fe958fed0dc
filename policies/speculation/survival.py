"""Survival: the probability that a draft slot, and every slot before it, is accepted.

Tables count how often the token at a position is accepted, given that all before it were. There are
two for each source of drafts: `by_evidence` for drafts that exist, and `by_outcome` for drafts that
are still to be computed, by how the sequence's last draft ended. Each request shifts its rows by
what became of its own drafts.

Brier scores on recorded drafts of held-out code, n-gram trees / the shipped draft model: one rate
for all 0.223 / 0.209; a rate for each request 0.168 / 0.177; by evidence and position 0.132 /
0.167, shifted for each request 0.130 / 0.159. Before drafting, by the last outcome and shifted:
0.138 / 0.174 (`bench/results/survival.json`, 2026-11-21).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

PRIOR_ACCEPTANCE: Final = 0.5
"""Acceptance assumed before any draft."""

PRIOR_WEIGHT: Final = 8.0
"""Weight of a coarse estimate in a finer one, in tokens: of all drafts in a row, of a row in each
position. (4 to 16 give the same Brier score within 0.002 on the recorded drafts.)"""

FORGETTING: Final = 0.998
"""Decay of the worker's running acceptance per draft: the last 500 drafts or so decide."""

HALF_LIFE_DRAFTS: Final = 8192
"""Drafts after which a table's counts weigh half. 40 rows of 16 positions need thousands of drafts,
while a request's own shift follows at once."""

POSITIONS: Final = 16
"""Positions with their own estimate; deeper ones count as the last."""

EVIDENCE_EDGES: Final = (
    *(1, 2, 3, 4, 6, 9, 13, 18, 32),
    *(64, 125, 250, 400, 550, 700, 800, 900, 960, 990),
)
"""Lower ends of the evidence of each row after the first. One scale serves both kinds: lengths of
matches end at 32, and a model's confidence is per mille, with finer rows where it is high."""

EVIDENCE_ROWS: Final = len(EVIDENCE_EDGES) + 1

LONG_RUN: Final = 4
"""From this many accepted tokens, outcomes differ only by whether a token was rejected."""

OUTCOME_ROWS: Final = LONG_RUN + 3

SHIFT_DEVIATION: Final = 0.5
"""Standard deviation of requests' shifts, in logits. (With 1 on the recorded drafts: 0.131 / 0.159
by evidence, 0.139 / 0.176 by last outcome.)"""

SHIFT_MEMORY: Final = 0.9
"""Decay of a request's information per draft: the last ten or so decide. (With 1, forecasts are no
better: 0.129 / 0.159; and texts change as they continue.)"""

SHIFT_STEP: Final = 0.25
MOST_SHIFT: Final = 3.0
"""Shifts are rounded to these steps, so that requests share computed rows."""


@dataclass(slots=True)
class AcceptanceRate:
    """Counts of accepted and rejected draft tokens, with forgetting.

    A draft is evidence up to its first rejected token, because slots after it were never tested. So
    `accepted / (accepted + rejected)` estimates the probability of a token given all before it.
    """

    forgetting: float = 1.0
    accepted: float = 0.0
    rejected: float = 0.0

    def add_draft(self, accepted: int, *, rejected: bool) -> None:
        """Count a draft: its accepted leading tokens, and whether the next one was rejected."""
        self.accepted = self.accepted * self.forgetting + accepted
        self.rejected = self.rejected * self.forgetting + rejected

    def rate(self, prior: float = PRIOR_ACCEPTANCE, weight: float = PRIOR_WEIGHT) -> float:
        """Return the acceptance, in (0, 1), shrunk toward `prior` by `weight` slots."""
        return (self.accepted + prior * weight) / (self.accepted + self.rejected + weight)


def evidence_row(evidence: int) -> int:
    """Return the row of drafts with that evidence."""
    return bisect_right(EVIDENCE_EDGES, evidence)


def outcome_row(accepted: int, *, rejected: bool) -> int:
    """Return the row of the draft after one with that outcome; row 0 is that of first drafts."""
    if accepted < LONG_RUN:
        return 1 + accepted
    return 1 + LONG_RUN + (not rejected)


class Row(NamedTuple):
    """The estimates for a draft, at a request's shift.

    Attributes:
        chances: for each position, the probability of its token given all before it.
        survivals: for each position, the probability of its token and all before it.
        surprises: for each number of accepted tokens, the sum of 1 - chance over them.
        information: for each number of tokens, the sum of chance x (1 - chance) over them.
    """

    chances: tuple[float, ...]
    survivals: tuple[float, ...]
    surprises: tuple[float, ...]
    information: tuple[float, ...]

    def of_length(self, length: int) -> tuple[float, ...]:
        """Return the survivals of a chain of that many tokens."""
        if length <= POSITIONS:
            return self.survivals[:length]
        last = self.chances[-1]
        more = accumulate([self.survivals[-1]] + [last] * (length - POSITIONS), mul)
        return (*self.survivals[:-1], *more)

    def chance(self, position: int) -> float:
        """Return the probability of the token at a position (from 0), given all before it."""
        return self.chances[min(position, POSITIONS - 1)]


@dataclass(slots=True)
class RequestShift:
    """By how much a request's tokens are likelier accepted than others', in logits.

    The posterior mode of a random effect in a logistic model, by one Newton step per draft.

    Attributes:
        shift: the estimate.
        information: inverse of its variance.
    """

    shift: float = 0.0
    information: float = SHIFT_DEVIATION**-2

    @property
    def level(self) -> int:
        """The shift in steps."""
        return round(self.shift / SHIFT_STEP)

    def add_draft(self, row: Row, accepted: int, *, rejected: bool) -> None:
        """Learn from a draft for which `row` was expected."""
        tested = min(accepted + rejected, POSITIONS)
        accepted = min(accepted, POSITIONS)
        gradient = row.surprises[accepted] - (row.chances[accepted] if tested > accepted else 0.0)
        forgotten = (1.0 - SHIFT_MEMORY) * SHIFT_DEVIATION**-2
        self.information = SHIFT_MEMORY * self.information + forgotten + row.information[tested]
        moved = self.shift + gradient / self.information
        self.shift = min(max(moved, -MOST_SHIFT), MOST_SHIFT)


class SurvivalTable:
    """Estimates by row and position, learned from verified drafts.

    Drafts are counted at once, but rows are recomputed only when a good part of them is new.

    Attributes:
        best_survival: survival of the first token in the best row, for a lucky request.
    """

    def __init__(self, rows: int) -> None:
        """Create a table with `PRIOR_ACCEPTANCE` everywhere."""
        self._accepted = np.zeros((rows, POSITIONS))
        self._rejected = np.zeros((rows, POSITIONS))
        self._new: list[tuple[int, int, bool]] = []
        self._drafts = 0.0
        self._cache: dict[tuple[int, int], Row] = {}
        self._recompute()

    def add_draft(self, row: int, accepted: int, *, rejected: bool) -> None:
        """Count a draft: its accepted leading tokens, and whether the next one was rejected."""
        self._new.append((row, accepted, rejected))
        if len(self._new) >= min(max(8.0, self._drafts / 8), 1024.0):
            self.refresh()

    def row(self, row: int, level: int = 0) -> Row:
        """Return the estimates of a row at a request's `RequestShift.level`."""
        found = self._cache.get((row, level))
        if found is None:
            found = self._cache[row, level] = _row(self._logits[row] + level * SHIFT_STEP)
        return found

    def refresh(self) -> None:
        """Apply all drafts counted so far."""
        if not self._new:
            return
        kept = 0.5 ** (len(self._new) / HALF_LIFE_DRAFTS)
        self._drafts = self._drafts * kept + len(self._new)
        self._accepted *= kept
        self._rejected *= kept
        rows, accepted, rejected = np.array(self._new).T
        self._new.clear()
        tested = np.arange(POSITIONS)
        np.add.at(self._accepted, rows, tested < accepted[:, None])
        np.add.at(self._rejected, rows, (tested == accepted[:, None]) & (rejected[:, None] > 0))
        self._recompute()

    def _recompute(self) -> None:
        self._logits = _logits(self._accepted, self._rejected)
        self._cache.clear()
        self.best_survival = _logistic(float(self._logits[:, 0].max()) + 2 * SHIFT_DEVIATION)


@dataclass(slots=True)
class RequestRecord:
    """What a request's own drafts of one source have shown.

    Attributes:
        by_evidence, by_outcome: its shifts of the two tables.
        last_outcome: row of its next draft in the table by outcome.
    """

    by_evidence: RequestShift = field(default_factory=RequestShift)
    by_outcome: RequestShift = field(default_factory=RequestShift)
    last_outcome: int = 0


class SurvivalModel:
    """The survivals of the drafts of one source.

    Attributes:
        by_evidence: estimates for drafts that exist, by their evidence.
        by_outcome: estimates for drafts that do not exist yet, by how the last one ended.
    """

    def __init__(self) -> None:
        self.by_evidence = SurvivalTable(EVIDENCE_ROWS)
        self.by_outcome = SurvivalTable(OUTCOME_ROWS)

    def draft(self, record: RequestRecord, evidence: int) -> Row:
        """Return the estimates for a draft with that evidence."""
        return self.by_evidence.row(evidence_row(evidence), record.by_evidence.level)

    def next_draft(self, record: RequestRecord) -> Row:
        """Return the estimates for the request's next draft, before it is computed."""
        return self.by_outcome.row(record.last_outcome, record.by_outcome.level)

    def add_draft(
        self, record: RequestRecord, evidence: int, accepted: int, *, rejected: bool
    ) -> None:
        """Learn from a draft, as in `AcceptanceRate.add_draft`."""
        expected = self.draft(record, evidence)
        record.by_evidence.add_draft(expected, accepted, rejected=rejected)
        self.by_evidence.add_draft(evidence_row(evidence), accepted, rejected=rejected)
        self.add_outcome(record, accepted, rejected=rejected)

    def add_outcome(self, record: RequestRecord, accepted: int, *, rejected: bool) -> None:
        """Learn from a draft whose evidence must not count, or that was not found at all.

        A draft that was not found counts as rejected: waiting for it was in vain as well.
        """
        record.by_outcome.add_draft(self.next_draft(record), accepted, rejected=rejected)
        self.by_outcome.add_draft(record.last_outcome, accepted, rejected=rejected)
        record.last_outcome = outcome_row(accepted, rejected=rejected)


def _logits(accepted: NDArray[np.float64], rejected: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log odds, each position shrunk to its row, and each row to all rows."""
    tested, weight = accepted + rejected, PRIOR_WEIGHT
    overall = (accepted.sum() + PRIOR_ACCEPTANCE * weight) / (tested.sum() + weight)
    rows = (accepted.sum(1) + overall * weight) / (tested.sum(1) + weight)
    chances = (accepted + rows[:, None] * weight) / (tested + weight)
    return np.asarray(np.log(chances) - np.log1p(-chances))


def _logistic(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit))


def _row(logits: NDArray[np.float64]) -> Row:
    chances = tuple(map(_logistic, logits.tolist()))
    return Row(
        chances,
        tuple(accumulate(chances, mul)),
        tuple(accumulate((1.0 - chance for chance in chances), initial=0.0)),
        tuple(accumulate((chance * (1.0 - chance) for chance in chances), initial=0.0)),
    )
