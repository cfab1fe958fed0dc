"""Which KV block belongs to whom. No tensors: block numbers only.

Blocks of a sequence are handed out in *runs*: the next block in memory if it is free, so that a
CPU can read a sequence's keys and values as one view (gathering pages costs more than half a
step: 2.3x at batch 32). A newcomer starts in the middle of the largest gap, which leaves room to
grow for it and for its neighbour. When memory is so full that no neighbouring block is free, the
table simply continues elsewhere; nothing is ever moved.
"""

from __future__ import annotations


class OutOfBlocks(Exception):
    """There are not enough free blocks; nothing was allocated."""


class KvBlocks:
    """Allocator of `num_blocks` KV blocks of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Start with every block free.

        Raises:
            ValueError: either number is not positive.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError("num_blocks and block_size must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._gaps = {0: num_blocks}  # first block of a gap -> its length
        self._gap_ends = {num_blocks: 0}  # block behind a gap -> its first block
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that belong to nobody."""
        return self._num_free

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold that many tokens."""
        return -(-tokens // self.block_size)

    def extend(self, table: list[int], tokens: int) -> None:
        """Make the table hold `tokens` tokens; no-op if it does already.

        Raises:
            OutOfBlocks: not enough free blocks; the table is unchanged.
        """
        missing = self.blocks_for(tokens) - len(table)
        if missing > self._num_free:
            raise OutOfBlocks(f"{missing} blocks wanted, {self._num_free} free")
        while missing > 0:
            run = self._take_run(table[-1] + 1 if table else None, missing)
            table.extend(run)
            missing -= len(run)

    def trim(self, table: list[int], tokens: int) -> None:
        """Give back the blocks behind those that `tokens` tokens need."""
        keep = self.blocks_for(tokens)
        for block in reversed(table[keep:]):
            self._give_back(block)
        del table[keep:]

    def release(self, table: list[int]) -> None:
        """Give back all blocks of the table and empty it."""
        self.trim(table, 0)

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Check that every block is free or in exactly one of `tables`, and gaps are merged.

        Raises:
            AssertionError: a block is lost, owned twice, or both owned and free.
        """
        free = [b for start, length in self._gaps.items() for b in range(start, start + length)]
        owned = [block for table in tables for block in table]
        assert sorted(free + owned) == list(range(self.num_blocks)), "a block is lost or doubled"
        assert len(free) == self._num_free, "the count of free blocks is off"
        assert not set(self._gaps) & set(self._gap_ends), "neighbouring gaps are not merged"

    def _take_run(self, after: int | None, wanted: int) -> range:
        """Take up to `wanted` neighbouring blocks: those at `after` if free, else in a gap."""
        start = after if after in self._gaps else None
        if start is None:
            start = self._newcomer_start(wanted)
        gap_start, gap_length = self._gap_around(start)
        taken = min(wanted, gap_start + gap_length - start)
        self._remove_gap(gap_start)
        if start > gap_start:
            self._add_gap(gap_start, start - gap_start)
        if start + taken < gap_start + gap_length:
            self._add_gap(start + taken, gap_start + gap_length - start - taken)
        self._num_free -= taken
        return range(start, start + taken)

    def _newcomer_start(self, wanted: int) -> int:
        """Return where a new run starts: the middle of the largest gap's slack."""
        gap_start = max(self._gaps, key=self._gaps.__getitem__)
        slack = self._gaps[gap_start] - wanted
        # Nobody grows into the gap from before block 0, so no room need be left there.
        return gap_start if gap_start == 0 or slack <= 0 else gap_start + slack // 2

    def _gap_around(self, block: int) -> tuple[int, int]:
        """Return the gap that holds the block."""
        if block in self._gaps:
            return block, self._gaps[block]
        start = max(start for start in self._gaps if start <= block)
        return start, self._gaps[start]

    def _give_back(self, block: int) -> None:
        start, end = block, block + 1
        if start in self._gap_ends:
            start = self._gap_ends[start]
            self._remove_gap(start)
        if end in self._gaps:
            gap_start, end = end, end + self._gaps[end]
            self._remove_gap(gap_start)
        self._add_gap(start, end - start)
        self._num_free += 1

    def _add_gap(self, start: int, length: int) -> None:
        self._gaps[start] = length
        self._gap_ends[start + length] = start

    def _remove_gap(self, start: int) -> None:
        length = self._gaps.pop(start)
        del self._gap_ends[start + length]
