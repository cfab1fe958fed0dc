"""Search for the highest rate at which a condition holds."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Final

STEP: Final = 1.02
"""Ratio of neighbouring rates, the resolution of a search. All policies share the same grid, so
that equal policies get equal capacities."""

LOWEST, HIGHEST = -400, 600
"""Range of grid indices, as powers of `STEP`: 0.0004 to 144,000 requests per second."""


def grid_rate(place: int) -> float:
    """Return the rate at a grid index."""
    return STEP**place


def highest_place(holds: Callable[[int], bool], near: int) -> int | None:
    """Return the last grid index at which a monotone condition holds.

    The search moves away from `near` with doubled strides, and then bisects. It tests each index at
    most once.

    Returns:
        The index, or None if the condition does not hold even at `LOWEST`.
    """
    low, high = LOWEST - 1, HIGHEST + 1  # invariant: the condition holds at `low` and not at `high`
    place, stride = near, 1
    while low < place < high:
        if holds(place):
            low, place = place, place + stride
        else:
            high, place = place, place - stride
        stride *= 2
        if low >= LOWEST and high <= HIGHEST:
            break
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low if low >= LOWEST else None


def nearest_place(rate_rps: float) -> int:
    """Return the grid index nearest to a rate."""
    return round(log(rate_rps) / log(STEP))
