"""KV pages of draft models, in blocks borrowed from the target's memory.

A draft model's keys and values are smaller, so a borrowed block holds several pages: one for each
*group*, page `group * num_blocks + block`. Pages of one group in neighbouring blocks are
neighbours in memory, so a table grows along its group and can be read as a view, while others use
the same blocks along other groups.

Draft pages come lazily and go first: when sequences need the blocks, tables are emptied, the one
that grew longest ago first. A draft model then computes what is missing again, or does without.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from backends.core.kv_blocks import KvBlocks, OutOfBlocks


@dataclass(slots=True, eq=False)
class DraftTable:
    """A sequence's draft pages.

    Attributes:
        pages: in order; page i holds tokens `i * page_tokens` and on.
        valid_tokens: leading tokens whose draft keys and values are there; the owner keeps it up.
    """

    pages: list[int] = field(default_factory=list)
    valid_tokens: int = 0


class DraftPages:
    """Allocator of draft pages on top of the target's blocks."""

    def __init__(self, blocks: KvBlocks, pages_per_block: int, page_tokens: int) -> None:
        """Borrow nothing yet.

        Args:
            blocks: whom to borrow from.
            pages_per_block: groups, at least 1.
            page_tokens: tokens of the draft model that a page holds.
        """
        self._blocks = blocks
        self._groups = pages_per_block
        self._page_tokens = page_tokens
        self._free: dict[int, set[int]] = {}  # borrowed block -> its free groups
        self._tables: dict[int, DraftTable] = {}  # by id, the one that grew longest ago first
        blocks.lend_to(self.give_back)

    def extend(self, table: DraftTable, tokens: int) -> None:
        """Make the table hold `tokens` tokens; no-op if it does already.

        Raises:
            OutOfBlocks: nothing is left to borrow; the table keeps what it got.
        """
        self._tables.pop(id(table), None)
        self._tables[id(table)] = table
        while len(table.pages) * self._page_tokens < tokens:
            table.pages.append(self._take(table.pages[-1] if table.pages else None))

    def release(self, table: DraftTable) -> None:
        """Give back all pages of the table and empty it."""
        self._tables.pop(id(table), None)
        for page in table.pages:
            group, block = divmod(page, self._blocks.num_blocks)
            self._free[block].add(group)
            if len(self._free[block]) == self._groups:
                del self._free[block]
                self._blocks.take_back(block)
        table.pages.clear()
        table.valid_tokens = 0

    def give_back(self, blocks: int) -> None:
        """Empty tables until that many blocks are given back, or none is left."""
        wanted = len(self._free) - blocks
        while self._tables and len(self._free) > wanted:
            self.release(next(iter(self._tables.values())))

    def _take(self, last: int | None) -> int:
        """Take the page behind `last` in its group if that can be had, else any."""
        if last is None:
            page = self._any_free()
            return self._borrow(None, 0) if page is None else page
        group, block = divmod(last, self._blocks.num_blocks)
        if group in self._free.get(block + 1, ()):
            return self._pick(block + 1, group)
        try:
            return self._borrow(block + 1, group)
        except OutOfBlocks:
            page = self._any_free()
            if page is None:
                raise
            return page

    def _any_free(self) -> int | None:
        block = min((block for block, groups in self._free.items() if groups), default=None)
        return None if block is None else self._pick(block, min(self._free[block]))

    def _borrow(self, after: int | None, group: int) -> int:
        block = self._blocks.lend(after)
        self._free[block] = set(range(self._groups))
        return self._pick(block, group)

    def _pick(self, block: int, group: int) -> int:
        self._free[block].remove(group)
        return group * self._blocks.num_blocks + block

    def check_integrity(self, tables: list[DraftTable]) -> None:
        """Check that every page of a borrowed block is free or in exactly one of `tables`.

        Raises:
            AssertionError: a page is lost or owned twice.
        """
        num_blocks = self._blocks.num_blocks
        free = [group * num_blocks + block for block, gs in self._free.items() for group in gs]
        owned = [page for table in tables for page in table.pages]
        every = [g * num_blocks + block for block in self._free for g in range(self._groups)]
        assert sorted(free + owned) == sorted(every), "a draft page is lost or doubled"
