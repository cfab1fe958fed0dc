"""N-gram lookup in Python, for machines without a compiler, which defines the drafts.

The index uses hash chains, as deflate does for its matches (RFC 1951). For each pair of tokens, and
for each single token, the index has its latest end. For each end, the index has the previous end. A
new token costs two dictionary entries and two array items, for any length of the text. A search
finds the latest matches first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Many
from heapq import heappop, heappush
from typing import Final, NamedTuple

from draftgate.backends.core.drafts import NO_DRAFT, PER_MILLE, ROOT, Draft
from draftgate.backends.engine.proposers.ngram_lookup import (
    CHILD_CHANCE,
    LENGTH_WEIGHT,
    LONG_MATCH,
    MAX_EVIDENCE,
    MAX_MATCHES,
)
from draftgate.backends.token_ids import TokenIds

_SHIFT: Final = 64
"""Bits of a token in a pair, so that different pairs of 64-bit tokens are different numbers."""


class Match(NamedTuple):
    """An earlier place in a text: `length` tokens before `end` equal the end of another text."""

    tokens: TokenIds
    end: int
    length: int


class PythonText:
    """A text with its index.

    Attributes:
        tokens: the text.
    """

    def __init__(self, tokens: TokenIds) -> None:
        """Reference a text. The first search indexes it."""
        self.tokens = tokens
        self._clear()

    def _clear(self) -> None:
        self._pairs: dict[int, int] = {}
        self._singles: dict[int, int] = {}
        # By end, from 0: the previous end of the same pair or token, or 0 without a previous end.
        self._earlier_pairs = array("i", [0])
        self._earlier_singles = array("i", [0])

    def matches(self, text: TokenIds) -> list[Match]:
        """Return the matches of the end of a text, longest first, then latest first.

        Args:
            text: the text with the end to search, which may be the indexed text itself.
        """
        self._catch_up()
        tokens = self.tokens
        found = [Match(tokens, end, _match_length(tokens, end, text)) for end in self._ends(text)]
        found.sort(key=lambda match: -match.length)
        return found

    def _catch_up(self) -> None:
        """Index all ends before the last token, which has no continuation yet."""
        tokens = self.tokens
        if len(tokens) < len(self._earlier_singles):  # the text became shorter
            self._clear()
        pairs, singles = self._pairs, self._singles
        for end in range(len(self._earlier_singles), len(tokens)):
            token = tokens[end - 1]
            self._earlier_singles.append(singles.get(token, 0))
            singles[token] = end
            pair = _pair(tokens, end) if end > 1 else None
            self._earlier_pairs.append(0 if pair is None else pairs.get(pair, 0))
            if pair is not None:
                pairs[pair] = end

    def _ends(self, text: TokenIds) -> Iterator[int]:
        """Yield earlier ends of the last pair of a text.

        Without such a pair, use the last token.
        """
        end = self._pairs.get(_pair(text, len(text)), 0) if len(text) > 1 else 0
        earlier = self._earlier_pairs
        if not end:
            end, earlier = self._singles.get(text[-1], 0), self._earlier_singles
        for _ in range(MAX_MATCHES):
            if not end:
                return
            yield end
            end = earlier[end]


def _pair(tokens: TokenIds, end: int) -> int:
    """Return the number of the two tokens before an end."""
    return (tokens[end - 2] << _SHIFT) + tokens[end - 1]


def _match_length(tokens: TokenIds, end: int, text: TokenIds) -> int:
    """Return the number of tokens before `end` that equal those at the end of a text."""
    last = len(text)
    most = min(end, last, MAX_EVIDENCE)
    for length in range(most):
        if tokens[end - 1 - length] != text[last - 1 - length]:
            return length
    return most


class PythonLookup:
    """Implements `NgramLookup`."""

    def __init__(self, *, trees: bool) -> None:
        """Create a lookup. Without `trees`, a draft is the best continuation."""
        self._trees = trees

    def index(self, tokens: TokenIds) -> PythonText:
        """Return the index of a text."""
        return PythonText(tokens)

    def drafts(self, texts: Many[tuple[PythonText, ...]], max_tokens: Many[int]) -> list[Draft]:
        """Return a draft for each tuple of texts."""
        return [self._draft(*each) for each in zip(texts, max_tokens, strict=True)]

    def _draft(self, texts: tuple[PythonText, ...], max_tokens: int) -> Draft:
        matches = _matches(texts) if max_tokens > 0 else []
        if not matches:
            return NO_DRAFT
        evidence, agreement = matches[0].length, _agreement(matches)
        weights: dict[tuple[int, ...], float] = {}
        for match in matches if self._trees else matches[:1]:
            continuation = _continuation(match.tokens, match.end, max_tokens)
            weight = LENGTH_WEIGHT ** (match.length - evidence)
            weights[continuation] = weights.get(continuation, 0.0) + weight
        if len(weights) == 1:
            return Draft(continuation, evidence=evidence, agreement=agreement)
        return Draft(*_tree(list(weights.items()), max_tokens), evidence, agreement)


def _matches(texts: tuple[PythonText, ...]) -> list[Match]:
    """Return the matches of the first text's end in all texts, longest first."""
    own, *others = texts
    if not own.tokens:
        return []
    found = own.matches(own.tokens)
    if not found or found[0].length < LONG_MATCH:
        for other in others:
            found += other.matches(own.tokens)
        found.sort(key=lambda match: -match.length)
    return found


