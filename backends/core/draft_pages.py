"""KV pages of draft models, in blocks borrowed from the target model's memory.

A draft model's keys and values are smaller, so a borrowed block holds several pages, one per
*group*. A page has the number `group * group_pages + block`. Pages of one group in neighbouring
blocks are neighbours in memory. So a table grows along its group and can be read as a view, while
other tables use the same blocks in other groups. A group has more page numbers than the memory has
blocks. This slack separates the last page of a group from the first page of the next group.

Draft pages are allocated lazily and released first. When sequences need the blocks, tables are
emptied, beginning with the table that grew longest ago. The draft model then computes the missing
part again or proposes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from draftgate.backends.core.kv_blocks import KvBlocks


@dataclass(slots=True, eq=False)
class DraftTable:
    """The draft pages of a sequence.

    Attributes:
        pages: page numbers in order, where page i holds the tokens from `i * page_tokens` on.
        valid_tokens: number of leading tokens with computed keys and values, set by the owner.
    """

    pages: list[int] = field(default_factory=list)
    valid_tokens: int = 0


class DraftPages:
    """Allocates draft pages in blocks of the target model."""

    def __init__(
        self, blocks: KvBlocks, pages_per_block: int, page_tokens: int, group_pages: int
    ) -> None:
        """Start without any block.

        Args:
            blocks: allocator that lends the blocks.
            pages_per_block: number of groups, at least 1.
            page_tokens: tokens per page.
            group_pages: page numbers per group, more than the number of blocks.
        """
        self._blocks = blocks
        self._groups = pages_per_block
        self._group_pages = group_pages
        self._slack_page = group_pages - 1
        self._page_tokens = page_tokens
        self._free: dict[int, set[int]] = {}  # free groups, by borrowed block
        self._tables: dict[int, DraftTable] = {}  # by id(), in order of their last growth
        blocks.lend_to(self.give_back)

    def extend(self, table: DraftTable, tokens: int, unread: int = 0) -> None:
        """Extend the table to hold at least `tokens` tokens.

        Args:
            unread: number of leading tokens that are never read or written. All new pages for only
                these tokens share one page in the slack.

        Raises:
            OutOfBlocks: no block is left to borrow. The table keeps the pages that it got.
        """
        self._tables.pop(id(table), None)
        self._tables[id(table)] = table
        missing = range(len(table.pages) + 1, -(-tokens // self._page_tokens) + 1)
        for page in missing:
            if page * self._page_tokens <= unread:
                table.pages.append(self._slack_page)
            else:
                table.pages.append(self._take(table.pages[-1] if table.pages else None))

    def release(self, table: DraftTable) -> None:
        """Release all pages of the table."""
        self._tables.pop(id(table), None)
        for page in filter(self._is_real, table.pages):
            group, block = divmod(page, self._group_pages)
            self._free[block].add(group)
            if len(self._free[block]) == self._groups:
                del self._free[block]
                self._blocks.take_back(block)
        table.pages.clear()
        table.valid_tokens = 0

    def give_back(self, blocks: int) -> None:
        """Empty tables until enough blocks are returned, or no table is left."""
        wanted = len(self._free) - blocks
        while self._tables and len(self._free) > wanted:
            self.release(next(iter(self._tables.values())))

    def _take(self, last: int | None) -> int:
        """Take the page after `last` in its group if possible, or else any free page.

        A block is borrowed only to continue a run, or if no page is free.
        """
        group, following = 0, None
        if last is not None and self._is_real(last):
            group, block = divmod(last, self._group_pages)
            following = block + 1
            if group in self._free.get(following, ()):
                return self._pick(following, group)
        if following is None or not self._blocks.can_lend(following):
            page = self._any_free()
            if page is not None:
                return page
        return self._borrow(following, group)

    def _any_free(self) -> int | None:
        block = min((block for block, groups in self._free.items() if groups), default=None)
        return None if block is None else self._pick(block, min(self._free[block]))

    def _is_real(self, page: int) -> bool:
        return page != self._slack_page

    def _borrow(self, after: int | None, group: int) -> int:
        block = self._blocks.lend(after)
        self._free[block] = set(range(self._groups))
        return self._pick(block, group)

    def _pick(self, block: int, group: int) -> int:
        self._free[block].remove(group)
        return group * self._group_pages + block

    def check_integrity(self, tables: list[DraftTable]) -> None:
        """Check that every page of a borrowed block is free or in exactly one of `tables`.

        Raises:
            AssertionError: a page is lost or owned twice.
        """
        pages = self._group_pages
        free = [group * pages + block for block, groups in self._free.items() for group in groups]
        owned = [page for table in tables for page in table.pages if self._is_real(page)]
        every = [group * pages + block for block in self._free for group in range(self._groups)]
        assert sorted(free + owned) == sorted(every), "a draft page is lost or doubled"
