"""Parts of exhaustive tests that quick runs do: numbers of examples, and cases of grids."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
from _pytest.mark import ParameterSet

DEFAULT = 100
"""Hypothesis' default, which the long run has."""

QUICK = 25
"""Examples of a property in quick runs, of which CI repeats the same in every run."""


def examples(long: int) -> int:
    """Return the number of examples of a property, by its number in the long run."""
    import hypothesis  # a GPU machine may lack it

    return long * hypothesis.settings().max_examples // DEFAULT


def grid(*axes: Iterable[Any], quick: Callable[..., bool]) -> list[ParameterSet]:
    """Return all combinations of parameters. Combinations that are not quick are marked long."""
    return [
        pytest.param(*case, marks=() if quick(*case) else pytest.mark.long)
        for case in product(*axes)
    ]
