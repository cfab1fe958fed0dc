"""Survival: the chance that a draft slot, and every slot before it, is accepted.

Tables count how often a token at a position was right given all before it were, by source of the
draft and by what is known of it: its evidence once it is there (`evidence_row`), or how the
sequence's last draft of that source ended while it is still to be made (`outcome_row`). What a
table says is shifted for each request by what came of its own drafts.

Brier scores of survivals on recorded drafts of held-out code, n-gram trees / the shipped draft
model (`python -m bench.engine.survival`, 2026-11-21): one rate for all 0.223 / 0.209; a
rate for each request 0.168 / 0.177; by evidence and position 0.132 / 0.167, shifted for each
request 0.130 / 0.159. Before drafting, by the last outcome and shifted: 0.138 / 0.174.
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
"""Acceptance assumed before anything was seen: neither hopeful nor hopeless."""

PRIOR_WEIGHT: Final = 8.0
"""Tokens an estimate weighs in the finer ones below it: all drafts of a source in those of a row,
these in one position's. (4 to 16 give the same Brier score within 0.002 on the recorded drafts.)"""

FORGETTING: Final = 0.998
"""Decay per observed draft of the worker's running acceptance: the last 500 drafts or so decide."""

HALF_LIFE_DRAFTS: Final = 8192
"""After so many drafts what a table has seen counts half: 40 rows of 16 positions want thousands to
be told apart, while a request's own shift follows at once."""

POSITIONS: Final = 16
"""Positions that are told apart; deeper ones are taken for the last."""

EVIDENCE_EDGES: Final = (
    *(1, 2, 3, 4, 6, 9, 13, 18, 32),
    *(64, 125, 250, 400, 550, 700, 800, 900, 960, 990),
)
"""Lower ends of the evidence that is told apart. Lengths of matches end at 32, and a model's
confidence is per mille, finer where it is sure: one scale serves both."""

EVIDENCE_ROWS: Final = len(EVIDENCE_EDGES) + 1

LONG_RUN: Final = 4
"""Agreed tokens from which last outcomes are not told apart, but for whether all of them agreed."""

OUTCOME_ROWS: Final = LONG_RUN + 3

SHIFT_DEVIATION: Final = 0.5
"""Standard deviation of a request's shift, in logits. (With 1 on the recorded drafts: 0.131 / 0.159
by evidence, 0.139 / 0.176 by last outcome.)"""

SHIFT_MEMORY: Final = 0.9
"""Share of a request's information that each draft leaves: the last ten or so decide. (With 1,
all of them alike, forecasts are no better: 0.129 / 0.159; and a text changes as it goes on.)"""

SHIFT_STEP: Final = 0.25
MOST_SHIFT: Final = 3.0
"""Shifts are rounded to these steps, so that rows are computed once for many requests."""


@dataclass(slots=True)
class Acceptance:
    """Counts of agreed and rejected draft tokens, with forgetting.

    A draft is evidence up to its first wrong token: slots behind it were never put to the test,
    so `agreed / (agreed + rejected)` estimates the chance of a token given all before it agreed.
    """

    forgetting: float = 1.0
    agreed: float = 0.0
    rejected: float = 0.0

    def observe(self, agreed: int, *, rejected: bool) -> None:
        """Count one draft: `agreed` leading tokens were right, the next was wrong if `rejected`."""
        self.agreed = self.agreed * self.forgetting + agreed
        self.rejected = self.rejected * self.forgetting + rejected

    def rate(self, prior: float = PRIOR_ACCEPTANCE, weight: float = PRIOR_WEIGHT) -> float:
        """Return the chance of a token, in (0, 1), shrunk toward `prior` by `weight` slots."""
        return (self.agreed + prior * weight) / (self.agreed + self.rejected + weight)


def evidence_row(evidence: int) -> int:
    """Return the row of drafts with that evidence."""
    return bisect_right(EVIDENCE_EDGES, evidence)


def outcome_row(agreed: int, *, rejected: bool) -> int:
    """Return the row of drafts behind one of which so many leading tokens agreed.

    Row 0 is that of a first draft.
    """
    if agreed < LONG_RUN:
        return 1 + agreed
    return 1 + LONG_RUN + (not rejected)


class Row(NamedTuple):
    """What a table says of a draft, for a request's shift.

    Attributes:
        chances: of each position, that its token is right if all before it are.
        survivals: of each position, that its token and all before it are right.
        surprises: of each count of agreed tokens, the sum of 1 - chance over them.
        informations: of each count of tokens, the sum of chance x (1 - chance) over them.
    """

    chances: tuple[float, ...]
    survivals: tuple[float, ...]
    surprises: tuple[float, ...]
    informations: tuple[float, ...]

    def of_length(self, length: int) -> tuple[float, ...]:
        """Return the survivals of a chain of so many tokens."""
        if length <= POSITIONS:
            return self.survivals[:length]
        last = self.chances[-1]
        more = accumulate([self.survivals[-1]] + [last] * (length - POSITIONS), mul)
        return (*self.survivals[:-1], *more)

    def chance(self, position: int) -> float:
        """Return the chance of a token, by its position from 0, whose past is right."""
        return self.chances[min(position, POSITIONS - 1)]


