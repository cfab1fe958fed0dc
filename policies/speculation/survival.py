"""Survival: the probability that a draft slot, and every slot before it, is accepted.

Tables count how often the token at a position is accepted, given that all previous tokens were.
Each source of drafts has two tables. `by_evidence` is for existing drafts. `by_outcome` is for
drafts that are not computed yet, by the end of the sequence's last draft. Each request shifts its
rows by the results of its own drafts.

A table starts from a prior (`draft_prior`), or from the counts of an earlier worker with less
weight (`table_counts`).

Brier scores on recorded drafts of held-out code (`bench/results/survival.json`, 2026-11-21):

    estimate                                  n-gram trees    shipped draft model
    one rate for all                          0.223           0.209
    a rate for each request                   0.168           0.177
    by evidence and position                  0.132           0.167
    the same, shifted for each request        0.130           0.159
    before drafting, by outcome and shift     0.138           0.174
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Final

import numpy as np
from numpy.typing import NDArray

from draftgate.policies.speculation.table_counts import TableCounts
from draftgate.policies.values import immutable

PRIOR_ACCEPTANCE: Final = 0.5
"""Running acceptance of a worker before its first draft. Plans of requests depend on it, but no
draft (`draft_forecast`)."""

_PRIOR_WEIGHT: Final = 8.0
"""Weight of a coarse estimate in a finer estimate, in tokens: of all drafts in a row, and of a row
in each position. (4 to 16 give the same Brier score within 0.002 on the recorded drafts.)"""

FITTED_WEIGHT: Final = 128.0
"""Weight of a fitted prior in the offsets from it, in tokens. The drafts of a text resemble each
other, so the first text of a worker says little about the next one. (Brier score of the first token
after 1, 4 and 16 texts of Llama-3.1-8B, on others of the tuning half: 0.189, 0.169, 0.164 with a
weight of 8, and 0.175, 0.168, 0.164 with 512. With 512, however, a price of 0.4 keeps drafts that
are always right from their slots for more than 50 steps, 2026-11-28.)"""

FORGETTING: Final = 0.998
"""Decay of the worker's running acceptance per draft, which averages about the last 500 drafts."""

RESTORED_DRAFTS: Final = 1024
RESTORED_SHARE: Final = 0.5
"""Most drafts, and largest share of the drafts, of an earlier worker that still count. The texts of
a worker may differ from those before its start. (Chosen: an eighth of what a table holds in the
long run, 2026-11-28.)"""

OFFSET_STEPS: Final = 8
MOST_OFFSET_STEP: Final = 1.5
"""Newton steps for an offset from the prior, and the longest of them in logits. Eight reach the
offset within 0.01 if all of 4,000 tokens contradict a prior of 0.05. (Computed, 2026-11-28.)"""

_HALF_LIFE_DRAFTS: Final = 8192
"""Number of drafts after which a table's counts weigh half. 40 rows of 16 positions need thousands
of drafts, while a request's own shift follows immediately."""

POSITIONS: Final = 16
"""Number of positions with their own estimate. Deeper positions count as the last."""

EVIDENCE_EDGES: Final = (
    *(1, 2, 3, 4, 6, 9, 13, 18, 32),
    *(64, 125, 250, 400, 550, 700, 800, 900, 960, 990),
)
"""Lower ends of the evidence of each row after the first. A single scale serves both kinds of
evidence. Match lengths end at 32. A model's confidence is per mille, with finer rows where it is
high."""

AGREEMENT_EDGES: Final = (1, 251, 501, 751, 1000)
"""Lower ends of the agreement of each row after the first, per mille; see `evidence_row`.

Net tokens per position at prices of 0.2 / 0.35 / 0.5 on held-out texts of Llama-3.1-8B: 1.08 / 0.61
/ 0.31 by match length alone, 1.13 / 0.67 / 0.34 with these rows. 11 rows in place of 5 add nothing,
and a neural network on nine features has 1.18 / 0.70 / 0.38 (2026-11-22)."""

