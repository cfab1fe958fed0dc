"""The reference of the accept walk, compared with the host's walk of each draft."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.engine.kernels import accept_walk_ref
from draftgate.backends.engine.kernels.accept_walk_ref import NO_DRAFT
from tests.kernels.walk_cases import drafted_rows, never_stop, random_tree, walk_case

_TREES = st.tuples(st.integers(0, 12), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 1 << 30))


@given(st.lists(st.none() | _TREES, max_size=5))
def test_batched_walk_equals_the_walk_of_each_draft(
    trees: list[tuple[int, float, int] | None],
) -> None:
    """The batched walk equals the host's walk of each draft and emits nothing for padding."""
    draws = random.Random(len(trees))
    sampled: list[list[int]] = []
    drafts, parents, paths = [], [], []
    for tree in trees:
        if tree is None:
            sampled.append([])
            paths.append(None)
            continue
        tokens, branching, seed = tree
        draft = random_tree(tokens, random.Random(seed), branching)
        own_drafts, own_parents = drafted_rows(draft)
        # Most samples agree with a draft, so that walks are long.
        sampled.append([draws.choice([*own_drafts[1:], 77]) for _ in own_drafts])
        drafts += own_drafts
        parents += own_parents
        paths.append(draft.accepted_places(sampled[-1], per_row=True))
    cu_rows = torch.tensor([0, *map(len, sampled)]).cumsum(0).to(torch.int32)
    walked = accept_walk_ref.accept_walk(
        torch.tensor([token for own in sampled for token in own], dtype=torch.int64),
        torch.tensor(drafts, dtype=torch.int64),
        torch.tensor(parents, dtype=torch.int32),
        cu_rows,
        never_stop(len(trees)),
        max_rows=13,
    )
    for index, (path, own) in enumerate(zip(paths, sampled, strict=True)):
        rows = [] if path is None else [0, *(place + 1 for place in path)]
        unused = [-1] * (len(own) - len(rows))
        place = slice(int(cu_rows[index]), int(cu_rows[index + 1]))
        assert walked.num_emitted[index] == len(rows)
        assert walked.emitted[place].tolist() == [own[row] for row in rows] + unused
        assert walked.kept_rows[place].tolist() == rows + unused


@pytest.mark.parametrize("seed", range(4))
def test_walk_stops_at_the_first_rule(seed: int) -> None:
    """The walk ends after an end token or when no tokens remain, whichever is first."""
    case = walk_case(seed, branching=0.3, eos=range(0, 50, 5), budget=8)
    sequences = len(case.cu_rows) - 1
    free = accept_walk_ref.accept_walk(
        *case.arguments()[:4], never_stop(sequences), max_rows=case.max_rows
    )
    walked = accept_walk_ref.accept_walk(*case.arguments(), max_rows=case.max_rows)
    outcomes = set()
    for sequence, (begin, end) in enumerate(
        zip(case.cu_rows[:-1].tolist(), case.cu_rows[1:].tolist(), strict=True)
    ):
        text = free.emitted[begin:end][: free.num_emitted[sequence]].tolist()
        ends = [] if case.stop.ignore_eos[sequence] else [t % 5 == 0 for t in text]
        count = min([int(case.stop.remaining[sequence]), *(i + 1 for i, e in enumerate(ends) if e)])
        kept = text[:count]
        outcomes.add((begin < end and count <= len(text), bool(kept)))
        assert walked.emitted[begin:end].tolist() == kept + [NO_DRAFT] * (end - begin - len(kept))
        assert walked.num_emitted[sequence] == len(kept)
    assert len(outcomes) >= 3


def test_too_many_rows_are_rejected() -> None:
    """The reference rejects more rows than `max_rows`, which the kernel would cut silently."""
    case = walk_case(0, branching=0.0)
    with pytest.raises(ValueError, match="150 rows"):
        accept_walk_ref.accept_walk(*case.arguments(), max_rows=149)
