"""Seeded inputs for the tests of the accept walk."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from draftgate.backends.core.drafts import ROOT, Draft
from draftgate.backends.engine.kernels.accept_walk_ref import (
    NO_DRAFT,
    NO_ROW,
    AcceptedWalk,
    StopRules,
)

WALK_ROWS = (1, 0, 5, 2, 65, 64, 9, 150, 33, 0, 12, 0)
"""Rows of each sequence: no draft, padding, and drafts of many sizes."""

_VOCAB = 50


def never_stop(sequences: int) -> StopRules:
    """Return rules that end no sequence."""
    return StopRules(
        torch.full((sequences,), 1 << 30, dtype=torch.int32),
        torch.empty(0, dtype=torch.int64),
        torch.zeros(sequences, dtype=torch.int8),
    )


def random_tree(tokens: int, draws: random.Random, branching: float) -> Draft:
    """Return a tree in depth-first order, in which a share of the tokens follows any
    earlier token."""
    parents: list[int] = []
    token_ids: list[int] = []
    unused: dict[int, list[int]] = {}
    for index in range(tokens):
        parent = draws.randrange(ROOT, index) if draws.random() < branching else index - 1
        siblings = unused.setdefault(parent, draws.sample(range(_VOCAB), _VOCAB))
        parents.append(parent)
        token_ids.append(siblings.pop())
    return Draft(tuple(token_ids), tuple(parents)).depth_first()


def drafted_rows(draft: Draft) -> tuple[list[int], list[int]]:
    """Return draft tokens and parents of a sequence's rows, beginning with the root."""
    parents = [draft.parent(place) + 1 for place in range(len(draft))]
    return [NO_DRAFT, *draft.token_ids], [NO_ROW, *parents]


@dataclass(frozen=True)
class WalkCase:
    """Arguments of `accept_walk`, with last rows that belong to no sequence."""

    sampled: torch.Tensor
    draft_tokens: torch.Tensor
    draft_parents: torch.Tensor
    cu_rows: torch.Tensor
    stop: StopRules
    max_rows: int

    def to(self, device: str) -> WalkCase:
        """Return the case on a device."""
        return WalkCase(
            self.sampled.to(device),
            self.draft_tokens.to(device),
            self.draft_parents.to(device),
            self.cu_rows.to(device),
            StopRules(*(tensor.to(device) for tensor in self.stop)),
            self.max_rows,
        )

    def arguments(self) -> tuple[torch.Tensor | StopRules, ...]:
        """Return the positional arguments."""
        return (self.sampled, self.draft_tokens, self.draft_parents, self.cu_rows, self.stop)

    def defined(self, walked: AcceptedWalk) -> list[list[int]]:
        """Return the defined part of a walk of this case."""
        total = int(self.cu_rows[-1])
        defined = (walked.emitted[:total], walked.num_emitted, walked.kept_rows[:total])
        return [tensor.tolist() for tensor in defined]


def walk_case(
    seed: int,
    *,
    branching: float,
    eos: Sequence[int] = (),
    budget: int = 1000,
    rows: Sequence[int] = WALK_ROWS,
) -> WalkCase:
    """Return a batch of trees in which most samples agree with a draft.

    Args:
      seed: seed of all random draws.
      branching: share of draft tokens that may follow any earlier token, or 0 for chains.
      eos: tokens that end a sequence, except every third sequence, which ignores them.
      budget: upper bound on the tokens that a sequence may still emit.
      rows: number of rows of each sequence.
    """
    draws = random.Random(seed)
    sampled: list[int] = []
    draft_tokens: list[int] = []
    draft_parents: list[int] = []
    for count in rows:
        draft = random_tree(max(count - 1, 0), draws, branching)
        tokens, parents = drafted_rows(draft)
        for row in range(count):
            agreeing = [tokens[child] for child in range(count) if parents[child] == row]
            agrees = agreeing and draws.random() < 0.95
            sampled.append(draws.choice(agreeing) if agrees else draws.randrange(_VOCAB))
        draft_tokens += tokens[:count]
        draft_parents += parents[:count]
    unowned = [7, 7, 7]
    remaining = [draws.randint(1, budget) if count else 0 for count in rows]
    # A step that is launched early may contain a sequence with no tokens left.
    remaining[2] = 0
    return WalkCase(
        torch.tensor(sampled + unowned),
        torch.tensor(draft_tokens + unowned),
        torch.tensor(draft_parents + [0] * len(unowned), dtype=torch.int32),
        torch.tensor([0, *accumulate(rows)], dtype=torch.int32),
        StopRules(
            torch.tensor(remaining, dtype=torch.int32),
            torch.tensor(eos, dtype=torch.int64),
            torch.tensor([sequence % 3 == 2 for sequence in range(len(rows))], dtype=torch.int8),
        ),
        max(rows),
    )
