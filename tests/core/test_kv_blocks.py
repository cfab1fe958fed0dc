"""The allocator of KV blocks."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draftgate.backends.core.kv_blocks import KvBlocks, OutOfBlocks
from tests.examples import examples

BLOCK = 4


def largest_gap(blocks: KvBlocks, tables: list[list[int]]) -> int:
    """Return the longest run of free blocks, counted independently of the allocator."""
    owned = {block for table in tables for block in table}
    longest = run = 0
    for block in range(blocks.num_blocks):
        run = 0 if block in owned else run + 1
        longest = max(longest, run)
    return longest


def is_run(table: list[int]) -> bool:
    return table == list(range(table[0], table[0] + len(table)))


class BlockMachine(RuleBasedStateMachine):
    """A state machine that adds, extends, trims and releases tables in any order."""

    @initialize(num_blocks=st.integers(1, 40))
    def start(self, num_blocks):
        self.blocks = KvBlocks(num_blocks, BLOCK)
        self.tables: list[list[int]] = []

    @rule(tokens=st.integers(0, 60))
    def newcomer(self, tokens):
        table: list[int] = []
        wanted = self.blocks.blocks_for(tokens)
        fits_a_gap = wanted <= largest_gap(self.blocks, self.tables)
        self._extend(table, tokens)
        self.tables.append(table)
        if table and fits_a_gap:
            assert is_run(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tokens=st.integers(0, 80))
    def grow(self, data, tokens):
        table = data.draw(st.sampled_from(self.tables))
        before = list(table)
        missing = self.blocks.blocks_for(tokens) - len(table)
        owned = {block for other in self.tables for block in other}
        wanted = range(before[-1] + 1, before[-1] + 1 + missing) if before else range(0)
        is_free = bool(wanted) and wanted.stop <= self.blocks.num_blocks and not owned & set(wanted)
        self._extend(table, tokens)
        assert table[: len(before)] == before
        if is_free:
            assert table == before + list(wanted)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tokens=st.integers(0, 80))
    def shrink(self, data, tokens):
        table = data.draw(st.sampled_from(self.tables))
        before = list(table)
        self.blocks.trim(table, tokens)
        assert table == before[: self.blocks.blocks_for(tokens)]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def leave(self, data):
        table = data.draw(st.sampled_from(self.tables))
        self.blocks.release(table)
        assert table == []

    @rule()
    def expire(self):
        self.blocks.expire_unused()

    @invariant()
    def nothing_is_lost_or_doubled(self):
        self.blocks.check_integrity(self.tables)

    def teardown(self):
        for table in getattr(self, "tables", []):
            self.blocks.release(table)
        if hasattr(self, "blocks"):
            self.blocks.check_integrity([])
            assert self.blocks.num_free == self.blocks.num_blocks

    def _extend(self, table, tokens):
        before, free = list(table), self.blocks.num_free
        missing = max(0, self.blocks.blocks_for(tokens) - len(table))
        if missing > free:
            with pytest.raises(OutOfBlocks):
                self.blocks.extend(table, tokens)
            assert table == before
            assert self.blocks.num_free == free
        else:
            self.blocks.extend(table, tokens)
            assert len(table) == len(before) + missing
            assert self.blocks.num_free == free - missing


BlockMachine.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=30)
TestBlocks = BlockMachine.TestCase


def test_sequences_that_grow_in_turns_stay_contiguous() -> None:
    """Two growing sequences keep one run of blocks each while half of the memory is unused."""
    blocks = KvBlocks(64, BLOCK)
    tables: list[list[int]] = [[], []]
    for tokens in range(1, 16 * BLOCK + 1):
        for table in tables:
            blocks.extend(table, tokens)
    assert all(is_run(table) for table in tables)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4)])
def test_pool_needs_a_block_and_a_token(sizes: tuple[int, int]) -> None:
    """A pool has at least one block with at least one token."""
    with pytest.raises(ValueError, match="at least 1"):
        KvBlocks(*sizes)


def test_integrity_check_sees_a_block_owned_twice() -> None:
    """The integrity check of all other tests finds doubled and lost blocks."""
    blocks = KvBlocks(4, BLOCK)
    table: list[int] = []
    blocks.extend(table, 2 * BLOCK)
    with pytest.raises(AssertionError, match="lost or doubled"):
        blocks.check_integrity([table, table[:1]])
    with pytest.raises(AssertionError, match="lost or doubled"):
        blocks.check_integrity([])
