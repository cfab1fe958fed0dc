"""Drafts from the past: what followed where the last tokens stood before.

Prompt look-up (A. Saxena, 2023; "LLMA", arXiv 2304.04487) with an incremental index. Earlier
places that go on differently become branches of a tree, so a slot goes to the likeliest token that
is left, be it deeper or beside. Where the sequence itself has no long match, what its tenant's
finished requests said is looked at, if that is kept (SuffixDecoding, arXiv 2411.04975, keeps it in
a tree).
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from heapq import heappop, heappush
from typing import Final, NamedTuple

from draftgate.backends.core.drafts import ROOT, Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.proposers.corpus import Corpora
from draftgate.backends.engine.proposers.ngram_index import Match, NgramIndex

LENGTH_WEIGHT: Final = 2.0
"""How much more a place counts for each token by which its match is longer. Tokens a step along
25 held-out files with 4 / 8 / 16 slots: chain 1.77 / 1.88 / 1.92; trees with the match's length as
weight 1.81 / 1.97 / 2.09, doubling 1.81 / 1.98 / 2.10, times four 1.82 / 1.98 / 2.09; all trees
wasted fewer slots than the chain (2026-11-21)."""

DEEPER: Final = 0.75
"""Chance of a token, its parent being right, by which branches are compared with longer ones."""

LONG_MATCH: Final = 4
"""A match of so many tokens in the sequence itself is not looked for elsewhere."""


class Place(NamedTuple):
    """Where a draft may come from: a text, and an earlier place in it."""

    tokens: Many[int]
    match: Match

    def continuation(self, length: int) -> Many[int]:
        """Return what followed; past the end of the text its repetition goes on."""
        end = self.match.end
        found = self.tokens[end : end + length]
        period = len(self.tokens) - end
        if len(found) == length:
            return found
        return [self.tokens[end + i % period] for i in range(length)]


class NgramProposer:
    """Proposes what followed the earlier places whose past agrees longest with a sequence's."""

    def __init__(self, *, corpus_tokens: int = 0, trees: bool = True) -> None:
        """Start without sequences.

        Args:
            corpus_tokens: tokens of finished requests that are kept for each tenant; 0 keeps none.
            trees: whether places that go on differently become branches; else the best one counts.
        """
        self._indexes: dict[int, NgramIndex] = {}  # by sequence key
        self._corpora = Corpora(corpus_tokens)
        self._trees = trees

    def depth_s(self, sequences: int) -> float:
        """Return 0: drafts are looked up."""
        return 0.0

    def catch_up_s(self, sequence: Sequence) -> float:
        """Return 0: catching up with an index takes microseconds."""
        return 0.0

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Return what followed earlier places of each sequence's end, if there are any."""
        return [self._draft(request.sequence, request.max_tokens) for request in requests]

    def forget(self, sequence: Sequence) -> None:
        """Drop the sequence's index, and keep its tokens for its tenant."""
        if self._indexes.pop(sequence.key, None) is not None:
            self._corpora.add(sequence.request.tenant, sequence.token_ids)

    def _draft(self, sequence: Sequence, max_tokens: int) -> Draft:
        places = self._places(sequence)
        if not places:
            return Draft()
        evidence = places[0].match.length
        ways: dict[tuple[int, ...], float] = {}
        for place in places if self._trees else places[:1]:
            way = tuple(place.continuation(max_tokens))
            weight = LENGTH_WEIGHT ** (place.match.length - evidence)
            ways[way] = ways.get(way, 0.0) + weight
        if len(ways) == 1:
            return Draft(way, evidence=evidence)
        return _branch(list(ways.items()), max_tokens, evidence)

    def _places(self, sequence: Sequence) -> list[Place]:
        """Return earlier places of the sequence's end, the longest match first."""
        tokens = sequence.token_ids
        index = self._indexes.get(sequence.key)
        if index is None:
            index = self._indexes[sequence.key] = NgramIndex()
        index.catch_up(tokens)
        places = [Place(tokens, match) for match in index.matches(tokens, tokens)]
        if not places or places[0].match.length < LONG_MATCH:
            for text, match in self._corpora.matches(sequence.request.tenant, tokens):
                places.append(Place(text, match))
            places.sort(key=lambda place: -place.match.length)
        return places


_Way = tuple[tuple[int, ...], float]  # tokens, and how much they count


def _branch(ways: list[_Way], max_tokens: int, evidence: int) -> Draft:
    """Return the tree of the likeliest tokens of several ways, beginnings shared, best first.

    A token is looked at once its parent is taken, so the cost is that of the tokens taken.
    """
    tokens: list[int] = []
    parents: list[int] = []
    shares: list[float] = []
    # Minus the chance; an order, in which equals come as their places do; then the token.
    ahead: list[tuple[float, int, int, float, int, int, list[_Way]]] = []
    order = 0

    def look_behind(parent: int, depth: int, chance: float, ways: list[_Way]) -> None:
        nonlocal order
        if len(ways) == 1:  # most tokens: without a choice there is nothing to compute
            order += 1
            heappush(ahead, (-chance, order, ways[0][0][depth], 1.0, parent, depth, ways))
            return
        groups: dict[int, list[_Way]] = {}
        for way in ways:
            groups.setdefault(way[0][depth], []).append(way)
        total = sum(weight for _, weight in ways)
        for token, group in groups.items():
            share = 1.0 if len(groups) == 1 else sum(weight for _, weight in group) / total
            order += 1
            heappush(ahead, (-chance * share, order, token, share, parent, depth, group))

    look_behind(ROOT, 0, 1.0, ways)
    while len(tokens) < max_tokens:
        chance, _, token, share, parent, depth, group = heappop(ahead)
        tokens.append(token)
        parents.append(parent)
        shares.append(share)
        if depth + 1 < max_tokens:
            look_behind(len(tokens) - 1, depth + 1, -chance * DEEPER, group)
    return Draft(tuple(tokens), tuple(parents), tuple(shares), evidence)
