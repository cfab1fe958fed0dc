"""Drafts: what may follow a sequence, as a chain or a tree, and the protocol of those who propose.

A tree is written best token first, each behind its parent, so any number of leading tokens is a
tree itself: who shortens a draft keeps the best of it. In a step it is laid out depth first, so
each branch is a run of rows (`Draft.laid_out`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Final, Protocol

from draftgate.backends.core.sequence import Sequence

ROOT: Final = -1
"""The parent of tokens that follow the sequence itself."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens with the proposer's evidence for them.

    Attributes:
        token_ids: the tokens; children of one parent are all different.
        parents: of each token, the place in `token_ids` of the one it follows, or `ROOT`; every
            parent stands before its children. Empty for a chain, where each follows the last.
        shares: of each token, the proposer's guess of how likely it is the one if any child of its
            parent is right; siblings add up to at most 1. Empty where each is the only child.
        evidence: what the proposer has to show for the draft, on a scale of its own: for n-gram the
            length of the match, for a model per mille of its confidence in the first token.
        law: the distributions the tokens were drawn from, for `verify: rejection`: probabilities
            [len(token_ids) or more, vocab_size], in whatever form the executor of this proposer
            reads. None for tokens that were not drawn; with a law a draft is a chain.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    evidence: int = 0
    law: object = None

    def __len__(self) -> int:
        """Return the number of tokens: the slots they would take."""
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before it."""
        return not self.parents

    def parent(self, index: int) -> int:
        """Return the place of the token that this one follows, or `ROOT`."""
        return self.parents[index] if self.parents else index - 1

    @property
    def depths(self) -> tuple[int, ...]:
        """How many tokens there are from the sequence's end to each token, itself included."""
        if self.is_chain:
            return tuple(range(1, len(self) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent != ROOT else 0))
        return tuple(depths)

    def survivals(self, chance: Callable[[int], float]) -> tuple[float, ...]:
        """Return the chance of each token that it and all before it are accepted.

        Args:
            chance: of one of the children being right where their parent was, by their place
                behind the sequence, from 0.
        """
        depths = self.depths
        survivals: list[float] = []
        for index in range(len(self)):
            parent = self.parent(index)
            before = survivals[parent] if parent != ROOT else 1.0
            survivals.append(
                before * chance(depths[index] - 1) * (self.shares[index] if self.shares else 1.0)
            )
        return tuple(survivals)

    def first(self, tokens: int) -> Draft:
        """Return the draft of the best tokens."""
        if tokens >= len(self):
            return self
        return Draft(
            self.token_ids[:tokens],
            self.parents[:tokens],
            self.shares[:tokens],
            self.evidence,
            self.law,
        )

    def pick(self, places: Many[int]) -> Draft:
        """Return the draft of the tokens at these places, in this order.

        Args:
            places: each behind that of its parent.
        """
        if self.is_chain:
            return self.first(len(places))
        at = {place: index for index, place in enumerate(places)} | {ROOT: ROOT}
        return Draft(
            tuple(self.token_ids[place] for place in places),
            tuple(at[self.parents[place]] for place in places),
            tuple(self.shares[place] for place in places) if self.shares else (),
            self.evidence,
            self.law,
        )

    def laid_out(self) -> Draft:
        """Return the same tree depth first, the best child first: branches are runs."""
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
        picked = self.pick(order)
        if picked.parents == tuple(range(ROOT, len(order) - 1)):
            return Draft(picked.token_ids, (), (), self.evidence, self.law)
        return picked

    def walk(self, tokens: Many[int]) -> tuple[int, ...]:
        """Return the places of the tokens that agree with those that came, from the first on."""
        path: list[int] = []
        at = ROOT
        for token in tokens:
            following = self._child(at, token)
            if following is None:
                break
            path.append(following)
            at = following
        return tuple(path)

    def rejects(self, path: tuple[int, ...], tokens: Many[int]) -> bool:
        """Return whether a token came behind a path which is not what was proposed there."""
        end = path[-1] if path else ROOT
        proposed = any(self.parent(index) == end for index in range(end + 1, len(self)))
        return proposed and len(path) < len(tokens)

    def accepted(self, rows: Many[int]) -> tuple[int, ...]:
        """Return the places of the accepted tokens: from each row to the child that equals it.

        Args:
            rows: the token drawn behind the sequence, then those behind each token of the draft.
        """
        path: list[int] = []
        at = ROOT
        while (following := self._child(at, rows[at + 1])) is not None:
            path.append(following)
            at = following
        return tuple(path)

    def _child(self, parent: int, token: int) -> int | None:
        if self.is_chain:
            places = range(parent + 1, min(parent + 2, len(self)))
        else:
            places = range(parent + 1, len(self))
        for place in places:
            if self.token_ids[place] == token and self.parent(place) == parent:
                return place
        return None


NO_DRAFT: Final = Draft()


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence that may get a draft of up to `max_tokens` tokens."""

    sequence: Sequence
    max_tokens: int


class Proposer(Protocol):
    """Proposes continuations. Keeps its own state per sequence; belongs to one worker."""

    def depth_s(self, sequences: int) -> float:
        """Return the predicted seconds of drafting one token deeper for that many sequences.

        0 for a proposer that looks drafts up: it proposes before anybody decides how many slots to
        verify. Others are asked for what was decided, since each depth costs them a forward pass.
        """
        ...

    def catch_up_s(self, sequence: Sequence) -> float:
        """Return the predicted seconds of computing what it missed of a sequence, to draft for it.

        0 for a proposer that keeps nothing, or looks drafts up.
        """
        ...

    def propose(self, requests: Many[DraftRequest]) -> Many[Draft]:
        """Return a draft for each sequence; an empty one where there is nothing to propose.

        Any sequence may come at any time, also after a pause, and must be caught up with. Where
        drafting costs something, the sequence's block table has room for the drafts behind its
        pending tokens.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for the sequence; it has finished. Idempotent."""
        ...
