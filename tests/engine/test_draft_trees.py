"""The engine computes a draft tree with the same logits, keys and values as the accepted chain."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from draftgate.backends.core.drafts import ROOT, Draft
from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS
from tests.engine.step_logits import Table, logits_in_steps, shipped_runner

BLOCKS = 64
VOCAB = 4096

TREE = Draft(
    (11, 12, 13, 14, 15, 16, 17, 18),
    (ROOT, 0, ROOT, 1, 2, 0, 5, 2),
)
"""A tree with several branches and the best token first."""


def path_to(draft: Draft, place: int) -> list[int]:
    path = []
    while place != ROOT:
        path.append(draft.token_ids[place])
        place = draft.parent(place)
    return path[::-1]


def context(tokens: int) -> list[int]:
    rng = random.Random(tokens)
    return [rng.randrange(VOCAB) for _ in range(tokens)]


def table(*, scattered: bool) -> Table:
    blocks = list(range(BLOCKS))
    if scattered:
        random.Random(1).shuffle(blocks)
    return Table(blocks)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("tokens", [1, 20, 250, 255, 256, 300])
def test_every_row_of_a_tree_has_the_bits_of_its_path(tokens: int, *, scattered: bool) -> None:
    """A row of a tree has the same bits as its path in a chain, also at tile boundaries and in
    scattered blocks."""
    runner, known = shipped_runner(BLOCKS), context(tokens)
    draft = TREE.depth_first()
    blocks = table(scattered=scattered)
    if tokens > 1:
        logits_in_steps(runner, blocks, known[:-1], [0, tokens - 1])
    work = SequenceWork(blocks, tokens - 1, (known[-1],), True, draft)
    rows = runner.logits(StepPlan((work,)))
    for place in (ROOT, *range(len(draft))):
        text = known + path_to(draft, place)
        alone = shipped_runner(BLOCKS)
        edges = [0, *range(tokens, len(text) + 1)]
        wanted = logits_in_steps(alone, table(scattered=False), text, edges)[-1]
        assert torch.equal(rows[place + 1], wanted)


@pytest.mark.parametrize("tokens", [20, 254])
def test_accepted_branch_is_moved_to_the_slots_of_a_chain(tokens: int) -> None:
    """A decode has the same bits after an accepted branch as without drafts."""
    known, draft = context(tokens), TREE.depth_first()
    last = max(range(len(draft)), key=lambda place: (draft.depths[place], place))
    text = known + path_to(draft, last)
    runner, blocks = shipped_runner(BLOCKS), table(scattered=False)
    logits_in_steps(runner, blocks, known[:-1], [0, tokens - 1])
    plan = StepPlan((SequenceWork(blocks, tokens - 1, (known[-1],), True, draft),))
    runner.logits(plan)
    accepted = draft.accepted_places(text[tokens:])
    assert any(place != depth for depth, place in enumerate(accepted)), "nothing has to move"
    runner._compact(plan, _walks(accepted))

    follow = [7, 8, 9]
    edges = [len(text), len(text) + 1, len(text) + 3]
    after = logits_in_steps(runner, blocks, text + follow, edges)
    alone = shipped_runner(BLOCKS)
    everything = logits_in_steps(alone, table(scattered=False), text + follow, [0, *edges])
    assert torch.equal(after, everything[len(text) :])


def _walks(accepted: tuple[int, ...]):
    from draftgate.backends.engine.sampler import Walks

    return Walks([accepted], [(0,) * (len(accepted) + 1)])


def test_trees_share_a_step_with_chains_decodes_and_chunks() -> None:
    """Every row of a mixed step has the same bits as alone."""
    known, draft = context(40), TREE.depth_first()
    per_sequence = BLOCKS // 4
    tables = [
        Table(list(range(i * per_sequence, (i + 1) * per_sequence)))
        for i in range(BLOCKS // per_sequence)
    ]
    assert len(known) + len(draft) < per_sequence * BLOCK_TOKENS

    def mixed_work() -> list[SequenceWork]:
        last = (known[-1],)
        return [
            SequenceWork(tables[0], 39, last, True, draft),
            SequenceWork(tables[1], 39, last, True, Draft((5, 6))),
            SequenceWork(tables[2], 39, last, True),
            SequenceWork(tables[3], 0, tuple(known), False),
        ]

    def runner_with_contexts():
        runner = shipped_runner(BLOCKS)
        for blocks in tables[:3]:
            logits_in_steps(runner, blocks, known[:-1], [0, 39])
        return runner

    in_batch = runner_with_contexts().logits(StepPlan(tuple(mixed_work())))
    alone = [
        runner_with_contexts().logits(StepPlan((work,))) for work in mixed_work() if work.samples
    ]
    bounds = [0, *torch.tensor([len(rows) for rows in alone]).cumsum(0).tolist()]
    for rows, (first, end) in zip(alone, pairwise(bounds), strict=True):
        assert torch.equal(in_batch[first:end], rows)
    assert bounds[-1] == len(in_batch)
