"""The choice of draft slots that a step verifies: the slots that maximise expected tokens per time.

    (weight of the step + sum of weight x survival over chosen slots) / (T(step) + drafting)

T excludes the time of the step's prompts (`price`). Survivals do not rise along a draft, so the
best n slots are the n likeliest of all candidates, and always form prefixes of drafts. T is a
staircase, so a slot that is not worth its time alone may be worth it with the free slots after it.
Every n is therefore evaluated.

Drafting costs a forward pass for each depth, which all drafts of one proposer share. All depths are
tried up to the deepest one that could pay for itself. The choice is exact except for the cost to
begin drafting for a sequence. Sequences that are not worth this cost are omitted one by one.

The criterion is SmartSpec's goodput (arXiv 2406.14066) for each slot instead of for a common
length.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.speculation.price import few_slots_s, slots_s
from draftgate.policies.types import StepView

_Array = NDArray[np.float64]
Places = NDArray[np.intp]

FEW_SLOTS: Final = 128
"""Number of drafted slots up to which the choice uses no arrays. Array operations take a
microsecond or two each with warm caches. They take several times that between the steps of a
model, which evict all other data. Microseconds by number of slots, without / with arrays (one
core, Zen 5, 2026-11-22):

    slots          10         80          120
    warm caches     4 / 21    19 / 24     28 / 25
    cold caches    23 / 98    45 / 110    57 / 117
"""


def allocate(step: StepView, cost: StepCost) -> list[int]:
    """Return the draft length of each candidate that maximises the rate of the step.

    Ties prefer fewer slots, and the slots of earlier candidates.
    """
    offered = sum([len(candidate.survivals) for candidate in step.candidates])
    if offered <= FEW_SLOTS and all(
        candidate.depth_s <= 0.0 and candidate.start_s <= 0.0 for candidate in step.candidates
    ):
        return _allocate_few(step, cost)
    return _allocate_many(step, cost)


def _allocate_few(step: StepView, cost: StepCost) -> list[int]:
    """Return the best lengths of existing drafts."""
    values: list[float] = []
    owners: list[int] = []
    for owner, candidate in enumerate(step.candidates):
        survivals, weight = candidate.survivals, candidate.weight
        values += survivals if weight == 1.0 else [weight * survival for survival in survivals]
        owners += [owner] * len(survivals)
    lengths = [0] * len(step.candidates)
    most = min(step.slot_budget, len(values))
    if most <= 0:
        return lengths
    likeliest = sorted(range(len(values)), key=values.__getitem__, reverse=True)[:most]
    step_s = few_slots_s(step, cost, most)
    tokens = step.total_weight
    best_rate, best = tokens / step_s[0], 0
    for slots, place in enumerate(likeliest, 1):
        tokens += values[place]
        if tokens / step_s[slots] > best_rate:
            best_rate, best = tokens / step_s[slots], slots
    for place in likeliest[:best]:
        lengths[owners[place]] += 1
    return lengths


class _Slots(NamedTuple):
    """The offered slots: weight x survival, and the index of each slot's candidate."""

    values: _Array
    owners: Places

    def at(self, places: Places | NDArray[np.bool_] | slice) -> _Slots:
        return _Slots(self.values[places], self.owners[places])


class _Choice(NamedTuple):
    """The chosen slots, and their rate in tokens per second."""

    rate: float
    slots: _Slots


class _Drafting(NamedTuple):
    """A choice of depths to draft to.

    Attributes:
        most_rate: upper bound of the rate of any choice of its slots.
        seconds: seconds of drafting.
        drafted: whether each slot is drafted, in order of likelihood, or None if all are.
    """

    most_rate: float
    seconds: float
    drafted: NDArray[np.bool_] | None


class _Depth(NamedTuple):
    """A depth to which one proposer drafts.

    Attributes:
        worth: sum of weight x survival of its slots.
        seconds: seconds to call the proposer, begin the drafts, and compute all depths up to this
            one.
    """

    depth: int
    worth: float
    seconds: float


def _allocate_many(step: StepView, cost: StepCost) -> list[int]:
    """Return the best lengths of drafts, including drafts that are not computed yet."""
    survivals = [candidate.survivals for candidate in step.candidates]
    lengths = list(map(len, survivals))
    most = min(step.slot_budget, sum(lengths))
    if most <= 0:
        return [0] * len(lengths)
    values = np.fromiter(chain.from_iterable(survivals), np.float64, sum(lengths))
    weights = [candidate.weight for candidate in step.candidates]
    if weights.count(1.0) < len(weights):
        values *= np.repeat(weights, lengths)
    slots = _Slots(values, np.repeat(np.arange(len(lengths)), lengths))
    start_s = np.array([candidate.start_s for candidate in step.candidates])
    best = _best_choice(step, slots, slots_s(step, cost, most), start_s)
    chosen: list[int] = np.bincount(best.slots.owners, minlength=len(lengths)).tolist()
    return chosen


