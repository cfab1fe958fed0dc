"""Numbers of examples of property tests."""

from __future__ import annotations

import hypothesis

DEFAULT = 100
"""Hypothesis' default, which the long run has."""

QUICK = 50
"""Examples of a property in quick runs, chosen to halve their time."""


def examples(long: int) -> int:
    """Return the number of examples of a property, by its number in the long run."""
    return long * hypothesis.settings().max_examples // DEFAULT
