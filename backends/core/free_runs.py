"""Free blocks of a memory, allocated in *runs* of neighbouring blocks where possible.

A new run starts in the middle of the largest gap, so that it and its neighbour can both grow. If
the next block is not free, a run continues elsewhere; blocks are never moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many


class FreeRuns:
    """The free blocks among `num_blocks`, as gaps between the taken ones."""

    def __init__(self, num_blocks: int) -> None:
        """Start with every block free."""
        self._gaps = {0: num_blocks}  # first block of a gap -> its length
        self._gap_ends = {num_blocks: 0}  # block after a gap -> its first block
        self._num_free = num_blocks

    def __len__(self) -> int:
        return self._num_free

    def take(self, after: int | None, wanted: int) -> list[int]:
        """Take `wanted` blocks, no more than are free; the first one at `after` if that is free.

        Args:
            after: the block after the caller's last one; None for a new run.
        """
        taken: list[int] = []
        while len(taken) < wanted:
            run = self._take_run(after, wanted - len(taken))
            taken.extend(run)
            after = run.stop
        return taken

    def begins_gap(self, block: int) -> bool:
        """Return whether a block is free and the block before it is not."""
        return block in self._gaps

    def give_back(self, blocks: Iterable[int]) -> None:
        """Free blocks; neighbours are freed together, which takes little longer than one block."""
        for start, end in _runs(sorted(blocks)):
            self._num_free += end - start
            self._free_run(start, end)

    def blocks(self) -> list[int]:
        """Return the free blocks, and check that gaps are merged and counted.

        Raises:
            AssertionError: an invariant is violated.
        """
        assert not set(self._gaps) & set(self._gap_ends), "neighbouring gaps are not merged"
        free = [b for start, length in self._gaps.items() for b in range(start, start + length)]
        assert len(free) == self._num_free, "the count of free blocks is off"
        return free

    def _take_run(self, after: int | None, wanted: int) -> range:
        """Take up to `wanted` neighbouring blocks: at `after` if that is free, else in a gap."""
        start = after if after in self._gaps else None
        if start is None:
            start = self._new_start(wanted)
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
        """Turn a run into a gap, merged with the gaps on either side."""
        if start in self._gap_ends:
            start = self._gap_ends[start]
            self._remove_gap(start)
        if end in self._gaps:
            gap_start, end = end, end + self._gaps[end]
            self._remove_gap(gap_start)
        self._add_gap(start, end - start)

    def _new_start(self, wanted: int) -> int:
        """Return the start of a new run: the middle of the largest gap's slack."""
        gap_start = max(self._gaps, key=self._gaps.__getitem__)
        slack = self._gaps[gap_start] - wanted
        # Before block 0 there is no run that could grow into the gap.
        return gap_start if gap_start == 0 or slack <= 0 else gap_start + slack // 2

    def _gap_around(self, block: int) -> tuple[int, int]:
        """Return the start and the length of the gap with the block."""
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
    """Yield the first block of each run of ascending blocks, and the block after its last."""
    start = end = blocks[0] if blocks else 0
    for block in blocks:
        if block != end:
            yield start, end
            start = block
        end = block + 1
    if blocks:
        yield start, end
