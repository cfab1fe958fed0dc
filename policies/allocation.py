"""Which draft slots a step verifies: those that maximise expected tokens by predicted time.

    (weight of the step + sum of weight x survival over chosen slots) / (T(step) + drafting)

Survivals do not rise along a draft, so the best set of n slots is the n likeliest, whosever they
are, and always consists of beginnings of drafts. T is a staircase: no slot pays alone where the
next ones are free, so every n is evaluated, not one slot after the other. Drafting costs a forward
pass for each depth, once for all who draft with the same proposer: depths are enumerated, as far
as the deepest one could pay.

This is SmartSpec's goodput (arXiv 2406.14066) for each slot instead of one length for all.
"""

from __future__ import annotations

from itertools import chain, product
from operator import attrgetter, mul
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.step_cost import StepCost
from policies.types import StepView

Array = NDArray[np.float64]
Places = NDArray[np.intp]

_LEAST_S: Final = 1e-9
"""Steps take at least so long: a device that is said to need no time has no best set."""


class _Slots(NamedTuple):
    """All slots on offer, candidate by candidate.

    Attributes:
        values: weight x survival.
        owners: place of the candidate.
    """

    values: Array
    owners: Places

    def where(self, kept: NDArray[np.bool_]) -> _Slots:
        return _Slots(self.values[kept], self.owners[kept])


class _Choice(NamedTuple):
    """The best number of some slots, the value of the last one, and the rate they give."""

    rate: float
    taken: int
    least: float
    slots: _Slots


def allocate(step: StepView, cost: StepCost) -> list[int]:
    """Return the draft length of each candidate that maximises the rate of the step.

    Among equals, fewer slots, and those of earlier candidates.
    """
    slots = _slots_of(step)
    most = min(step.slot_budget, len(slots.values))
    if most <= 0:
        return [0] * len(step.candidates)
    step_s = np.maximum(cost.slots_s(step.tokens, step.kv_tokens, step.sequences, most), _LEAST_S)
    offers = _by_depths(step, slots, step.total_weight / float(step_s[0]))
    choices = (_best_of(kept, step.total_weight, step_s, draft_s) for kept, draft_s in offers)
    return _lengths(max(choices, key=attrgetter("rate")), len(step.candidates))


def _slots_of(step: StepView) -> _Slots:
    survivals = [candidate.survivals for candidate in step.candidates]
    lengths = list(map(len, survivals))
    values = np.fromiter(chain.from_iterable(survivals), np.float64, sum(lengths))
    owners = np.repeat(np.arange(len(lengths)), lengths)
    weights = [candidate.weight for candidate in step.candidates]
    if weights.count(1.0) < len(weights):
        values *= np.repeat(weights, lengths)
    return _Slots(values, owners)


def _by_depths(step: StepView, slots: _Slots, rate: float) -> list[tuple[_Slots, float]]:
    """Return the slots on offer, and what drafting takes, for every choice of depths.

    Args:
        rate: what the step gives without drafts. The best one gives no less, so a depth whose
            slots together are worth less than its time at this rate pays in no case.
    """
    costs = sorted({c.depth_s for c in step.candidates if c.depth_s > 0.0})
    if not costs:
        return [(slots, 0.0)]
    owners = slots.owners
    depth_s = np.array([candidate.depth_s for candidate in step.candidates])[owners]
    depths = np.arange(len(owners)) - np.searchsorted(owners, owners) + 1
    groups = [depth_s == cost_s for cost_s in costs]
    reach = [
        _deepest(depths[group], slots.values[group], cost_s * rate)
        for group, cost_s in zip(groups, costs, strict=True)
    ]
    choices = []
    for deepest in product(*(range(most + 1) for most in reach)):
        kept = depth_s <= 0.0
        for group, depth in zip(groups, deepest, strict=True):
            kept |= group & (depths <= depth)
        choices.append((slots.where(kept), sum(map(mul, costs, deepest))))
    return choices


def _deepest(depths: Places, values: Array, least_value: float) -> int:
    """Return the deepest depth whose slots together are worth as much, 0 if none are."""
    paying = np.flatnonzero(np.bincount(depths, values) >= least_value)
    return int(paying[-1]) if len(paying) else 0


def _best_of(slots: _Slots, weight: float, step_s: Array, draft_s: float) -> _Choice:
    """Return the number of slots that gives the best rate; the likeliest are taken."""
    likeliest = np.sort(slots.values)[: -len(step_s) : -1]
    rates = np.empty(len(likeliest) + 1)
    rates[0] = weight
    np.cumsum(likeliest, out=rates[1:])
    rates[1:] += weight
    rates /= step_s[: len(rates)] + draft_s
    count = int(rates.argmax())
    least = float(likeliest[count - 1]) if count else 0.0
    return _Choice(float(rates[count]), count, least, slots)


def _lengths(choice: _Choice, candidates: int) -> list[int]:
    """Return how many of the chosen slots each candidate has."""
    if not choice.taken:
        return [0] * candidates
    values, owners = choice.slots
    above = owners[values > choice.least]
    ties = owners[values == choice.least][: choice.taken - len(above)]
    lengths: list[int] = np.bincount(np.concatenate((above, ties)), minlength=candidates).tolist()
    return lengths
