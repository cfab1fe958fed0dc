"""How far a prompt repeats itself: what a look-up in it would have drafted right within it.

Texts that repeated themselves go on doing so, which is what n-gram drafts live on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

MATCH_TOKENS: Final = 2
"""Tokens that have to agree for a place to be found. Of 1 to 4 it tells most of what is accepted
later (`python -m bench.engine.request_forecast`, 2026-11-21): a longer match is found more
seldom and hardly ever wrong, so shares of prompts differ less."""

TAIL_TOKENS: Final = 512
"""Latest tokens of a prompt that are looked at. They tell as much of recorded drafts as 1024, 2048
or 4096 do, and take 25 microseconds, however long the prompt is (same command; one core, Zen 4,
2026-11-21)."""

LEAST_LOOK_UPS: Final = 16
"""From fewer look-ups nothing is told: their share would be off by more than prompts differ."""

_KEY_BITS: Final = 31
"""Of a token id in the key of a pair: two of them fit 62 bits."""


def repetition(token_ids: Sequence[int]) -> float | None:
    """Return the share of look-ups in a prompt that found the right next token, 0 to 1.

    A look-up asks at a token of the prompt's tail: where did the last `MATCH_TOKENS` tokens stand
    before, the latest time, and what followed there (prompt look-up: A. Saxena, 2023)?

    Returns:
        None where fewer than `LEAST_LOOK_UPS` found a place.
    """
    if len(token_ids) <= MATCH_TOKENS + LEAST_LOOK_UPS:
        return None  # each look-up is asked for by a place with one before it: there are too few
    tokens = np.array(token_ids[-TAIL_TOKENS:], dtype=np.int64)
    keys = _keys(tokens)
    order = np.argsort(keys, kind="stable")
    again = keys[order[1:]] == keys[order[:-1]]
    looked_up = np.count_nonzero(again)
    if looked_up < LEAST_LOOK_UPS:
        return None
    right = tokens[order[1:][again] + MATCH_TOKENS] == tokens[order[:-1][again] + MATCH_TOKENS]
    return float(np.count_nonzero(right) / looked_up)


def _keys(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a number for the `MATCH_TOKENS` tokens before each token that has as many."""
    places = max(len(tokens) - MATCH_TOKENS, 0)
    keys = np.zeros(places, dtype=np.int64)
    for place in range(MATCH_TOKENS):
        keys = (keys << _KEY_BITS) + tokens[place : place + places]
    return keys
