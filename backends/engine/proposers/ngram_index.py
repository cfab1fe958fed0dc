"""Where the last tokens of a text stood before.

Hash chains, as deflate keeps them for its matches (RFC 1951): for each pair of tokens, and for each
single one, where it ended last, and for each such place the one before it. A token costs two
dictionary entries and two array items to add, whatever the length of the text, and earlier places
are found latest first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import Final, NamedTuple

MOST_MATCHES: Final = 8
"""Earlier places that are compared. Tokens a step with 8 slots along held-out code, 1 / 4 / 8 / 16
places: 1.80 / 1.92 / 1.93 / 1.92 (`bench/ngram.py`, 2026-11-21); each costs half a microsecond."""

MOST_EVIDENCE: Final = 32
"""Longest match that is counted; longer ones are no better evidence."""

_SHIFT: Final = 20
"""Bits of a token in a pair: no vocabulary has 2^20 tokens."""


class Match(NamedTuple):
    """An earlier place: where the text behind it begins, and how many tokens before it agree."""

    end: int
    length: int


class NgramIndex:
    """Earlier places in one growing text, which the caller keeps."""

    def __init__(self) -> None:
        """Know nothing."""
        self._pairs: dict[int, int] = {}
        self._singles: dict[int, int] = {}
        # By end, from 0: the end before it of the same pair, or single token; 0 for none.
        self._earlier_pairs = array("i", [0])
        self._earlier_singles = array("i", [0])

    def catch_up(self, tokens: Many[int]) -> None:
        """Index what ends before the last token: the end itself has no continuation yet."""
        pairs, singles = self._pairs, self._singles
        first = len(self._earlier_singles)
        previous = tokens[first - 2] if first > 1 else -1
        for end in range(first, len(tokens)):
            token = tokens[end - 1]
            pair = previous << _SHIFT | token
            self._earlier_pairs.append(pairs.get(pair, 0))
            self._earlier_singles.append(singles.get(token, 0))
            singles[token] = end
            if previous >= 0:
                pairs[pair] = end
            previous = token

    def matches(self, tokens: Many[int], behind: Many[int]) -> list[Match]:
        """Return earlier places of the end of a text, the longest first, then the latest.

        Args:
            tokens: the indexed text.
            behind: the text whose end is looked for; it may be the indexed one itself.
        """
        found = [Match(end, _agreement(tokens, end, behind)) for end in self._ends(behind)]
        found.sort(key=lambda match: -match.length)
        return found

    def _ends(self, behind: Many[int]) -> Iterator[int]:
        """Yield where the last pair of a text ended before, or its last token if none did."""
        end = self._pairs.get(behind[-2] << _SHIFT | behind[-1], 0) if len(behind) > 1 else 0
        earlier = self._earlier_pairs
        if not end:
            end, earlier = self._singles.get(behind[-1], 0), self._earlier_singles
        for _ in range(MOST_MATCHES):
            if not end:
                return
            yield end
            end = earlier[end]


def _agreement(tokens: Many[int], end: int, behind: Many[int]) -> int:
    """Return how many tokens before `end` equal those at the end of a text."""
    most = min(end, len(behind), MOST_EVIDENCE)
    last = len(behind)
    for length in range(most):
        if tokens[end - 1 - length] != behind[last - 1 - length]:
            return length
    return most
