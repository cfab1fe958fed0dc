"""The work list of attention: every split once, balanced programs, and bounded scratch."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.engine.kernels.attention_work_ref import AttentionWork, items_of, plan_work

_SPLIT, _TILE = 512, 64
_SPLIT_TILES = _SPLIT // _TILE


class Step(NamedTuple):
    """Query tokens, contexts and tree sizes of the sequences of a step, and its other sizes."""

    query_lens: list[int]
    context_lens: list[int]
    trees: list[int]
    padding: int
    block_tokens: int
    kv_heads: int
    window: int | None

    def work(self, programs: int, slots: int) -> AttentionWork:
        """Return the work list."""
        contexts = torch.tensor(self.context_lens, dtype=torch.int32)
        return plan_work(
            torch.tensor([0, *self.query_lens]).cumsum(0).int(),
            contexts,
            contexts - torch.tensor(self.trees, dtype=torch.int32),
            tokens=sum(self.query_lens) + self.padding,
            block_tokens=self.block_tokens,
            kv_heads=self.kv_heads,
            window=self.window,
            split_size=_SPLIT,
            key_tile=_TILE,
            programs=programs,
            slots=slots,
        )

    def splits(self) -> Counter[tuple[int, int, int, int]]:
        """Count each split of each pair once, as (sequence, first query token, head, split)."""
        found: Counter[tuple[int, int, int, int]] = Counter()
        lengths = zip(self.query_lens, self.context_lens, self.trees, strict=True)
        for sequence, (tokens, context, tree) in enumerate(lengths):
            for first in range(0, tokens, self.block_tokens):
                position = context - tokens + first
                newest = min(context, position + self.block_tokens) - 1
                oldest = 0
                if self.window is not None:
                    oldest = max(0, min(position, context - tree) - self.window + 1)
                for split in range(oldest // _SPLIT, newest // _SPLIT + 1):
                    found.update((sequence, first, head, split) for head in range(self.kv_heads))
        return found


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Draw steps of few or many sequences, with long contexts among short ones."""
    sequences = draw(st.integers(1, 40))
    tokens = draw(st.lists(st.integers(0, 40), min_size=sequences, max_size=sequences))
    context = st.integers(0, 600) | st.integers(0, 20_000)
    contexts = [length + draw(context) for length in tokens]
    return Step(
        tokens,
        contexts,
        [draw(st.integers(0, length)) for length in tokens],
        draw(st.integers(0, 20)),
        draw(st.sampled_from([4, 9, 16, 64])),
        draw(st.integers(1, 8)),
        draw(st.none() | st.integers(1, 4096)),
    )


def _walks(step: Step, work: AttentionWork) -> list[list[tuple[int, int, int, int]]]:
    """Return the splits that each program attends, in order, as in `Step.splits`."""
    records = work.blocks.tolist()
    return [
        [
            (*records[item.block][:2], item.kv_head, split)
            for item in items_of(work, program, kv_heads=step.kv_heads, split_tiles=_SPLIT_TILES)
            for split in range(item.first_split, item.end_split)
        ]
        for program in range(len(work.starts))
    ]


@given(steps(), st.integers(1, 300), st.integers(0, 20_000))
def test_every_split_belongs_to_one_program(step: Step, programs: int, slots: int) -> None:
    """The programs attend every split of every query block and head exactly once."""
    walks = _walks(step, step.work(programs, slots))
    assert Counter(split for walk in walks for split in walk) == step.splits()


@given(steps(), st.integers(1, 300))
def test_programs_are_balanced(step: Step, programs: int) -> None:
    """With enough slots, a program has less than 13/8 of its share, or less than a split more."""
    work = step.work(programs, 1 << 30)
    share = -(-step.kv_heads * int(work.blocks[:, 3].sum()) // programs)
    for program in range(programs):
        tiles = 0
        items = items_of(work, program, kv_heads=step.kv_heads, split_tiles=_SPLIT_TILES)
        for block, _, first, end, _ in items:
            first_tile, count = work.blocks[block, 2:4].tolist()
            last = min(end * _SPLIT_TILES, first_tile + count)
            tiles += last - max(first * _SPLIT_TILES, first_tile)
        assert tiles < share + max(share * 5 // 8, _SPLIT_TILES) or tiles == 0


@given(steps(), st.integers(1, 300), st.integers(0, 20_000))
def test_tokens_of_cut_blocks_have_slots_of_their_own(
    step: Step, programs: int, slots: int
) -> None:
    """Partial results fit the slots and do not overlap, and no other token has any."""
    work = step.work(programs, slots)
    used = Counter(
        slot for first, count in work.partials.tolist() for slot in range(first, first + count)
    )
    assert all(count == 1 for count in used.values())
    assert all(0 <= slot < slots for slot in used)
    bounds = [0, *torch.tensor(step.query_lens).cumsum(0).tolist()]
    expected = torch.zeros(len(work.partials), dtype=torch.int32)
    for sequence, first, first_tile, tiles, is_cut in work.blocks[work.blocks[:, 3] > 0].tolist():
        begin = bounds[sequence] + first
        end = min(begin + step.block_tokens, bounds[sequence + 1])
        splits = -(-(first_tile + tiles) // _SPLIT_TILES) - first_tile // _SPLIT_TILES
        expected[begin:end] = splits * is_cut
    assert torch.equal(work.partials[:, 1], expected)


@pytest.mark.parametrize(
    ("contexts", "longest_walk", "cut"),
    [
        ([1024] * 63 + [32_768], 6, 1),
        ([2048] * 25 + [131_072], 12, 1),
        ([8192] * 64, 32, 0),
        ([32_768], 2, 1),
        ([512] * 4, 1, 0),
    ],
)
def test_longest_walk_of_a_decode(contexts: list[int], longest_walk: int, cut: int) -> None:
    """A long context among short ones does not occupy one program for all its splits.

    The step has 8 key-value heads of 4 query heads, and the programs of 132 multiprocessors.
    """
    ones = [1] * len(contexts)
    step = Step(ones, contexts, [0] * len(contexts), 0, 16, 8, None)
    work = step.work(264, 8065)
    assert max(map(len, _walks(step, work))) == longest_walk
    assert int(work.blocks[:, 4].sum()) == cut
