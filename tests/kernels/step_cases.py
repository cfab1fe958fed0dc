"""Inputs of the tests of a speculative step's kernels, from seeded generators."""

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
    Acceptance,
    StopRules,
    TokenHistory,
)

WALK_ROWS = (1, 0, 5, 2, 65, 64, 9, 150, 33, 0, 12, 0)
"""Rows of the sequences of a step: without drafts, padding, and drafts of many sizes."""

_VOCAB = 50
_NOWHERE = 1 << 20


def never_stop(sequences: int) -> StopRules:
    """Returns rules under which no sequence is finished."""
    return StopRules(
        torch.full((sequences,), 1 << 30, dtype=torch.int32),
        torch.empty(0, dtype=torch.int64),
        torch.zeros(sequences, dtype=torch.int8),
    )


def random_tree(tokens: int, draws: random.Random, branching: float) -> Draft:
    """Returns a tree laid out depth first; a share of its tokens follows any earlier one."""
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
    """Returns draft tokens and parents of a sequence's rows, the root's first."""
    parents = [draft.parent(place) + 1 for place in range(len(draft))]
    return [NO_DRAFT, *draft.token_ids], [NO_ROW, *parents]


@dataclass(frozen=True)
class WalkCase:
    """Arguments of `accept_walk`, a few rows of no sequence among them."""

    sampled: torch.Tensor
    draft_tokens: torch.Tensor
    draft_parents: torch.Tensor
    cu_rows: torch.Tensor
    stop: StopRules
    seq_lens: torch.Tensor
    history: TokenHistory
    max_rows: int

    def to(self, device: str) -> WalkCase:
        """Returns the case on a device, what the walk modifies a copy."""
        return WalkCase(
            self.sampled.to(device),
            self.draft_tokens.to(device),
            self.draft_parents.to(device),
            self.cu_rows.to(device),
            StopRules(*(tensor.to(device) for tensor in self.stop)),
            self.seq_lens.clone().to(device),
            TokenHistory(self.history.tokens.clone().to(device), self.history.rows.to(device)),
            self.max_rows,
        )

    def arguments(self) -> tuple[torch.Tensor | StopRules, ...]:
        """Returns the positional arguments."""
        rows = (self.sampled, self.draft_tokens, self.draft_parents, self.cu_rows)
        return (*rows, self.stop, self.seq_lens)

    def outcome(self, walked: Acceptance) -> list[list[int]]:
        """Returns all that a walk of this case has made: defined results and modified state."""
        total = int(self.cu_rows[-1])
        made = [
            walked.emitted[:total],
            walked.num_emitted,
            walked.finished,
            walked.kept_rows[:total],
            self.seq_lens,
            self.history.tokens.view(-1),
        ]
        return [tensor.tolist() for tensor in made]


def walk_case(
    seed: int,
    *,
    branching: float,
    eos: Sequence[int] = (),
    budget: int = 1000,
    rows: Sequence[int] = WALK_ROWS,
) -> WalkCase:
    """Returns a batch of trees along which most samples agree with a draft.

    Args:
      seed: of all draws.
      branching: share of draft tokens that may follow any earlier one; 0 makes chains.
      eos: tokens that end a sequence, unless it ignores them, as every third does.
      budget: most tokens that a sequence may still emit.
      rows: of each sequence.
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
    sequences = len(rows)
    places = draws.sample(range(sequences + 3), sequences)
    remaining = [draws.randint(1, budget) if count else 0 for count in rows]
    # A sequence of a step that was begun too early may have nothing left.
    remaining[2] = 0
    return WalkCase(
        torch.tensor(sampled + unowned),
        torch.tensor(draft_tokens + unowned),
        torch.tensor(draft_parents + [0] * len(unowned), dtype=torch.int32),
        torch.tensor([0, *accumulate(rows)], dtype=torch.int32),
        StopRules(
            torch.tensor(remaining, dtype=torch.int32),
            torch.tensor(eos, dtype=torch.int64),
            torch.tensor([sequence % 3 == 2 for sequence in range(sequences)], dtype=torch.int8),
        ),
        torch.tensor([draws.randint(1, 30) for _ in rows], dtype=torch.int32),
        TokenHistory(
            torch.full((sequences + 3, 200), -7, dtype=torch.int32),
            torch.tensor(
                [place if count else _NOWHERE for place, count in zip(places, rows, strict=True)],
                dtype=torch.int32,
            ),
        ),
        max(rows),
    )


@dataclass(frozen=True)
class TrimCase:
    """Arguments of `trim_drafts` but the budget."""

    survivals: torch.Tensor
    valid: torch.Tensor
    active: torch.Tensor

    def arguments(self, budget: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
        """Returns all arguments on a device."""
        tensors = (self.survivals, self.valid, self.active, torch.tensor(budget, dtype=torch.int32))
        return tuple(tensor.to(device) for tensor in tensors)

    def slots(self) -> int:
        """Returns how many slots there are."""
        exists = torch.arange(self.survivals.shape[1]) < self.valid[:, None]
        return int((exists & (self.survivals > 0) & (self.active[:, None] != 0)).sum())


def trim_case(sequences: int, max_slots: int, seed: int, levels: int = 0) -> TrimCase:
    """Returns falling survivals, of which some are 0, and of few levels if any are given."""
    generator = torch.Generator().manual_seed(seed)
    survivals = torch.rand((sequences, max_slots), generator=generator)
    if levels:
        survivals = (survivals * levels).floor() / levels
    survivals = survivals.sort(dim=1, descending=True).values
    valid = torch.randint(max_slots + 1, (sequences,), generator=generator, dtype=torch.int32)
    active = torch.rand(sequences, generator=generator) < 0.8
    # What lies behind the valid slots may be anything.
    behind = torch.arange(max_slots) >= valid[:, None]
    return TrimCase(survivals.masked_fill(behind, 9.0), valid, active.to(torch.int8))


def budgets(case: TrimCase) -> list[int]:
    """Returns budgets around all that matters of a case."""
    total = case.slots()
    return [-3, 0, 1, total // 3, total // 2, total - 1, total, total + 5]


@dataclass(frozen=True)
class HistoryCase:
    """Positional arguments of `ngram_scan`."""

    history: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor

    def arguments(self, device: str = "cpu") -> tuple[torch.Tensor, ...]:
        """Returns the arguments on a device."""
        return tuple(tensor.to(device) for tensor in (self.history, self.rows, self.lengths))


def history_case(
    lengths: Sequence[int], max_len: int, alphabet: int, seed: int, noise: float = 0.02
) -> HistoryCase:
    """Returns texts over a few tokens that repeat what they said before, but for some noise."""
    generator = torch.Generator().manual_seed(seed)
    sequences = len(lengths)
    shape = (sequences + 2, max_len)
    drawn = torch.randint(alphabet, shape, generator=generator, dtype=torch.int32)
    periods = torch.randint(3, max(max_len // 2, 4), (shape[0], 1), generator=generator)
    repeated = drawn.gather(1, torch.arange(max_len) % periods)
    keeps = torch.rand(shape, generator=generator) >= noise
    rows = torch.randperm(shape[0], generator=generator)[:sequences].to(torch.int32)
    count = torch.tensor(lengths, dtype=torch.int32)
    rows[count == 0] = _NOWHERE
    return HistoryCase(torch.where(keeps, repeated, drawn), rows, count)
