"""The choice of a proposer for each sequence, if several can draft.

An existing draft is worth the sum of (weight x survival - price) over its slots. A draft that must
be computed is worth the same sum less its cost. All sequences that draft with the same proposer
share the cost of a depth. So a proposer drafts for the sequences that gain by it, to the depth that
is best for them together. Their gain must exceed the cost of drafting at the long-run rate.
`allocation` then chooses the slots to verify with the true staircase.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from draftgate.policies.types import DraftCandidate


def arbitrate(
    options: Sequence[Sequence[DraftCandidate]], price: float, tokens_per_s: float
) -> list[int]:
    """Return the index of the best candidate of each sequence.

    Args:
        options: candidates of each sequence, not empty.
        price: minimum expected gain of a slot, in weighted tokens.
        tokens_per_s: value of a second in weighted tokens.
    """
    choice = [0] * len(options)
    worth = np.zeros(len(options))
    for place, candidates in enumerate(options):
        for index, candidate in enumerate(candidates):
            value = _excess(candidate, price)[-1] if candidate.depth_s <= 0.0 else 0.0
            if value > worth[place]:
                choice[place], worth[place] = index, value
    calls = {c.depth_s: c.call_s for of_one in options for c in of_one if c.depth_s > 0.0}
    for depth_s in sorted(calls):
        places = [
            (place, index)
            for place, candidates in enumerate(options)
            for index, candidate in enumerate(candidates)
            if candidate.depth_s == depth_s
        ]
        excess = _excess_table([options[place][index] for place, index in places], price)
        starts = [options[place][index].start_s for place, index in places]
        excess -= tokens_per_s * np.array(starts)[:, None]
        gains = excess - worth[[place for place, _ in places]][:, None]
        depths = np.arange(gains.shape[1])
        together = np.maximum(gains, 0.0).sum(0) - tokens_per_s * depth_s * depths
        together[1:] -= tokens_per_s * calls[depth_s]
        depth = int(together.argmax())
        if together[depth] <= 0.0:
            continue
        for row, (place, index) in enumerate(places):
            if gains[row, depth] > 0.0:
                choice[place], worth[place] = index, excess[row, depth]
    return choice


def _excess(candidate: DraftCandidate, price: float) -> list[float]:
    """Return by how much the slots up to each depth, from 0, exceed the price."""
    weight = candidate.weight
    over = (max(weight * survival - price, 0.0) for survival in candidate.survivals)
    return list(accumulate(over, initial=0.0))


def _excess_table(candidates: Sequence[DraftCandidate], price: float) -> NDArray[np.float64]:
    """Return the result of `_excess` for each candidate, padded to the greatest length."""
    rows: dict[tuple[int, float], int] = {}
    distinct: list[list[float]] = []
    places = []
    for candidate in candidates:
        key = id(candidate.survivals), candidate.weight
        if key not in rows:
            rows[key] = len(distinct)
            distinct.append(_excess(candidate, price))
        places.append(rows[key])
    longest = max(map(len, distinct))
    table = np.array([row + row[-1:] * (longest - len(row)) for row in distinct])
    return np.asarray(table[places])