AGREEMENT_ROWS: Final = len(AGREEMENT_EDGES) + 1

EVIDENCE_ROWS: Final = (len(EVIDENCE_EDGES) + 1) * AGREEMENT_ROWS

LONG_RUN: Final = 4
"""Number of accepted tokens from which outcomes differ only by whether a token was rejected."""

OUTCOME_ROWS: Final = LONG_RUN + 3

SHIFT_DEVIATION: Final = 0.5
"""Standard deviation of requests' shifts, in logits. (With 1 on the recorded drafts: 0.131 / 0.159
by evidence, 0.139 / 0.176 by last outcome. 0.25 gains more on recorded texts, as in the table of
`SHIFT_MEMORY`, but a request whose drafts are nearly always wrong then keeps its lookups, if equal
evidence is right in other requests.)"""

SHIFT_MEMORY: Final = 0.97
"""Decay of a request's information per draft, which averages about the last thirty.

A policy verifies the slots with the highest estimates, and these are too high more often than not.
Uncertain shifts cost more in drafts than in Brier scores. Gain in tokens per time in percent, at a
price of 0.35 (`draftgate bench evidence`, 2026-11-28):

    deviation, memory, half     Llama-3.1-8B: chat, math    SmolLM2: temperature 0, 0.7, 1
    0.5, 0.9, tuning            7.8, 6.5                    19.8, 12.9, 6.4
    0.5, 0.97, tuning           8.2, 7.0                    20.5, 13.4, 6.6
    0.25, 0.97, tuning          8.9, 7.2                    21.2, 14.5, 7.1
    0.5, 0.9, held-out          6.9, 6.1                    21.9, 14.4, 8.0
    0.5, 0.97, held-out         7.5, 6.3                    22.2, 14.9, 8.5
"""

SHIFT_STEP: Final = 0.25
MOST_SHIFT: Final = 3.0
"""Step to which shifts are rounded, and their maximum, in logits, so that requests share rows."""

_LEVELS: Final = 2 * round(MOST_SHIFT / SHIFT_STEP) + 1
"""Number of levels of a shift."""

LEAST_COUNT: Final = 0.01
"""Least number of tested tokens of a row that `TableCounts` contain."""

_FORGOTTEN: Final = (1.0 - SHIFT_MEMORY) * SHIFT_DEVIATION**-2
"""Information of the prior that replaces what a draft makes a request forget."""


@dataclass(slots=True)
class AcceptanceRate:
    """Counts of accepted and rejected draft tokens, with forgetting.

    A draft is evidence up to its first rejected token, because later slots were never tested. So
    `accepted / (accepted + rejected)` estimates the probability of a token given all previous
    tokens.
    """

    forgetting: float = 1.0
    accepted: float = 0.0
    rejected: float = 0.0

    def add_draft(self, accepted: int, *, rejected: bool) -> None:
        """Count a draft by its accepted tokens and whether the next token was rejected."""
        self.accepted = self.accepted * self.forgetting + accepted
        self.rejected = self.rejected * self.forgetting + rejected

    def rate(self, prior: float = PRIOR_ACCEPTANCE, weight: float = _PRIOR_WEIGHT) -> float:
        """Return the acceptance, in (0, 1), shrunk toward `prior` by `weight` slots."""
        return (self.accepted + prior * weight) / (self.accepted + self.rejected + weight)


def evidence_row(evidence: int, agreement: int = 0) -> int:
    """Return the row of drafts with this evidence.

    Args:
        evidence: strength of the proposal on the proposer's own scale.
        agreement: weighted share, per mille, of earlier matches that continue with the first
            drafted token; 0 if there was only one match, or the proposer compares none.
    """
    strength = bisect_right(EVIDENCE_EDGES, evidence)
    return strength * AGREEMENT_ROWS + bisect_right(AGREEMENT_EDGES, agreement)


