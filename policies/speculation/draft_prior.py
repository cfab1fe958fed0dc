"""The acceptance of draft tokens before a worker has verified any, fitted to recorded drafts.

The log odds that a token is accepted, given all tokens before it, are a sum of effects: of the
evidence of the draft or the end of the sequence's last draft, of the position of the token, and of
the temperature. `draftgate bench priors` fits them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftgate.policies.speculation.survival import (
    AGREEMENT_ROWS,
    EVIDENCE_EDGES,
    POSITIONS,
)

BAND_ENDS: Final = (0.0, 0.85)
"""Highest temperature of each band before the last. Greedy texts have a band of their own."""

BAND_TEMPERATURES: Final = (0.0, 0.7, 1.0)
"""Temperature for which each band's prior is computed: the usual ones of clients."""

LONGEST_MATCH: Final = 32
"""Length of the longest match that is evidence (`engine.proposers.ngram_lookup`)."""

USUAL_MATCH: Final = 2
"""Length that is assumed for a match without evidence."""

MOST_CERTAIN: Final = 0.998
"""Highest confidence of a model that counts. Its log odds would be infinite at 1."""


class PriorEffects(NamedTuple):
    """Effects on the log odds of acceptance.

    Attributes:
        matches: whether the evidence is the length of a match, rather than a model's confidence.
        strength: effect of the evidence: of twice the length, or of the log odds of the confidence.
        agreement: effect of each row of agreement (`survival.AGREEMENT_EDGES`). The first one is
            that of a single match, and includes the constant term.
        depth: effect of twice the position, with the evidence of the draft.
        temperature: effect of a temperature of 1, with the evidence of the draft.
        outcomes: effect of each end of the last draft (`survival.outcome_row`).
        outcome_depth, outcome_temperature: as above, without the evidence of the draft.
    """

    matches: bool
    strength: float
    agreement: tuple[float, ...]
    depth: float
    temperature: float
    outcomes: tuple[float, ...]
    outcome_depth: float
    outcome_temperature: float


class DraftPrior(NamedTuple):
    """Log odds of acceptance in the rows of `survival.SurvivalModel`, or None if unknown.

    Attributes:
        by_evidence: [`survival.EVIDENCE_ROWS`, `survival.POSITIONS`].
        by_outcome: [`survival.OUTCOME_ROWS`, `survival.POSITIONS`].
    """

    by_evidence: NDArray[np.float64] | None = None
    by_outcome: NDArray[np.float64] | None = None


UNKNOWN: Final = DraftPrior()
"""The prior of a source whose drafts were never recorded."""


DRAFT_MODEL: Final = PriorEffects(
    matches=False,
    strength=0.17,
    agreement=(0.89,) * AGREEMENT_ROWS,
    depth=0.06,
    temperature=-0.09,
    outcomes=(-0.69, 0.45, 0.55, 0.67, 0.77, 0.84, 1.22),
    outcome_depth=0.19,
    outcome_temperature=-0.15,
)

_NGRAM: Final = PriorEffects(
    matches=True,
    strength=0.44,
    agreement=(-0.08, -0.47, -0.34, 0.13, 0.0, 0.42),
    depth=0.34,
    temperature=-0.37,
    outcomes=(-0.19, -0.96, -0.73, -0.31, -0.29, -0.47, 0.77),
    outcome_depth=1.02,
    outcome_temperature=-0.54,
)

EFFECTS: Final = MappingProxyType(
    {
        "ngram": _NGRAM,
        "prediction": _NGRAM,
        "draft_model": DRAFT_MODEL,
        "eagle": DRAFT_MODEL,
        "sparse_self": PriorEffects(
            matches=False,
            strength=0.09,
            agreement=(2.77,) * AGREEMENT_ROWS,
            depth=-0.01,
            temperature=-0.93,
            outcomes=(2.46, 2.05, 2.73, 1.86, 2.56, 2.65, 2.68),
            outcome_depth=0.09,
            outcome_temperature=-0.9,
        ),
    }
)
"""Effects by proposer (`draftgate bench priors`, 2026-11-28). Most recorded drafts of a model are
from an EAGLE head. A prediction starts as an n-gram draft, because whether models follow it was
recorded for one model only. Other sources start with a probability of one half."""


def temperature_band(temperature: float) -> int:
    """Return the number of the band of temperatures, from 0, whose drafts are counted together."""
    return bisect_left(BAND_ENDS, temperature)


@cache
def draft_prior(source: str, band: int) -> DraftPrior:
    """Return the prior of the drafts of a source in a band of temperatures."""
    effects, temperature = EFFECTS.get(source), BAND_TEMPERATURES[band]
    if effects is None:
        return UNKNOWN
    strengths = [strength(row, matches=effects.matches) for row in range(len(EVIDENCE_EDGES) + 1)]
    rows = [
        effects.strength * strong + agreed + effects.temperature * temperature
        for strong, agreed in product(strengths, effects.agreement)
    ]
    outcomes = [effect + effects.outcome_temperature * temperature for effect in effects.outcomes]
    return DraftPrior(_deepen(rows, effects.depth), _deepen(outcomes, effects.outcome_depth))


def strength(row: int, *, matches: bool) -> float:
    """Return the strength of the evidence in a row of `survival.EVIDENCE_EDGES`.

    Args:
        matches: whether the evidence is the length of a match, rather than a model's confidence.

    Returns:
        The logarithm of the length to the base 2, or the log odds of the confidence.
    """
    edges = (0, *EVIDENCE_EDGES, 1000)
    if matches:
        return math.log2(min(edges[row] or USUAL_MATCH, LONGEST_MATCH))
    chance = min(max((edges[row] + edges[row + 1]) / 2000, 1.0 - MOST_CERTAIN), MOST_CERTAIN)
    return math.log(chance / (1.0 - chance))


def _deepen(rows: list[float], depth: float) -> NDArray[np.float64]:
    """Return the log odds of all positions from those of the first, [rows, positions]."""
    return np.array(rows)[:, None] + depth * np.log2(np.arange(1, POSITIONS + 1))
