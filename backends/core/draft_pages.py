"""KV pages of draft models, in blocks borrowed from the target's memory.

A draft model's keys and values are smaller, so a borrowed block holds several pages: one for each
*group*, page `group * group_pages + block`. Pages of one group in neighbouring blocks are
neighbours in memory, so a table grows along its group and can be read as a view, while others use
the same blocks along other groups. A group has more pages than there are blocks (the pool's slack),
so the last page of one and the first of the next are not taken for neighbours.

Draft pages come lazily and go first: when sequences need the blocks, tables are emptied, the one
that grew longest ago first. A draft model then computes what is missing again, or does without.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from draftgate.backends.core.kv_blocks import KvBlocks


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

    def __init__(
        self, blocks: KvBlocks, pages_per_block: int, page_tokens: int, group_pages: int
    ) -> None:
        """Borrow nothing yet.

        Args:
            blocks: whom to borrow from.
            pages_per_block: groups, at least 1.
            page_tokens: tokens of the draft model that a page holds.
            group_pages: pages of a group, more than there are blocks.
        """
        self._blocks = blocks
        self._groups = pages_per_block
        self._group_pages = group_pages
        self._nowhere = group_pages - 1
        self._page_tokens = page_tokens
        self._free: dict[int, set[int]] = {}  # borrowed block -> its free groups
        self._tables: dict[int, DraftTable] = {}  # by id, the one that grew longest ago first
        blocks.lend_to(self.give_back)

    def extend(self, table: DraftTable, tokens: int, unread: int = 0) -> None:
        """Make the table hold `tokens` tokens; no-op if it does already.

        Args:
            unread: leading tokens that nobody will read or write: new pages for them alone are no
                pages, but one and the same place in the slack.

        Raises:
            OutOfBlocks: nothing is left to borrow; the table keeps what it got.
        """
        self._tables.pop(id(table), None)
        self._tables[id(table)] = table
        missing = range(len(table.pages) + 1, -(-tokens // self._page_tokens) + 1)
        for page in missing:
            if page * self._page_tokens <= unread:
                table.pages.append(self._nowhere)
            else:
                table.pages.append(self._take(table.pages[-1] if table.pages else None))

    def release(self, table: DraftTable) -> None:
        """Give back all pages of the table and empty it."""
        self._tables.pop(id(table), None)
        for page in filter(self._is_somewhere, table.pages):
            group, block = divmod(page, self._group_pages)
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
        """Take the page behind `last` in its group if that can be had, else one that is free.

        Blocks are borrowed for a run's sake, or if no page is free: never for a page elsewhere.
        """
        group, behind = 0, None
        if last is not None and self._is_somewhere(last):
            group, block = divmod(last, self._group_pages)
            behind = block + 1
            if group in self._free.get(behind, ()):
                return self._pick(behind, group)
        if behind is None or not self._blocks.can_lend(behind):
            page = self._any_free()
            if page is not None:
                return page
        return self._borrow(behind, group)

    def _any_free(self) -> int | None:
        block = min((block for block, groups in self._free.items() if groups), default=None)
        return None if block is None else self._pick(block, min(self._free[block]))

    def _is_somewhere(self, page: int) -> bool:
        return page != self._nowhere

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
        owned = [page for table in tables for page in table.pages if self._is_somewhere(page)]
        every = [group * pages + block for block in self._free for group in range(self._groups)]
        assert sorted(free + owned) == sorted(every), "a draft page is lost or doubled"