def outcome_row(accepted: int, *, rejected: bool) -> int:
    """Return the row of the draft after a draft with this outcome.

    Row 0 is the row of first drafts.
    """
    if accepted < LONG_RUN:
        return 1 + accepted
    return 1 + LONG_RUN + (not rejected)


@immutable
class Row:
    """The estimates for a draft at a request's shift.

    Attributes:
        chances: probability of each position's token given all previous tokens, [positions].
        survivals: probability of each position's token and all previous tokens, [positions].
        surprises: sum of 1 - chance over the accepted tokens, by their number.
        information: sum of chance x (1 - chance) over the tokens, by their number.
    """

    chances: tuple[float, ...]
    survivals: tuple[float, ...]
    surprises: tuple[float, ...]
    information: tuple[float, ...]

    def of_length(self, length: int) -> tuple[float, ...]:
        """Return the survivals of a chain of `length` tokens."""
        if length <= POSITIONS:
            return self.survivals[:length]
        last = self.chances[-1]
        more = accumulate([self.survivals[-1]] + [last] * (length - POSITIONS), mul)
        return (*self.survivals[:-1], *more)


@dataclass(slots=True)
class RequestShift:
    """The difference between the acceptance of a request's tokens and that of others, in logits.

    The estimate is the posterior mode of a random effect in a logistic model, with one Newton step
    per draft.

    Attributes:
        shift: present estimate.
        information: inverse of its variance.
        level: the shift as a number of steps.
    """

    shift: float = 0.0
    information: float = SHIFT_DEVIATION**-2
    level: int = 0

    def add_draft(self, row: Row, accepted: int, *, rejected: bool) -> None:
        """Learn from a draft with the expected acceptance of `row`."""
        tested = accepted + rejected
        if tested > POSITIONS:
            tested, accepted = POSITIONS, min(accepted, POSITIONS)
        gradient = row.surprises[accepted] - (row.chances[accepted] if tested > accepted else 0.0)
        self.information = SHIFT_MEMORY * self.information + _FORGOTTEN + row.information[tested]
        shift = self.shift + gradient / self.information
        if not -MOST_SHIFT <= shift <= MOST_SHIFT:
            shift = math.copysign(MOST_SHIFT, shift)
        self.shift, self.level = shift, round(shift / SHIFT_STEP)


