"""Repetition of a prompt: the share of its tokens that n-gram lookups would have drafted correctly.

Repetitive texts usually continue to repeat themselves, and n-gram drafts depend on repetition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

MATCH_TOKENS: Final = 2
"""Number of tokens that must match. Of 1 to 4, this value best predicts later acceptance
(`bench/results/request-forecast.json`, 2026-11-21). Longer matches are rarer and hardly ever
wrong, so prompts differ less."""

TAIL_TOKENS: Final = 512
"""Number of tokens at the end of a prompt that are examined. They predict recorded drafts as
accurately as 1024, 2048 or 4096 tokens, and take 25 microseconds for prompts of any length.
(`bench/results/request-forecast.json`, one core, Zen 4, 2026-11-21.)"""

LEAST_LOOKUPS: Final = 16
"""Minimum number of lookups. With fewer, the error of the share would exceed the differences
between prompts."""

_KEY_BITS: Final = 31
"""Bits of a token id in the key of a pair, so that two ids fit into 62 bits."""


def repetition(token_ids: Sequence[int]) -> float | None:
    """Return the share of lookups in a prompt that found the right next token, 0 to 1.

    A lookup at each token of the prompt's tail finds the latest earlier place of the preceding
    `MATCH_TOKENS` tokens. It proposes the token after them (prompt lookup: A. Saxena, 2023).

    Returns:
        None if fewer than `LEAST_LOOKUPS` lookups found a place.
    """
    if len(token_ids) <= MATCH_TOKENS + LEAST_LOOKUPS:
        # Each lookup needs an earlier place, so shorter prompts cannot have enough lookups.
        return None
    tokens = np.array(token_ids[-TAIL_TOKENS:], dtype=np.int64)
    keys = _keys(tokens)
    order = np.argsort(keys, kind="stable")
    again = keys[order[1:]] == keys[order[:-1]]
    lookups = np.count_nonzero(again)
    if lookups < LEAST_LOOKUPS:
        return None
    right = tokens[order[1:][again] + MATCH_TOKENS] == tokens[order[:-1][again] + MATCH_TOKENS]
    return float(np.count_nonzero(right) / lookups)


def _keys(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the key of the `MATCH_TOKENS` tokens before each token with enough predecessors."""
    places = max(len(tokens) - MATCH_TOKENS, 0)
    keys = np.zeros(places, dtype=np.int64)
    for place in range(MATCH_TOKENS):
        keys = (keys << _KEY_BITS) + tokens[place : place + places]
    return keys