def _best_choice(step: StepView, slots: _Slots, step_s: _Array, start_s: _Array) -> _Choice:
    """Return the best slots, omitting candidates until all others are worth their start.

    Args:
        step_s: seconds of the step by number of slots.
        start_s: seconds to begin drafting for each candidate.
    """
    best = _Choice(step.total_weight / float(step_s[0]), slots.at(np.empty(0, np.intp)))
    begins = start_s > 0.0
    if not begins.any():
        return _best_drafting(step, slots, step_s, start_s, best)
    worth = np.bincount(slots.owners, slots.values, len(start_s))
    while True:
        out = begins & (worth <= best.rate * start_s)
        slots = slots.at(~out[slots.owners])
        choice = _best_drafting(step, slots, step_s, start_s, best)
        best = max(best, choice, key=lambda one: one.rate)
        chosen = choice.slots
        worth = np.bincount(chosen.owners, chosen.values, len(start_s))
        left = begins & (np.bincount(slots.owners, minlength=len(start_s)) > 0)
        if not np.any(left & (worth <= best.rate * start_s)):
            return best


def _best_drafting(
    step: StepView, slots: _Slots, step_s: _Array, start_s: _Array, best: _Choice
) -> _Choice:
    """Return the best depths and the chosen slots, if they are better than `best`."""
    order = np.argsort(-slots.values, kind="stable")
    likeliest = slots.at(order)
    weight = step.total_weight
    for drafting in _draftings(step, slots, order, start_s, float(step_s[0]), best.rate):
        if drafting.most_rate <= best.rate:
            break  # All later draftings have a lower bound too.
        offered = likeliest if drafting.drafted is None else likeliest.at(drafting.drafted)
        rates = weight + np.cumsum(offered.values[: len(step_s) - 1])
        rates /= step_s[1 : len(rates) + 1] + drafting.seconds
        last = int(rates.argmax()) if len(rates) else 0
        if len(rates) and rates[last] > best.rate:
            best = _Choice(float(rates[last]), offered.at(slice(last + 1)))
    return best


def _draftings(
    step: StepView, slots: _Slots, order: Places, start_s: _Array, step_s: float, rate: float
) -> Iterator[_Drafting]:
    """Yield every choice of depths that could be worth its time, the most promising first.

    Args:
        order: indices of the slots in order of likelihood.
        step_s: seconds of the step without drafts.
        rate: rate of the best choice so far. A depth is excluded if its slots together are worth
            less than its time at this rate.
    """
    calls = {c.depth_s: c.call_s for c in step.candidates if c.depth_s > 0.0}
    costs = sorted(calls)
    if not costs:
        yield _Drafting(np.inf, 0.0, None)
        return
    values, owners = slots
    depth_s = np.array([candidate.depth_s for candidate in step.candidates])[owners]
    depths = np.arange(len(owners)) - np.searchsorted(owners, owners) + 1
    free = depth_s <= 0.0
    groups = [
        _depths_that_may_pay(depth_s == cost_s, depths, slots, start_s, cost_s, calls[cost_s], rate)
        for cost_s in costs
    ]
    plans = []
    for chosen in product(*groups):
        worth = step.total_weight + float(values[free].sum()) + sum(d.worth for d in chosen)
        draft_s = sum(d.seconds for d in chosen)
        plans.append((worth / (step_s + draft_s), draft_s, [d.depth for d in chosen]))
    plans.sort(key=itemgetter(0), reverse=True)
    free, depths = free[order], depths[order]
    of_group = [(depth_s == cost_s)[order] for cost_s in costs]
    for most_rate, draft_s, chosen_depths in plans:
        drafted = free.copy()
        for group, depth in zip(of_group, chosen_depths, strict=True):
            drafted |= group & (depths <= depth)
        yield _Drafting(most_rate, draft_s, drafted)


def _depths_that_may_pay(
    group: NDArray[np.bool_],
    depths: Places,
    slots: _Slots,
    start_s: _Array,
    depth_s: float,
    call_s: float,
    rate: float,
) -> list[_Depth]:
    """Return the depths, from 0, to which candidates with the same depth cost may draft."""
    by_depth = np.bincount(depths[group], slots.values[group], 1)
    paying = np.flatnonzero(by_depth >= depth_s * rate)
    deepest = int(paying[-1]) if len(paying) else 0
    begin_s = call_s + float(start_s[np.unique(slots.owners[group])].sum())
    worth = np.cumsum(by_depth).tolist()
    return [
        _Depth(depth, worth[depth], depth * depth_s + (begin_s if depth else 0.0))
        for depth in range(deepest + 1)
    ]
