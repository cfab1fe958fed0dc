"""Loops at the end of outputs, which small models produce and n-grams predict perfectly."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

GRAM: Final = 8


def loop_start(tokens: Sequence[Hashable]) -> int:
    """Return the number of output tokens before a loop, or of all tokens without a loop.

    A loop begins with the first repeated 8-gram after which over half of the 8-grams are repeated.
    """
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    seen: set[tuple[Hashable, ...]] = set()
    repeated = []
    for gram in grams:
        repeated.append(gram in seen)
        seen.add(gram)
    for start, again in enumerate(repeated):
        rest = repeated[start:]
        if again and sum(rest) > len(rest) / 2:
            return start
    return len(tokens)
