"""Draft pages in borrowed blocks, which are allocated lazily and reclaimed first."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draftgate.backends.core.draft_pages import DraftPages, DraftTable
from draftgate.backends.core.kv_blocks import KvBlocks, OutOfBlocks
from tests.examples import examples

BLOCK = 4


class SharedMemory(RuleBasedStateMachine):
    """A state machine that adds, extends and releases target and draft tables in any order."""

    @initialize(
        num_blocks=st.integers(1, 24), groups=st.integers(1, 5), page_tokens=st.integers(1, 9)
    )
    def start(self, num_blocks, groups, page_tokens):
        self.blocks = KvBlocks(num_blocks, BLOCK)
        self.pages = DraftPages(self.blocks, groups, page_tokens, num_blocks + 1)
        self.groups, self.page_tokens = groups, page_tokens
        self.targets: list[list[int]] = []
        self.drafts: list[DraftTable] = []

    @rule(tokens=st.integers(0, 60))
    def target(self, tokens):
        table: list[int] = []
        self.targets.append(table)
        self._extend_target(table, tokens)

    @precondition(lambda self: self.targets)
    @rule(data=st.data(), tokens=st.integers(0, 60))
    def grow_target(self, data, tokens):
        self._extend_target(data.draw(st.sampled_from(self.targets)), tokens)

    def _extend_target(self, table, tokens):
        missing = self.blocks.blocks_for(tokens) - len(table)
        used = len({block for other in self.targets for block in other})
        if missing <= self.blocks.num_blocks - used:
            self.blocks.extend(table, tokens)  # Drafts never take memory that a target needs.
            assert len(table) * BLOCK >= tokens
        else:
            with pytest.raises(OutOfBlocks):
                self.blocks.extend(table, tokens)

    @precondition(lambda self: self.targets)
    @rule(data=st.data())
    def end_target(self, data):
        self.blocks.release(data.draw(st.sampled_from(self.targets)))

    @rule()
    def draft(self):
        self.drafts.append(DraftTable())

    @precondition(lambda self: self.drafts)
    @rule(data=st.data(), tokens=st.integers(0, 90), unread=st.integers(0, 60))
    def grow_draft(self, data, tokens, unread):
        table = data.draw(st.sampled_from(self.drafts))
        before = list(table.pages)
        targets = [list(t) for t in self.targets]
        try:
            self.pages.extend(table, tokens, unread)
            assert len(table.pages) * self.page_tokens >= tokens
        except OutOfBlocks:
            used = len({block for other in self.targets for block in other})
            pages = (self.blocks.num_blocks - used) * self.groups
            nowhere = self.blocks.num_blocks
            taken = [p for t in self.drafts for p in t.pages if p != nowhere]
            assert len(taken) == pages, "free pages were available"
        assert table.pages[: len(before)] == before
        assert self.targets == targets, "drafts take nothing from the target"

    @precondition(lambda self: self.drafts)
    @rule(data=st.data())
    def end_draft(self, data):
        self.pages.release(data.draw(st.sampled_from(self.drafts)))

    @invariant()
    def memory_is_sound(self):
        if hasattr(self, "blocks"):
            self.blocks.check_integrity(self.targets)
            self.pages.check_integrity(self.drafts)
            used = len({block for table in self.targets for block in table})
            assert self.blocks.num_free == self.blocks.num_blocks - used

    def teardown(self):
        for table in getattr(self, "drafts", []):
            self.pages.release(table)
        for table in getattr(self, "targets", []):
            self.blocks.release(table)
        self.memory_is_sound()


SharedMemory.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=30)
TestSharedMemory = SharedMemory.TestCase


def test_drafts_of_several_sequences_grow_along_groups() -> None:
    """Two draft tables that grow alternately use the same blocks as one run of pages each."""
    blocks = KvBlocks(64, BLOCK)
    pages = DraftPages(blocks, pages_per_block=2, page_tokens=4, group_pages=65)
    tables = [DraftTable(), DraftTable()]
    for tokens in range(1, 33):
        for table in tables:
            pages.extend(table, tokens)
    for table in tables:
        assert table.pages == list(range(table.pages[0], table.pages[0] + 8))
    blocks.extend([], 56 * BLOCK)  # Both drafts use 8 blocks, so 56 are free.
    assert all(len(draft.pages) == 8 for draft in tables)


def test_tables_that_grew_longest_ago_are_emptied_first() -> None:
    """A target that needs memory empties as few draft tables as possible, oldest first."""
    blocks = KvBlocks(6, BLOCK)
    pages = DraftPages(blocks, pages_per_block=1, page_tokens=4, group_pages=65)
    stale, fresh = DraftTable(), DraftTable()
    pages.extend(stale, 8)
    pages.extend(fresh, 8)
    pages.extend(stale, 12)
    fresh.valid_tokens = stale.valid_tokens = 8
    blocks.extend([], 2 * BLOCK)
    assert (len(stale.pages), stale.valid_tokens) == (3, 8)
    assert (len(fresh.pages), fresh.valid_tokens) == (0, 0)


def test_unread_tokens_take_no_pages() -> None:
    """Leading tokens that are never read share a spare page, and other tokens have pages."""
    blocks = KvBlocks(8, BLOCK)
    pages = DraftPages(blocks, pages_per_block=1, page_tokens=4, group_pages=9)
    table = DraftTable()
    pages.extend(table, 400, unread=389)
    assert table.pages[:97] == [8] * 97
    assert len(table.pages) == 100
    assert blocks.num_blocks - blocks._free.num_free == 3
    pages.release(table)
    assert blocks._free.num_free == 8


def test_free_pages_are_used_before_new_blocks() -> None:
    """A table uses a free page of a borrowed block before a new block if its run cannot
    continue."""
    blocks = KvBlocks(16, BLOCK)
    pages = DraftPages(blocks, pages_per_block=4, page_tokens=4, group_pages=17)
    draft, target = DraftTable(), list[int]()
    pages.extend(draft, 8)
    blocks.extend(target, 12 * BLOCK)
    blocks.trim(target, 11 * BLOCK)  # Two blocks are free, but neither follows the run.
    while draft.pages[-1] + 1 not in target:
        pages.extend(draft, 4 * len(draft.pages) + 4)
    lent = len(blocks._lent)
    pages.extend(draft, 4 * len(draft.pages) + 4)
    assert len(blocks._lent) == lent
    assert draft.pages[-1] >= 17