class SurvivalTable:
    """Estimates by row and position, learned from verified drafts.

    Each draft is counted immediately, but rows are recomputed only after many new drafts.

    Attributes:
        best_survival: survival of the first token in the best row, for a request with a high shift.
    """

    def __init__(
        self, rows: int, *, group: int = 1, prior: NDArray[np.float64] | None = None
    ) -> None:
        """Start from a prior.

        Args:
            group: number of consecutive rows whose offset from the prior is similar.
            prior: fitted log odds of each token, [rows, positions], or None for a probability of
                one half.
        """
        self._group = group
        self._weight = _PRIOR_WEIGHT if prior is None else FITTED_WEIGHT
        self._prior = np.zeros((rows, POSITIONS)) if prior is None else prior
        self._accepted = np.zeros((rows, POSITIONS))
        self._rejected = np.zeros((rows, POSITIONS))
        self._new: list[tuple[int, int, bool]] = []
        self._drafts = 0.0
        self._cache: dict[int, Row] = {}  # by row and level
        self._recompute()

    def add_draft(self, row: int, accepted: int, *, rejected: bool) -> None:
        """Count a draft by its accepted tokens and whether the next token was rejected."""
        self._new.append((row, accepted, rejected))
        if len(self._new) >= self._due:
            self.refresh()

    def row(self, row: int, level: int = 0) -> Row:
        """Return the estimates of a row at a request's `RequestShift.level`."""
        key = row * _LEVELS + level
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = _row((self._logits[row] + level * SHIFT_STEP).tolist())
        return found

    def best_for(self, shift: RequestShift) -> float:
        """Return the survival of a first token in the best row at the upper end of a shift."""
        return _logistic(self._best_logit + shift.shift + 2.0 * shift.information**-0.5)

    def counts(self) -> TableCounts:
        """Return the counts of all drafts so far."""
        self.refresh()
        rows = np.flatnonzero((self._accepted + self._rejected).sum(axis=1) >= LEAST_COUNT)
        accepted, rejected = self._accepted.round(2).tolist(), self._rejected.round(2).tolist()
        return TableCounts(
            round(self._drafts, 2),
            tuple((row, tuple(accepted[row]), tuple(rejected[row])) for row in rows.tolist()),
        )

    def restore(self, counts: TableCounts) -> None:
        """Start from the checked counts of an earlier table, with less weight."""
        share = min(RESTORED_SHARE, RESTORED_DRAFTS / max(counts.drafts, 1.0))
        self._drafts = share * counts.drafts
        for row, accepted, rejected in counts.rows:
            self._accepted[row, : len(accepted)] = share * np.array(accepted)
            self._rejected[row, : len(rejected)] = share * np.array(rejected)
        self._recompute()

    def refresh(self) -> None:
        """Apply all drafts that have been counted so far."""
        if not self._new:
            return
        kept = 0.5 ** (len(self._new) / _HALF_LIFE_DRAFTS)
        self._drafts = self._drafts * kept + len(self._new)
        self._accepted *= kept
        self._rejected *= kept
        rows, accepted, rejected = np.array(self._new).T
        self._new.clear()
        # Count the drafts by row and accepted tokens. The last column has longer runs.
        cells = rows * (POSITIONS + 1) + np.minimum(accepted, POSITIONS)
        shape = (len(self._accepted), POSITIONS + 1)
        ended = np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
        ended_wrong = np.bincount(cells[rejected > 0], minlength=ended.size).reshape(shape)
        # A position's token was accepted in the drafts that ended after it.
        self._accepted += ended[:, :0:-1].cumsum(axis=1)[:, ::-1]
        self._rejected += ended_wrong[:, :-1]
        self._recompute()

    def _recompute(self) -> None:
        self._logits = _logits(
            self._prior, self._weight, self._accepted, self._rejected, self._group
        )
        self._cache.clear()
        self._due = min(max(8.0, self._drafts / 8), 1024.0)
        self._best_logit = float(self._logits[:, 0].max())
        self.best_survival = _logistic(self._best_logit + 2 * SHIFT_DEVIATION)


@dataclass(slots=True)
class RequestRecord:
    """The results of a request's own drafts from one source.

    Attributes:
        by_evidence, by_outcome: shifts of the request in the two tables.
        last_outcome: row of its next draft in the table by outcome.
    """

    by_evidence: RequestShift = field(default_factory=RequestShift)
    by_outcome: RequestShift = field(default_factory=RequestShift)
    last_outcome: int = 0


