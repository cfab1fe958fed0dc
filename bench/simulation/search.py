"""The highest rate at which a promise holds."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Final

STEP: Final = 1.02
"""Ratio of neighbouring rates: what a search tells apart. One grid for all policies, so that those
which do the same have the same capacity."""

LOWEST, HIGHEST = -400, 600
"""Places of the grid, as powers of `STEP`: 0.0004 to 144,000 requests a second."""


def grid_rate(place: int) -> float:
    """Return the rate at a place of the grid."""
    return STEP**place


def highest_place(holds: Callable[[int], bool], near: int) -> int | None:
    """Return the last place at which it holds, if it holds at all those before and none behind.

    Gallops away from `near` with doubled strides, then bisects; each place is asked once at most.

    Returns:
        The place; None if it does not even hold at `LOWEST`.
    """
    low, high = LOWEST - 1, HIGHEST + 1  # it holds at low, as far as known, and not at high
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
    """Return the place of the grid that is nearest to a rate."""
    return round(log(rate_rps) / log(STEP))
