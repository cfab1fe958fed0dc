"""Which draft slots a step verifies: those that maximise expected tokens by predicted time.

    (weight of the step + sum of weight x survival over chosen slots) / (T(step) + drafting)

T leaves out what the step's prompts take (`price`). Survivals do not rise along a draft,
so the best set of n slots is the n likeliest, whosever they are, and always consists of beginnings
of drafts. T is a staircase: no slot pays alone where the next ones are free, so every n is
evaluated, not one slot after the other. Drafting costs a forward pass for each depth, once for all
who draft with the same proposer: depths are enumerated, as far as the deepest one could pay. (The
choice is exact, but for what it costs to begin drafting for a sequence: that is dealt with by
leaving out, one after the other, those who are not worth it.)

This is SmartSpec's goodput (arXiv 2406.14066) for each slot instead of one length for all.
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

Array = NDArray[np.float64]
Places = NDArray[np.intp]


class _Slots(NamedTuple):
    """Slots on offer, candidate by candidate or the likeliest first.

    Attributes:
        values: weight x survival.
        owners: place of the candidate.
    """

    values: Array
    owners: Places

    def at(self, places: Places | NDArray[np.bool_] | slice) -> _Slots:
        return _Slots(self.values[places], self.owners[places])


class _Choice(NamedTuple):
    """The best slots, and the rate they give."""

    rate: float
    slots: _Slots


class _Way(NamedTuple):
    """A way to draft.

    Attributes:
        most_rate: no choice of its slots gives more.
        draft_s: seconds of drafting.
        offered: whether a slot is drafted, the likeliest first; None if all are.
    """

    most_rate: float
    draft_s: float
    offered: NDArray[np.bool_] | None


class _Depth(NamedTuple):
    """A depth to which one proposer drafts, what its slots are worth together, and what it takes.

    Attributes:
        worth: sum of weight x survival.
        seconds: of all depths so far, of beginning, and of drafting at all.
    """

    depth: int
    worth: float
    seconds: float


FEW_SLOTS: Final = 128
"""Up to so many slots that are there already are chosen from without arrays, whose operations take
a microsecond or two each when the caches hold them, and several times that between the steps of a
model, which leave nothing else there. Microseconds at 10 / 80 / 120 slots: 4 / 19 / 28 against 21 /
24 / 25, with cold caches 23 / 45 / 57 against 98 / 110 / 117 (one core, Zen 5, 2026-11-22)."""


def allocate(step: StepView, cost: StepCost) -> list[int]:
    """Return the draft length of each candidate that maximises the rate of the step.

    Among equals, fewer slots, and those of earlier candidates.
    """
    offered = sum([len(candidate.survivals) for candidate in step.candidates])
    if offered <= FEW_SLOTS and all(
        candidate.depth_s <= 0.0 and candidate.start_s <= 0.0 for candidate in step.candidates
    ):
        return _best_of_few(step, cost)
    return _best_of_many(step, cost)


def _best_of_few(step: StepView, cost: StepCost) -> list[int]:
    """Return the best lengths of drafts that are there."""
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


def _best_of_many(step: StepView, cost: StepCost) -> list[int]:
    """Return the best lengths of drafts that are there or are still to be computed."""
    slots = _slots_of(step)
    most = min(step.slot_budget, len(slots.values))
    if most <= 0:
        return [0] * len(step.candidates)
    start_s = np.array([candidate.start_s for candidate in step.candidates])
    best = _best_of(step, slots, slots_s(step, cost, most), start_s)
    lengths: list[int] = np.bincount(best.slots.owners, minlength=len(step.candidates)).tolist()
    return lengths


def _slots_of(step: StepView) -> _Slots:
    survivals = [candidate.survivals for candidate in step.candidates]
    lengths = list(map(len, survivals))
    values = np.fromiter(chain.from_iterable(survivals), np.float64, sum(lengths))
    owners = np.repeat(np.arange(len(lengths)), lengths)
    weights = [candidate.weight for candidate in step.candidates]
    if weights.count(1.0) < len(weights):
        values *= np.repeat(weights, lengths)
    return _Slots(values, owners)


def _best_of(step: StepView, slots: _Slots, step_s: Array, start_s: Array) -> _Choice:
    """Return the best choice of slots.

    Who is not worth its start at the best rate so far is left out, until all who are left are.
    """
    best = _Choice(step.total_weight / float(step_s[0]), slots.at(np.empty(0, np.intp)))
    begins = start_s > 0.0
    if not begins.any():
        return _best_way(step, slots, step_s, start_s, best)
    worth = np.bincount(slots.owners, slots.values, len(start_s))
    while True:
        out = begins & (worth <= best.rate * start_s)
        slots = slots.at(~out[slots.owners])
        choice = _best_way(step, slots, step_s, start_s, best)
        best = max(best, choice, key=lambda one: one.rate)
        chosen = choice.slots
        worth = np.bincount(chosen.owners, chosen.values, len(start_s))
        left = begins & (np.bincount(slots.owners, minlength=len(start_s)) > 0)
        if not np.any(left & (worth <= best.rate * start_s)):
            return best


def _best_way(
    step: StepView, slots: _Slots, step_s: Array, start_s: Array, best: _Choice
) -> _Choice:
    """Return the best way to draft and the slots that are then taken, if it is better.

    Args:
        best: what there is to be had otherwise.
    """
    order = np.argsort(-slots.values, kind="stable")
    likeliest = slots.at(order)
    weight = step.total_weight
    for way in _ways_to_draft(step, slots, order, start_s, float(step_s[0]), best.rate):
        if way.most_rate <= best.rate:
            break  # and so have all that follow
        drafted = likeliest if way.offered is None else likeliest.at(way.offered)
        rates = weight + np.cumsum(drafted.values[: len(step_s) - 1])
        rates /= step_s[1 : len(rates) + 1] + way.draft_s
        last = int(rates.argmax()) if len(rates) else 0
        if len(rates) and rates[last] > best.rate:
            best = _Choice(float(rates[last]), drafted.at(slice(last + 1)))
    return best


def _ways_to_draft(
    step: StepView, slots: _Slots, order: Places, start_s: Array, step_s: float, rate: float
) -> Iterator[_Way]:
    """Yield every choice of depths that could pay, the most promising first.

    Args:
        order: of the slots by likelihood.
        start_s: of each candidate.
        step_s: seconds of the step without drafts.
        rate: what can be had otherwise. The best way gives no less, so a depth whose slots together
            are worth less than its time at this rate pays in no case.
    """
    calls = {c.depth_s: c.call_s for c in step.candidates if c.depth_s > 0.0}
    costs = sorted(calls)
    if not costs:
        yield _Way(np.inf, 0.0, None)
        return
    values, owners = slots
    depth_s = np.array([candidate.depth_s for candidate in step.candidates])[owners]
    depths = np.arange(len(owners)) - np.searchsorted(owners, owners) + 1
    free = depth_s <= 0.0
    groups = [
        _group(depth_s == cost_s, depths, slots, start_s, cost_s, calls[cost_s], rate)
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
        offered = free.copy()
        for group, depth in zip(of_group, chosen_depths, strict=True):
            offered |= group & (depths <= depth)
        yield _Way(most_rate, draft_s, offered)


def _group(
    group: NDArray[np.bool_],
    depths: Places,
    slots: _Slots,
    start_s: Array,
    depth_s: float,
    call_s: float,
    rate: float,
) -> list[_Depth]:
    """Return how deep it may pay to draft those who draft at one cost, from not at all on."""
    by_depth = np.bincount(depths[group], slots.values[group], 1)
    paying = np.flatnonzero(by_depth >= depth_s * rate)
    deepest = int(paying[-1]) if len(paying) else 0
    begin_s = call_s + float(start_s[np.unique(slots.owners[group])].sum())
    worth = np.cumsum(by_depth).tolist()
    return [
        _Depth(depth, worth[depth], depth * depth_s + (begin_s if depth else 0.0))
        for depth in range(deepest + 1)
    ]
