"""The allocator of KV blocks. It handles only block numbers, and no tensors.

A block is *free*, *used*, *cached* (unused, but with a known prefix) or *lent* to draft pages.
Sequences with a common prefix share its blocks. Cached and lent blocks count as free. A sequence
that needs blocks gets free blocks first, then the least recently used cached blocks, then lent
blocks.

Blocks with keys and values of another worker (`adopt`), and those of a conversation that continues
soon, are cached, and *held* for a bounded time until a sequence uses them. Held blocks are evicted
after all other cached blocks, but before a sequence is preempted.

A sequence gets *runs* of neighbouring blocks where possible (`FreeRuns`). A CPU can then read most
of its keys and values as a view. A CPU would need more than half of a step's time to gather pages
(2.3x at batch 32).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from draftgate.backends.core.prefix_cache import PrefixCache

HELD_SHARE: Final = 0.5
"""Maximum share of the blocks that clients may have held for their next requests. Imports take no
held blocks. (Chosen, not tuned, 2026-11-30.)"""


class OutOfBlocks(Exception):
    """Not enough blocks are free, and no block was allocated."""


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
        self._free = FreeRuns(num_blocks)
        self._cache = PrefixCache(num_blocks)
        self._sharers: Counter[int] = Counter()  # users of a block after the first user
        self._lent: set[int] = set()
        self._call_in: Callable[[int], None] | None = None

    @property
    def num_free(self) -> int:
        """Number of blocks that could be allocated now: free, cached and lent blocks."""
        return self._free.num_free + self._cache.num_unused + len(self._lent)

    @property
    def num_unused(self) -> int:
        """Number of cached blocks that no sequence uses."""
        return self._cache.num_unused

    def free_runs(self) -> list[range]:
        """Return the runs of free blocks, in no order. The content of these blocks is not used."""
        return self._free.runs()

    def expire_unused(self) -> None:
        """Free the cached blocks that no sequence has used since the last call, but held ones."""
        self._free.give_back(self._cache.expire_unused())

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks for `tokens` tokens."""
        return -(-tokens // self.block_size)

    def num_cached(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of the chain are cached."""
        return len(self._cache.find(hashes))

    def needed(self, hashes: Sequence[bytes], tokens: int) -> int:
        """Return the number by which `admit` would reduce `num_free`."""
        cached, unused = len(self._cache.find(hashes)), self._cache.count_unused(hashes)
        return self.blocks_for(tokens) - cached + unused

    def admit(self, table: array[int], hashes: Sequence[bytes], tokens: int) -> int:
        """Allocate blocks for `tokens` tokens in an empty table.

        The table shares the cached part of the prefix.

        Args:
            hashes: chain of the full blocks that may be shared. None of these blocks may contain
                the last token, because it is computed for its logits and a shared block is never
                written.

        Returns:
            The number of leading blocks that are shared and already have keys and values.

        Raises:
            OutOfBlocks: not enough blocks are free. The table is unchanged.
        """
        found = self._cache.find(hashes)
        needed = -(-tokens // self.block_size) - len(found)
        if found:
            needed += self._cache.count_unused(hashes)
        if needed > self.num_free:
            raise OutOfBlocks(f"{needed} blocks needed, but only {self.num_free} are free")
        if found:
            self._sharers.update(self._cache.use(found))
        table.extend(found)
        self.extend(table, tokens)
        return len(found)

    def extend(self, table: array[int], tokens: int) -> None:
        """Extend the table to hold at least `tokens` tokens.

        Raises:
            OutOfBlocks: not enough blocks are free. The table is unchanged.
        """
        missing = -(-tokens // self.block_size) - len(table)
        if missing <= 0:
            return
        if missing > self.num_free:
            raise OutOfBlocks(f"{missing} blocks needed, but only {self.num_free} are free")
        if self._call_in is not None and missing > self._available:
            self._call_in(missing - self._available)
        self._evict_until(missing)
        table.extend(self._free.take(table[-1] + 1 if table else None, missing))

    def trim(self, table: array[int], tokens: int) -> None:
        """Release the blocks beyond those that `tokens` tokens need."""
        keep = -(-tokens // self.block_size)
        if len(table) <= keep:
            return
        # Go from the end, so that eviction keeps the beginning of a prefix longest.
        left = table[keep:][::-1]
        del table[keep:]
        self._free.give_back(self._cache.retire(self._unshared(left)))

    def release(self, table: array[int]) -> None:
        """Release all blocks of the table."""
        self.trim(table, 0)

    def confirm(self, table: Sequence[int], hashes: Sequence[bytes], blocks: range) -> None:
        """Add the blocks of a table that are full of confirmed tokens to the prefix cache."""
        for index in blocks:
            self._cache.insert(hashes[index], table[index])

    def located(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of these hashes up to the first that is not cached.

        The hashes may be any part of a chain.
        """
        found: list[int] = []
        for block in self._cache.locate(hashes):
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, hashes: Sequence[bytes], until_s: float) -> int:
        """Hold the leading blocks of a chain that are cached, and return their number.

        Args:
            until_s: end of the hold on the worker's clock. Holds end in the order in which they
                began, so the end of an earlier hold may delay it.
        """
        blocks = self.located(hashes)
        self._cache.hold(blocks, until_s)
        return len(blocks)

    def hold_some(self, hashes: Sequence[bytes], until_s: float) -> None:
        """Hold the leading blocks of a chain as `hold` does, as far as `HELD_SHARE` allows."""
        most = int(HELD_SHARE * self.num_blocks) - self._cache.num_held
        self.hold(hashes[: max(most, 0)], until_s)

    def adopt(self, hashes: Sequence[bytes], until_s: float, parent: bytes = b"") -> dict[int, int]:
        """Allocate blocks for keys and values from elsewhere, and hold them until a time.

        The caller writes the returned blocks before the next step. Blocks come from free and from
        unheld cached blocks only. So an import preempts no sequence, takes no lent block, and
        displaces no other import.

        Args:
            hashes: consecutive part of a chain. Blocks that are cached already are only held.
            until_s: end of the hold on the worker's clock, as for `hold`.
            parent: hash before these hashes, whose block the new blocks follow if possible.

        Returns:
            The blocks to write, by their index in `hashes`. If the memory is full, the last hashes
            have no block, and all earlier blocks remain valid.
        """
        blocks = self._cache.locate(hashes)
        self._cache.hold([block for block in blocks if block is not None], until_s)
        missing = [index for index, block in enumerate(blocks) if block is None]
        taken = min(len(missing), self._spare)
        self._evict_until(taken)
        (before,) = self._cache.locate((parent,))
        new_blocks = self._free.take(None if before is None else before + 1, taken)
        adopted = dict(zip(missing, new_blocks, strict=False))
        for index, block in adopted.items():
            self._cache.insert_held(hashes[index], block, until_s)
        return adopted

    def expire_holds(self, now_s: float) -> None:
        """End the holds whose time has come, so that their blocks are like other cached blocks."""
        if self._cache.num_held:
            self._cache.expire_holds(now_s)

    def lend_to(self, call_in: Callable[[int], None]) -> None:
        """Register the borrower.

        Args:
            call_in: makes the borrower return n blocks, or all of its blocks if it has fewer.
        """
        self._call_in = call_in

    def can_lend(self, block: int) -> bool:
        """Return whether `lend` would lend exactly this block, without evicting any."""
        return self._free.begins_gap(block)

    def lend(self, after: int | None) -> int:
        """Lend the block `after` if it is free, or else another block.

        Raises:
            OutOfBlocks: all blocks are used, held or lent.
        """
        if not self._spare:
            raise OutOfBlocks("all blocks are used, held or lent")
        self._evict_until(1)
        (block,) = self._free.take(after, 1)
        self._lent.add(block)
        return block

    def take_back(self, block: int) -> None:
        """Free a lent block."""
        self._lent.remove(block)
        self._free.give_back((block,))

    @property
    def _available(self) -> int:
        """Number of blocks that are free or can be evicted."""
        return self._free.num_free + self._cache.num_unused

    @property
    def _spare(self) -> int:
        """Number of blocks that are free or can be evicted without ending a hold."""
        return self._available - self._cache.num_held

    def _evict_until(self, free: int) -> None:
        missing = free - self._free.num_free
        if missing > 0:
            self._free.give_back(self._cache.evict(missing))

    def _unshared(self, blocks: Sequence[int]) -> Sequence[int]:
        """Remove one user from each of these blocks, and return the blocks without users."""
        sharers = self._sharers
        if not sharers:
            return blocks
        unshared = [block for block in blocks if block not in sharers]
        if len(unshared) < len(blocks):
            for block in blocks:
                if block in sharers:
                    sharers[block] -= 1
                    if not sharers[block]:
                        del sharers[block]
        return unshared

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Check that every block is free, cached, lent, or in the right number of `tables`.

        Raises:
            AssertionError: a block is lost, in two states, or miscounted.
        """
        users = Counter(block for table in tables for block in table)
        sharers = Counter({block: count - 1 for block, count in users.items() if count > 1})
        assert sharers == self._sharers, "a block is lost or doubled: users are miscounted"
        states = [*self._free.blocks(), *self._cache.unused, *self._lent, *users]
        assert sorted(states) == list(range(self.num_blocks)), "a block is lost or doubled"


class FreeRuns:
    """The free blocks among `num_blocks`, as gaps between the used blocks.

    A new run starts in the middle of the largest gap, so that both the run and its neighbour can
    grow. If the next block is not free, a run continues elsewhere. Blocks never move.

    Attributes:
        num_free: number of free blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self._gaps = {0: num_blocks}  # first block of a gap -> its length
        self._gap_ends = {num_blocks: 0}  # block after a gap -> its first block
        self.num_free = num_blocks

    def take(self, after: int | None, wanted: int) -> list[int]:
        """Take up to `wanted` free blocks.

        Args:
            after: block after the caller's last block, which is taken first if it is free. None
                starts a new run.
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
        """Free blocks. A run of neighbours takes little longer than a single block."""
        for start, end in _runs(sorted(blocks)):
            self.num_free += end - start
            self._free_run(start, end)

    def runs(self) -> list[range]:
        """Return the gaps as runs of blocks."""
        return [range(start, start + length) for start, length in self._gaps.items()]

    def blocks(self) -> list[int]:
        """Return the free blocks, and check that gaps are merged and counted.

        Raises:
            AssertionError: an invariant is violated.
        """
        assert not set(self._gaps) & set(self._gap_ends), "neighbouring gaps are not merged"
        free = [block for run in self.runs() for block in run]
        assert len(free) == self.num_free, "the count of free blocks is off"
        return free

    def _take_run(self, after: int | None, wanted: int) -> range:
        """Take up to `wanted` neighbouring blocks, at `after` if it is free, else in a gap."""
        if after is not None and after in self._gaps:
            gap_start = start = after
        else:
            gap_start, start = self._new_start(wanted)
        gap_end = gap_start + self._gaps[gap_start]
        end = min(start + wanted, gap_end)
        self._remove_gap(gap_start)
        if start > gap_start:
            self._add_gap(gap_start, start - gap_start)
        if end < gap_end:
            self._add_gap(end, gap_end - end)
        self.num_free -= end - start
        return range(start, end)

    def _free_run(self, start: int, end: int) -> None:
        """Turn a run into a gap, merged with the gaps on either side."""
        if start in self._gap_ends:
            start = self._gap_ends[start]
            self._remove_gap(start)
        if end in self._gaps:
            gap_start, end = end, end + self._gaps[end]
            self._remove_gap(gap_start)
        self._add_gap(start, end - start)

    def _new_start(self, wanted: int) -> tuple[int, int]:
        """Return the start of the largest gap, and that of a new run in the middle of its slack."""
        largest = max(self._gaps.values())
        gap_start = next(start for start, length in self._gaps.items() if length == largest)
        slack = largest - wanted
        # No run before block 0 could grow into the gap.
        return gap_start, gap_start + max(slack // 2, 0) if gap_start else 0

    def _add_gap(self, start: int, length: int) -> None:
        self._gaps[start] = length
        self._gap_ends[start + length] = start

    def _remove_gap(self, start: int) -> None:
        length = self._gaps.pop(start)
        del self._gap_ends[start + length]


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first block of each run of ascending blocks, and the block after its last."""
    start = end = blocks[0] if blocks else 0
    for block in blocks:
        if block != end:
            yield start, end
            start = block
        end = block + 1
    if blocks:
        yield start, end
