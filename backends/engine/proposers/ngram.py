"""Drafts by n-gram lookup: the continuations of earlier matches of a sequence's last tokens.

The method is prompt lookup (A. Saxena, 2023; "LLMA", arXiv 2304.04487) with an incremental index.
Matches that continue differently become branches of a tree, so each slot gets the likeliest
remaining token of any depth or branch.

If the sequence itself has no long match, the proposer also searches the tenant's finished requests,
if the worker keeps them. SuffixDecoding (arXiv 2411.04975) keeps such requests in a tree.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from heapq import heappop, heappush
from typing import Final

from draftgate.backends.core.drafts import PER_MILLE, ROOT, Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.proposers.ngram_index import Match, NgramIndex, TenantCorpora

LENGTH_WEIGHT: Final = 2.0
"""Factor on the weight of a match per token of its length.

The following figures are tokens per step on 25 held-out files with 4 / 8 / 16 slots. A chain gets
1.77 / 1.88 / 1.92. Trees weighted by the match's length get 1.81 / 1.97 / 2.09. Trees with a factor
of two get 1.81 / 1.98 / 2.10, and with a factor of four 1.82 / 1.98 / 2.09. All trees wasted fewer
slots than the chain (2026-11-21).
"""

CHILD_CHANCE: Final = 0.75
"""Assumed chance of a token after a correct parent, to compare branches with deeper tokens."""

LONG_MATCH: Final = 4
"""Minimum length of a match in the sequence itself that makes a search of the corpus unnecessary.
"""


class NgramProposer:
    """Proposes the continuations of the longest matches of a sequence's end."""

    def __init__(self, *, corpus_tokens: int = 0, trees: bool = True) -> None:
        """Create a proposer without sequences.

        Args:
            corpus_tokens: tokens of finished requests to keep for each tenant. 0 keeps none.
            trees: whether different continuations become branches. Without trees, the draft is the
                best continuation.
        """
        self._indexes: dict[int, NgramIndex] = {}  # by sequence key
        self._corpora = TenantCorpora(corpus_tokens)
        self._trees = trees

    def depth_s(self, sequences: int) -> float:
        """Return 0, because a lookup needs no forward pass."""
        return 0.0

    def catch_up_s(self, sequence: Sequence) -> float:
        """Return 0, because indexing new tokens takes microseconds."""
        return 0.0

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Return the continuations of each sequence's matches.

        Without a match, the draft is empty.
        """
        return [self._draft(request.sequence, request.max_tokens) for request in requests]

    def forget(self, sequence: Sequence) -> None:
        """Drop the sequence's index, and add its text to the tenant's corpus."""
        if self._indexes.pop(sequence.key, None) is not None:
            self._corpora.add_text(sequence.request.tenant, sequence.token_ids)

    def _draft(self, sequence: Sequence, max_tokens: int) -> Draft:
        matches = self._matches(sequence)
        if not matches:
            return Draft()
        evidence, agreement = matches[0][1].length, _agreement(matches)
        weights: dict[tuple[int, ...], float] = {}
        for tokens, match in matches if self._trees else matches[:1]:
            continuation = _continuation(tokens, match.end, max_tokens)
            weight = LENGTH_WEIGHT ** (match.length - evidence)
            weights[continuation] = weights.get(continuation, 0.0) + weight
        if len(weights) == 1:
            return Draft(continuation, evidence=evidence, agreement=agreement)
        return Draft(*_tree(list(weights.items()), max_tokens), evidence, agreement)

    def _matches(self, sequence: Sequence) -> list[tuple[Many[int], Match]]:
        """Return the matches of the sequence's end with their texts, longest first."""
        tokens = sequence.token_ids
        index = self._indexes.get(sequence.key)
        if index is None:
            index = self._indexes[sequence.key] = NgramIndex()
        index.catch_up(tokens)
        found: list[tuple[Many[int], Match]] = [(tokens, m) for m in index.matches(tokens, tokens)]
        if not found or found[0][1].length < LONG_MATCH:
            found.extend(self._corpora.matches(sequence.request.tenant, tokens))
            found.sort(key=lambda place: -place[1].length)
        return found


def _agreement(matches: list[tuple[Many[int], Match]]) -> int:
    """Return the weighted share of the matches that continue like the longest, per mille.

    A single match has nothing to agree with, so its agreement is 0.
    """
    if len(matches) == 1:
        return 0
    (longest_tokens, longest), *_ = matches
    first, agreeing, total = longest_tokens[longest.end], 0.0, 0.0
    for tokens, match in matches:
        weight = LENGTH_WEIGHT ** (match.length - longest.length)
        total += weight
        if tokens[match.end] == first:
            agreeing += weight
    return round(PER_MILLE * agreeing / total)


def _continuation(tokens: Many[int], end: int, length: int) -> tuple[int, ...]:
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
