"""Draft tokens as a chain or a tree.

A tree lists its best token first and every token after its parent. So the first n tokens of a draft
are also a draft, and the best draft of that size. A step needs the tokens depth first
(`Draft.depth_first`), which makes each branch a run of consecutive rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

PER_MILLE: Final = 1000
"""Scale of probabilities and shares in the evidence of a draft."""

ROOT: Final = -1
"""The parent of tokens that follow the sequence itself."""

PREDICTION: Final = "prediction"
"""Name of the proposer that drafts from a request's own prediction.

A worker does not announce this proposer, because it drafts for no other request.
"""


@dataclass(slots=True, unsafe_hash=True)
class Draft:
    """Proposed tokens with the proposer's evidence for them. Nothing changes a draft.

    The class is not frozen, because a frozen one takes four times as long to construct, and a step
    constructs several per sequence. It does without msgspec, because the GPU tests of kernels run
    without that package. It is hashable, so that it can be the default of a field.

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
        return _depths(self.parents) if self.parents else tuple(range(1, len(self.token_ids) + 1))

    def survivals(self, chances: Many[float]) -> tuple[float, ...]:
        """Return the probability that each token and all its ancestors are accepted.

        Args:
            chances: for each depth, the probability that a child is right if its parent was. The
                last one also applies to all greater depths.
        """
        survivals: list[float] = []
        deepest, last = len(chances), chances[-1]
        parents = self.parents or range(ROOT, len(self.token_ids) - 1)
        shares = self.shares or (1.0,) * len(parents)
        for depth, parent, share in zip(self.depths, parents, shares, strict=True):
            before = survivals[parent] if parent != ROOT else 1.0
            chance = chances[depth - 1] if depth <= deepest else last
            survivals.append(before * chance * share)
        return tuple(survivals)

    def first(self, tokens: int) -> Draft:
        """Return the draft of the best `tokens` tokens, which are its first tokens."""
        if tokens >= len(self):
            return self
        return Draft(
            self.token_ids[:tokens],
            self.parents[:tokens],
            self.shares[:tokens],
            self.evidence,
            self.agreement,
            self.distributions,
        )

    def select(self, places: Many[int]) -> Draft:
        """Return the draft of the tokens at these indices, in this order.

        Args:
            places: indices of the tokens, where every token follows its parent.
        """
        if self.is_chain:
            return self.first(len(places))
        at = {place: index for index, place in enumerate(places)} | {ROOT: ROOT}
        return self._in_order(places, tuple([at[self.parents[place]] for place in places]))

    def depth_first(self) -> Draft:
        """Return the same tree depth first, with the best child first."""
        if not self.parents:
            return self
        order, parents = _depth_first(self.parents)
        return self._in_order(order, parents)

    def _in_order(self, places: Many[int], parents: tuple[int, ...]) -> Draft:
        """Return the draft of these tokens with their new parents."""
        tokens, shares = self.token_ids, self.shares if parents else ()
        return Draft(
            tuple([tokens[place] for place in places]),
            parents,
            tuple([shares[place] for place in places]) if shares else (),
            self.evidence,
            self.agreement,
            self.distributions,
        )

    def accepted_places(self, tokens: Many[int], *, per_row: bool = False) -> tuple[int, ...]:
        """Return the indices of the accepted tokens, from the root down.

        Args:
            tokens: the tokens that followed the sequence. With `per_row`, the token sampled in each
                row of the step: the row after the sequence, then one row per draft token.
        """
        if not self.parents:
            accepted = 0
            for proposed, token in zip(self.token_ids, tokens, strict=False):
                if proposed != token:
                    break
                accepted += 1
            return tuple(range(accepted))
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
        if len(accepted) >= len(tokens):
            return False
        last = accepted[-1] if accepted else ROOT
        return last in self.parents if self.parents else last + 1 < len(self.token_ids)

    def _child(self, parent: int, token: int) -> int | None:
        """Return the index of a tree's token after `parent`, or None if no child has the token."""
        tokens, parents = self.token_ids, self.parents
        for place in range(parent + 1, len(tokens)):
            if parents[place] == parent and tokens[place] == token:
                return place
        return None


@lru_cache(maxsize=1024)
def _depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent != ROOT else 0))
    return tuple(depths)


@lru_cache(maxsize=1024)
def _depth_first(parents: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the depth-first order of a tree, and the parents in this order.

    The parents are empty if the tree is a chain. Few shapes of trees occur, so a cache saves most
    of the time.
    """
    children: dict[int, list[int]] = {}
    for place, parent in enumerate(parents):
        children.setdefault(parent, []).append(place)
    order: list[int] = []
    ahead = children.get(ROOT, [])[::-1]
    while ahead:
        order.append(ahead.pop())
        ahead.extend(reversed(children.get(order[-1], [])))
    at = {place: index for index, place in enumerate(order)} | {ROOT: ROOT}
    new = tuple(at[parents[place]] for place in order)
    return tuple(order), () if new == tuple(range(ROOT, len(order) - 1)) else new


NO_DRAFT: Final = Draft()
