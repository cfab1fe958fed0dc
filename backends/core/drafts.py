"""Draft tokens as a chain or a tree.

A tree lists its best token first and every token after its parent. So the first n tokens of a draft
are also a draft, and the best draft of that size. A step needs the tokens depth first
(`Draft.depth_first`), which makes each branch a run of consecutive rows.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Final

PER_MILLE: Final = 1000
"""Scale of probabilities and shares in the evidence of a draft."""

ROOT: Final = -1
"""The parent of tokens that follow the sequence itself."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens with the proposer's evidence for them.

    Attributes:
        token_ids: proposed tokens. The children of one parent are all different.
        parents: index in `token_ids` of each token's parent, or `ROOT`. A parent precedes its
            children. Empty for a chain, where each token follows the previous token.
        shares: the proposer's estimate that each token is right if any child of its parent is
            right. Siblings sum to at most 1. Empty if every token is an only child.
        evidence: strength of the proposal on the proposer's own scale. This is the match length for
            n-gram, and the confidence in the first token (per mille) for a model.
        agreement: weighted share, per mille, of the earlier matches that continue with the first
            token. 0 if only one match exists, or if the proposer compares none.
        distributions: distributions from which the tokens were sampled, for `verify: rejection`.
            Probabilities [at least len(token_ids), vocab_size], in the form that this proposer's
            executor reads. None for tokens that were not sampled. Only a chain may have
            distributions.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    evidence: int = 0
    agreement: int = 0
    distributions: object = None

    def __len__(self) -> int:
        """Return the number of tokens, each of which takes one slot."""
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the previous token."""
        return not self.parents

    def parent(self, place: int) -> int:
        """Return the index of a token's parent, or `ROOT`."""
        return self.parents[place] if self.parents else place - 1

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each token, where the children of the root have depth 1."""
        if self.is_chain:
            return tuple(range(1, len(self) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent != ROOT else 0))
        return tuple(depths)

    def survivals(self, chance: Callable[[int], float]) -> tuple[float, ...]:
        """Return the probability that each token and all its ancestors are accepted.

        Args:
            chance: probability that a child at a depth (from 0) is right if its parent was.
        """
        survivals: list[float] = []
        for place, depth in enumerate(self.depths):
            parent = self.parent(place)
            before = survivals[parent] if parent != ROOT else 1.0
            share = self.shares[place] if self.shares else 1.0
            survivals.append(before * chance(depth - 1) * share)
        return tuple(survivals)

    def first(self, tokens: int) -> Draft:
        """Return the draft of the best `tokens` tokens, which are its first tokens."""
        if tokens >= len(self):
            return self
        return replace(
            self,
            token_ids=self.token_ids[:tokens],
            parents=self.parents[:tokens],
            shares=self.shares[:tokens],
        )

    def select(self, places: Many[int]) -> Draft:
        """Return the draft of the tokens at these indices, in this order.

        Args:
            places: indices of the tokens, where every token follows its parent.
        """
        if self.is_chain:
            return self.first(len(places))
        at = {place: index for index, place in enumerate(places)} | {ROOT: ROOT}
        return replace(
            self,
            token_ids=tuple(self.token_ids[place] for place in places),
            parents=tuple(at[self.parents[place]] for place in places),
            shares=tuple(self.shares[place] for place in places) if self.shares else (),
        )

    def depth_first(self) -> Draft:
        """Return the same tree depth first, with the best child first."""
        if self.is_chain:
            return self
        children: dict[int, list[int]] = {}
        for place, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(place)
        order: list[int] = []
        ahead = children.get(ROOT, [])[::-1]
        while ahead:
            order.append(ahead.pop())
            ahead.extend(reversed(children.get(order[-1], [])))
        tree = self.select(order)
        if tree.parents == tuple(range(ROOT, len(order) - 1)):
            return replace(tree, parents=(), shares=())
        return tree

    def accepted_places(self, tokens: Many[int], *, per_row: bool = False) -> tuple[int, ...]:
        """Return the indices of the accepted tokens, from the root down.

        Args:
            tokens: the tokens that followed the sequence. With `per_row`, the token sampled in each
                row of the step: the row after the sequence, then one row per draft token.
        """
        path: list[int] = []
        place = ROOT
        while (index := place + 1 if per_row else len(path)) < len(tokens):
            child = self._child(place, tokens[index])
            if child is None:
                break
            path.append(child)
            place = child
        return tuple(path)

    def was_rejected(self, accepted: tuple[int, ...], tokens: Many[int]) -> bool:
        """Return whether the token after the accepted tokens differs from all proposed tokens."""
        last = accepted[-1] if accepted else ROOT
        proposed = any(self.parent(place) == last for place in range(last + 1, len(self)))
        return proposed and len(accepted) < len(tokens)

    def _child(self, parent: int, token: int) -> int | None:
        end = min(parent + 2, len(self)) if self.is_chain else len(self)
        for place in range(parent + 1, end):
            if self.token_ids[place] == token and self.parent(place) == parent:
                return place
        return None


NO_DRAFT: Final = Draft()