def _agreement(matches: list[Match]) -> int:
    """Return the weighted share of the matches that continue like the longest, per mille.

    A single match has nothing to agree with, so its agreement is 0.
    """
    if len(matches) == 1:
        return 0
    longest = matches[0]
    first, agreeing, total = longest.tokens[longest.end], 0.0, 0.0
    for match in matches:
        weight = LENGTH_WEIGHT ** (match.length - longest.length)
        total += weight
        if match.tokens[match.end] == first:
            agreeing += weight
    return round(PER_MILLE * agreeing / total)


def _continuation(tokens: TokenIds, end: int, length: int) -> tuple[int, ...]:
    """Return the tokens from `end` on. After the end of the text, repeat them from `end`."""
    period = len(tokens) - end
    if length <= period:
        return tuple(tokens[end : end + length])
    return tuple([tokens[end + i % period] for i in range(length)])


_Weighted = tuple[tuple[int, ...], float]  # a continuation and its weight


def _tree(
    continuations: list[_Weighted], max_tokens: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """Return the tokens, parents and shares of a `Draft`: the tree of the likeliest tokens.

    The function visits the children of a token only after it takes the token. The cost is therefore
    proportional to the size of the tree.
    """
    tokens: list[int] = []
    parents: list[int] = []
    shares: list[float] = []
    # (-chance, insertion order for ties, token, share, parent, depth, continuations of the branch)
    candidates: list[tuple[float, int, int, float, int, int, list[_Weighted]]] = []
    order = 0

    def push_children(parent: int, depth: int, chance: float, branch: list[_Weighted]) -> None:
        nonlocal order
        if len(branch) == 1:  # the common case: no branches
            order += 1
            heappush(candidates, (-chance, order, branch[0][0][depth], 1.0, parent, depth, branch))
            return
        groups: dict[int, list[_Weighted]] = {}
        for continuation in branch:
            groups.setdefault(continuation[0][depth], []).append(continuation)
        total = sum(weight for _, weight in branch)
        for token, group in groups.items():
            share = 1.0 if len(groups) == 1 else sum(weight for _, weight in group) / total
            order += 1
            heappush(candidates, (-chance * share, order, token, share, parent, depth, group))

    push_children(ROOT, 0, 1.0, continuations)
    while len(tokens) < max_tokens:
        chance, _, token, share, parent, depth, group = heappop(candidates)
        tokens.append(token)
        parents.append(parent)
        shares.append(share)
        if depth + 1 < max_tokens:
            push_children(len(tokens) - 1, depth + 1, -chance * CHILD_CHANCE, group)
    return tuple(tokens), tuple(parents), tuple(shares)
