"""Free blocks of a memory, handed out in *runs*: neighbours in memory where that is possible.

A newcomer starts in the middle of the largest gap, which leaves room to grow for it and for its
neighbour. When no neighbouring block is free, a run simply continues elsewhere; nothing is moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many


class FreeRuns:
    """The free ones of `num_blocks` blocks, as gaps between those that are taken."""

    def __init__(self, num_blocks: int) -> None:
        """Start with every block free."""
        self._gaps = {0: num_blocks}  # first block of a gap -> its length
        self._gap_ends = {num_blocks: 0}  # block behind a gap -> its first block
        self._num_free = num_blocks

    def __len__(self) -> int:
        return self._num_free

    def take(self, after: int | None, wanted: int) -> list[int]:
        """Take `wanted` blocks, at most as many as are free; the first at `after` if that is free.

        Args:
            after: the block behind the caller's last one; None for a newcomer.
        """
        taken: list[int] = []
        while len(taken) < wanted:
            run = self._take_run(after, wanted - len(taken))
            taken.extend(run)
            after = run.stop
        return taken

    def begins_gap(self, block: int) -> bool:
        """Return whether a block is free and the one before it is not."""
        return block in self._gaps

    def give_back(self, blocks: Iterable[int]) -> None:
        """Make taken blocks free; neighbours together, so many take little longer than one."""
        for start, end in _runs(sorted(blocks)):
            self._num_free += end - start
            self._free_run(start, end)

    def blocks(self) -> list[int]:
        """Return the free blocks, checking that gaps are merged and counted.

        Raises:
            AssertionError: they are not.
        """
        assert not set(self._gaps) & set(self._gap_ends), "neighbouring gaps are not merged"
        free = [b for start, length in self._gaps.items() for b in range(start, start + length)]
        assert len(free) == self._num_free, "the count of free blocks is off"
        return free

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

    def _free_run(self, start: int, end: int) -> None:
        """Make a gap of a run, with the gaps beside it."""
        if start in self._gap_ends:
            start = self._gap_ends[start]
            self._remove_gap(start)
        if end in self._gaps:
            gap_start, end = end, end + self._gaps[end]
            self._remove_gap(gap_start)
        self._add_gap(start, end - start)

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

    def _add_gap(self, start: int, length: int) -> None:
        self._gaps[start] = length
        self._gap_ends[start + length] = start

    def _remove_gap(self, start: int) -> None:
        length = self._gaps.pop(start)
        del self._gap_ends[start + length]


def _runs(blocks: Many[int]) -> Iterator[tuple[int, int]]:
    """Yield of each run of ascending blocks the first one, and the one behind its last."""
    start = end = blocks[0] if blocks else 0
    for block in blocks:
        if block != end:
            yield start, end
            start = block
        end = block + 1
    if blocks:
        yield start, end