class SurvivalModel:
    """The survivals of the drafts of one source, from a prior (`DraftPrior`) or one half.

    Attributes:
        by_evidence: estimates for existing drafts, by their evidence.
        by_outcome: estimates for future drafts, by the end of the last draft.
    """

    def __init__(
        self,
        by_evidence: NDArray[np.float64] | None = None,
        by_outcome: NDArray[np.float64] | None = None,
    ) -> None:
        self.by_evidence = SurvivalTable(EVIDENCE_ROWS, group=AGREEMENT_ROWS, prior=by_evidence)
        self.by_outcome = SurvivalTable(OUTCOME_ROWS, prior=by_outcome)

    def draft(self, record: RequestRecord, evidence: int, agreement: int = 0) -> Row:
        """Return the estimates for a draft with this evidence (`evidence_row`)."""
        row = evidence_row(evidence, agreement)
        return self.by_evidence.row(row, record.by_evidence.level)

    def next_draft(self, record: RequestRecord) -> Row:
        """Return the estimates for the request's next draft, before it is computed."""
        return self.by_outcome.row(record.last_outcome, record.by_outcome.level)

    def add_draft(
        self,
        record: RequestRecord,
        evidence: int,
        accepted: int,
        *,
        rejected: bool,
        agreement: int = 0,
    ) -> None:
        """Learn from a draft, as in `AcceptanceRate.add_draft`."""
        row, shift = evidence_row(evidence, agreement), record.by_evidence
        shift.add_draft(self.by_evidence.row(row, shift.level), accepted, rejected=rejected)
        self.by_evidence.add_draft(row, accepted, rejected=rejected)
        self.add_outcome(record, accepted, rejected=rejected)

    def add_outcome(self, record: RequestRecord, accepted: int, *, rejected: bool) -> None:
        """Learn from a draft without its evidence, or from a lookup that found no draft.

        A missing draft counts as rejected, because the step gained no token from it either.
        """
        row, shift = record.last_outcome, record.by_outcome
        shift.add_draft(self.by_outcome.row(row, shift.level), accepted, rejected=rejected)
        self.by_outcome.add_draft(row, accepted, rejected=rejected)
        record.last_outcome = outcome_row(accepted, rejected=rejected)


def _logits(
    prior: NDArray[np.float64],
    weight: float,
    accepted: NDArray[np.float64],
    rejected: NDArray[np.float64],
    group: int,
) -> NDArray[np.float64]:
    """Return the log odds of each row and position, shrunk toward the estimates of its group.

    Coarse estimates are offsets from the prior: of the table, of each group, and of each position
    of a group. So the differences that the prior states remain where there are few drafts.
    """
    shape = (-1, group, POSITIONS)
    logits, tested = prior.reshape(shape), (accepted + rejected).reshape(shape)
    accepted = accepted.reshape(shape)
    if not tested.any():
        return prior
    for axes in ((0, 1, 2), (1, 2), (1,))[: 3 if group > 1 else 2]:
        logits = logits + _offsets(logits, weight, accepted, tested, axes)
    chances = 1.0 / (1.0 + np.exp(-logits))
    chances = (accepted + chances * _PRIOR_WEIGHT) / (tested + _PRIOR_WEIGHT)
    return np.asarray((np.log(chances) - np.log1p(-chances)).reshape(-1, POSITIONS))


def _offsets(
    logits: NDArray[np.float64],
    weight: float,
    accepted: NDArray[np.float64],
    tested: NDArray[np.float64],
    axes: tuple[int, ...],
) -> NDArray[np.float64]:
    """Return what to add to the log odds along some axes, by the mode of a logistic model.

    An offset has a normal prior with the information of `weight` tokens of probability 1/2.
    """
    information, right = weight / 4.0, accepted.sum(axes, keepdims=True)
    offsets: NDArray[np.float64] = np.zeros(right.shape)
    for _ in range(OFFSET_STEPS):
        chances = 1.0 / (1.0 + np.exp(-(logits + offsets)))
        expected = tested * chances
        variance = (expected * (1.0 - chances)).sum(axes, keepdims=True)
        missing = right - expected.sum(axes, keepdims=True)
        step = (missing - information * offsets) / (variance + information)
        offsets += np.minimum(np.maximum(step, -MOST_OFFSET_STEP), MOST_OFFSET_STEP)
    return offsets


def _logistic(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit))


def _row(logits: list[float]) -> Row:
    chances = [1.0 / (1.0 + math.exp(-logit)) for logit in logits]
    return Row(
        tuple(chances),
        tuple(accumulate(chances, mul)),
        tuple(accumulate([1.0 - chance for chance in chances], initial=0.0)),
        tuple(accumulate([chance * (1.0 - chance) for chance in chances], initial=0.0)),
    )
