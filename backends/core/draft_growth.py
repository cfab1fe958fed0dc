"""Grows a tree of drafts from the confidences of a model, best first.

The tree of n tokens with the largest sum of survivals consists of the n tokens with the largest
products of probabilities along their paths. The model must read a token before its children are
known, so a tree grows in passes. Each pass reads the tokens that may have children in the result.

Source: Li, Wei, Zhang, Zhang, "EAGLE-2" (arXiv 2406.16858), which grows a fixed number of passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from draftgate.backends.core.drafts import NO_DRAFT, PER_MILLE, ROOT, Draft

MAX_TREE_TOKENS: Final = 16
"""Maximum tokens of a grown tree."""

CHILDREN: Final = 4
"""Candidates after each token that a model has read."""

READ_PER_PASS: Final = 3
"""Maximum tokens of a tree that a pass reads."""

_LEAST_SHARE: Final = 0.25
"""A pass reads a token only if its probability has this share of the best unread token's.

These four values were chosen and not tuned (2026-11-27).
"""


@dataclass(slots=True)
class _Node:
    """A candidate.

    Attributes:
        probability: that of the token given its parent.
        chance: product of the probabilities on its path.
        place: number of tokens that were read before it, or None while it is unread.
    """

    token: int
    parent: int
    depth: int
    probability: float
    chance: float
    place: int | None = None


@dataclass(slots=True)
class Growth:
    """A tree in progress.

    Attributes:
        most_tokens: maximum tokens of the tree.
    """

    most_tokens: int
    _nodes: list[_Node] = field(default_factory=list)
    _read: int = 0
    _passes: int = 0

    def add(self, parent: int, children: Iterable[tuple[int, float]]) -> None:
        """Add the likeliest tokens after a token that was read, or after `ROOT`.

        Args:
            children: tokens with their probabilities.
        """
        before = None if parent == ROOT else self._nodes[parent]
        depth, chance = (0, 1.0) if before is None else (before.depth, before.chance)
        for token, probability in children:
            if probability > 0:
                node = _Node(token, parent, depth + 1, probability, chance * probability)
                self._nodes.append(node)

    def next_unread(self) -> list[int]:
        """Return the tokens to read in the next pass, which count as read. Empty at the end."""
        best = self._best()
        self._passes += 1
        if self._passes >= self.most_tokens:
            return []
        full = len(best) == self.most_tokens
        least = self._nodes[best[-1]].chance if full else 0.0
        unread = [place for place in best if self._nodes[place].place is None]
        # A child of the last token would not displace another token.
        hopeful = [place for place in unread if self._nodes[place].chance > least]
        hopeful = hopeful[: min(READ_PER_PASS, self.most_tokens - self._read)]
        floor = _LEAST_SHARE * self._nodes[hopeful[0]].chance if hopeful else 0.0
        chosen = [place for place in hopeful if self._nodes[place].chance >= floor]
        for place in chosen:
            self._nodes[place].place = self._read
            self._read += 1
        return chosen

    def tokens(self, node: int) -> list[int]:
        """Return the tokens on the path to a candidate, with its own."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self._nodes[node].token)
            node = self._nodes[node].parent
        return tokens[::-1]

    def parent(self, node: int) -> int:
        """Return a candidate's parent, or `ROOT`."""
        return self._nodes[node].parent

    def depth(self, node: int) -> int:
        """Return a candidate's depth, 0 for `ROOT`."""
        return 0 if node == ROOT else self._nodes[node].depth

    def path(self, node: int) -> list[int]:
        """Return the places of the tokens on the path to a token that was read, with its own."""
        path: list[int] = []
        while node != ROOT:
            at = self._nodes[node]
            assert at.place is not None
            path.append(at.place)
            node = at.parent
        return path[::-1]

    def draft(self) -> Draft:
        """Return the best tokens as a draft."""
        best = self._best()
        if not best:
            return NO_DRAFT
        index = {node: place for place, node in enumerate(best)} | {ROOT: ROOT}
        nodes = [self._nodes[node] for node in best]
        parents = tuple(index[node.parent] for node in nodes)
        sums = dict.fromkeys(parents, 0.0)
        for node, parent in zip(nodes, parents, strict=True):
            sums[parent] += node.probability
        evidence = round(PER_MILLE * min(sums[ROOT], 1.0))
        tokens = tuple(node.token for node in nodes)
        if parents == tuple(range(ROOT, len(best) - 1)):
            return Draft(tokens, evidence=evidence)
        shares = tuple(
            node.probability / sums[parent] for node, parent in zip(nodes, parents, strict=True)
        )
        return Draft(tokens, parents, shares, evidence)

    def _best(self) -> list[int]:
        """Return the likeliest candidates, best first. A parent precedes its children."""
        order = sorted(range(len(self._nodes)), key=lambda node: -self._nodes[node].chance)
        return order[: self.most_tokens]