@dataclass(slots=True)
class RequestShift:
    """By how much a request's tokens are likelier right than others', in logits.

    The posterior mode of a random effect in a logistic model, by one Newton step for each draft.

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

    def learn(self, row: Row, agreed: int, *, rejected: bool) -> None:
        """Learn from a draft of which `row` was expected."""
        tested = min(agreed + rejected, POSITIONS)
        agreed = min(agreed, POSITIONS)
        gradient = row.surprises[agreed] - (row.chances[agreed] if tested > agreed else 0.0)
        forgotten = (1.0 - SHIFT_MEMORY) * SHIFT_DEVIATION**-2
        self.information = SHIFT_MEMORY * self.information + forgotten + row.informations[tested]
        moved = self.shift + gradient / self.information
        self.shift = min(max(moved, -MOST_SHIFT), MOST_SHIFT)


class SurvivalTable:
    """Chances by row and position, from drafts that were put to the test.

    Counted at once, computed now and then: rows stay the same until a good part is new.

    Attributes:
        best_survival: the chance of the first token where it is best: the best row and a lucky
            request.
    """

    def __init__(self, rows: int) -> None:
        """Start without a record, at `PRIOR_ACCEPTANCE` everywhere."""
        self._agreed = np.zeros((rows, POSITIONS))
        self._rejected = np.zeros((rows, POSITIONS))
        self._fresh: list[tuple[int, int, bool]] = []
        self._drafts = 0.0
        self._cache: dict[tuple[int, int], Row] = {}
        self._logits = _logits(self._agreed, self._rejected)
        self.best_survival = self._best_survival()

    def observe(self, row: int, agreed: int, *, rejected: bool) -> None:
        """Count one draft: `agreed` leading tokens were right, the next was wrong if `rejected`."""
        self._fresh.append((row, agreed, rejected))
        if len(self._fresh) >= min(max(8.0, self._drafts / 8), 1024.0):
            self.refresh()

    def row(self, row: int, level: int = 0) -> Row:
        """Return what is expected of a draft, for a request's `RequestShift.level`."""
        found = self._cache.get((row, level))
        if found is None:
            found = self._cache[row, level] = _row(self._logits[row] + level * SHIFT_STEP)
        return found

    def refresh(self) -> None:
        """Let rows tell of all drafts counted so far."""
        if not self._fresh:
            return
        kept = 0.5 ** (len(self._fresh) / HALF_LIFE_DRAFTS)
        self._drafts = self._drafts * kept + len(self._fresh)
        self._agreed *= kept
        self._rejected *= kept
        rows, agreed, rejected = np.array(self._fresh).T
        self._fresh.clear()
        tested = np.arange(POSITIONS)
        np.add.at(self._agreed, rows, tested < agreed[:, None])
        np.add.at(self._rejected, rows, (tested == agreed[:, None]) & (rejected[:, None] > 0))
        self._logits = _logits(self._agreed, self._rejected)
        self._cache.clear()
        self.best_survival = self._best_survival()

    def _best_survival(self) -> float:
        return _logistic(float(self._logits[:, 0].max()) + 2 * SHIFT_DEVIATION)


@dataclass(slots=True)
class RequestRecord:
    """What a request's own drafts of one source have shown.

    Attributes:
        found, predicted: its shifts of the two tables.
        last_outcome: row of its next draft in `predicted`.
    """

    found: RequestShift = field(default_factory=RequestShift)
    predicted: RequestShift = field(default_factory=RequestShift)
    last_outcome: int = 0


class Survivals:
    """What is known of the drafts of one source.

    Attributes:
        found: by the evidence of drafts that are there.
        predicted: of drafts that are still to be made, by how the request's last one ended.
    """

    def __init__(self) -> None:
        """Know nothing."""
        self.found = SurvivalTable(EVIDENCE_ROWS)
        self.predicted = SurvivalTable(OUTCOME_ROWS)

    def of_found(self, record: RequestRecord, evidence: int) -> Row:
        """Return what is expected of a draft with that evidence."""
        return self.found.row(evidence_row(evidence), record.found.level)

    def of_predicted(self, record: RequestRecord) -> Row:
        """Return what is expected of the request's next draft, before it is made."""
        return self.predicted.row(record.last_outcome, record.predicted.level)

    def learn(self, record: RequestRecord, evidence: int, agreed: int, *, rejected: bool) -> None:
        """Learn from a draft: `agreed` leading tokens were right, the next wrong if `rejected`."""
        record.found.learn(self.of_found(record, evidence), agreed, rejected=rejected)
        self.found.observe(evidence_row(evidence), agreed, rejected=rejected)
        self.learn_predicted(record, agreed, rejected=rejected)

    def learn_predicted(self, record: RequestRecord, agreed: int, *, rejected: bool) -> None:
        """Learn from a draft whose evidence is not to be known, or that was not even found.

        The latter counts as rejected: who waits for drafts waits in vain for those, too.
        """
        record.predicted.learn(self.of_predicted(record), agreed, rejected=rejected)
        self.predicted.observe(record.last_outcome, agreed, rejected=rejected)
        record.last_outcome = outcome_row(agreed, rejected=rejected)


def _logits(agreed: NDArray[np.float64], rejected: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log odds of counts, each shrunk to its row's, each row's to that of all."""
    tested, weight = agreed + rejected, PRIOR_WEIGHT
    overall = (agreed.sum() + PRIOR_ACCEPTANCE * weight) / (tested.sum() + weight)
    rows = (agreed.sum(1) + overall * weight) / (tested.sum(1) + weight)
    chances = (agreed + rows[:, None] * weight) / (tested + weight)
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
