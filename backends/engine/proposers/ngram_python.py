"""N-gram lookup in Python, for machines without a compiler, which defines the drafts.

The index uses hash chains, as deflate does for its matches (RFC 1951). For the last 1, 2 and 4
tokens before an end, the index has their latest end. For each end, it has the previous ends of the
same tokens. A new token costs the same for any length of the text. A search finds the latest
matches first.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many
from heapq import heappop, heappush
from typing import Final, NamedTuple

from draftgate.backends.core.drafts import NO_DRAFT, PER_MILLE, ROOT, Draft
from draftgate.backends.engine.proposers.ngram_lookup import (
    CHILD_CHANCE,
    LEAST_TEXT_BYTES,
    LENGTH_WEIGHT,
    LONG_MATCH,
    MAX_CATCH_UP,
    MAX_EVIDENCE,
    MAX_MATCHES,
    MAX_WALK,
    ORDERS,
)
from draftgate.backends.token_ids import TokenIds

_TOKEN_BYTES: Final = 1024
"""Bound on the memory of a token in the index: its keys and entries in the three dictionaries."""


class TextMatch(NamedTuple):
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
        self.tokens = tokens
        self._clear()

    def _clear(self) -> None:
        self._next_end = 1
        # By order: the latest end of some tokens, and by end, from 0, the previous end of the same
        # tokens, or 0 without a previous end.
        self._latest: list[dict[bytes, int]] = [{} for _ in range(ORDERS)]
        self._earlier = [array("i", (0,)) for _ in range(ORDERS)]

    def matches(self, text: TokenIds, *, is_other: bool = False) -> list[TextMatch]:
        """Return the matches of the end of a text, longest first, then latest first.

        Args:
            text: the text with the end to search, which may be the indexed text itself.
            is_other: whether the text is another one than the indexed text.
        """
        tokens = self.tokens
        self._catch_up(MAX_CATCH_UP if is_other else len(tokens))
        found: list[TextMatch] = []
        longer = MAX_EVIDENCE + 1
        for order, end in self._latest_ends(text, is_other=is_other):
            for _ in range(MAX_WALK):
                if not end or len(found) == MAX_MATCHES:
                    break
                length = _match_length(tokens, end, text)
                if length < longer:
                    found.append(TextMatch(tokens, end, length))
                end = self._earlier[order][end]  # noqa: PLW2901 - follows the chain
            longer = 1 << order
        found.sort(key=lambda match: -match.length)
        return found

    def _catch_up(self, most: int) -> None:
        """Index at most `most` ends before the last token, which has no continuation yet."""
        tokens = self.tokens
        if self._next_end > max(len(tokens), 1):  # the text became shorter
            self._clear()
        last = min(len(tokens), self._next_end + most)
        for end in range(self._next_end, last):
            for order, (latest, earlier) in enumerate(
                zip(self._latest, self._earlier, strict=True)
            ):
                key = _key(tokens, end, order)
                earlier.append(latest.get(key, 0) if key else 0)
                if key:
                    latest[key] = end
        self._next_end = max(self._next_end, last)

    def _latest_ends(self, text: TokenIds, *, is_other: bool) -> list[tuple[int, int]]:
        """Return the orders to search, highest first, with the latest end of each.

        A longer match exists only if each shorter one does. Without a pair, use the last token,
        which other texts have too often.
        """
        ends = []
        for order in range(1, ORDERS):
            key = _key(text, len(text), order)
            end = self._latest[order].get(key, 0) if key else 0
            if not end:
                break
            ends.append((order, end))
        if not ends and not is_other:
            ends.append((0, self._latest[0].get(_key(text, len(text), 0), 0)))
        return ends[::-1]


def _key(tokens: TokenIds, end: int, order: int) -> bytes:
    """Return the last 2^order tokens before an end, or nothing at the start of a text."""
    size = 1 << order
    return tokens[end - size : end].tobytes() if end >= size else b""


def _match_length(tokens: TokenIds, end: int, text: TokenIds) -> int:
    """Return the number of tokens before `end` that equal those at the end of a text."""
    last = len(text)
    most = min(end, last, MAX_EVIDENCE)
    for length in range(most):
        if tokens[end - 1 - length] != text[last - 1 - length]:
            return length
    return most


class PythonLookup:
    """Implements `NgramLookup`.

    Without `trees`, a draft is the best continuation.
    """

    def __init__(self, *, trees: bool) -> None:
        self._trees = trees

    def index(self, tokens: TokenIds) -> PythonText:
        """Return the index of a text."""
        return PythonText(tokens)

    def text_bytes(self, tokens: int) -> int:
        """Return the maximum memory of a text of this length with its index."""
        return LEAST_TEXT_BYTES + _TOKEN_BYTES * tokens

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


def _matches(texts: tuple[PythonText, ...]) -> list[TextMatch]:
    """Return the matches of the first text's end, longest first, until one is long."""
    own, *others = texts
    if not own.tokens:
        return []
    found = own.matches(own.tokens)
    for other in others:
        if not found or found[0].length < LONG_MATCH:
            found += other.matches(own.tokens, is_other=True)
            found.sort(key=lambda match: -match.length)
    return found


def _agreement(matches: list[TextMatch]) -> int:
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
