"""Which KV block belongs to whom. No tensors: block numbers only.

A block is *free*, *used* by one or more sequences (those with a common prefix share its blocks),
*cached* (nobody uses it, but it holds a known prefix) or *lent* to draft pages. Cached and lent
blocks count as free: a sequence that needs blocks gets the free ones first, then the cached ones
that were used longest ago, then those lent.

Blocks of a sequence are handed out in runs (`free_runs`), so that a CPU can read most of its keys
and values as a view: gathering pages costs more than half a step there (2.3x at batch 32).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from draftgate.backends.core.free_runs import FreeRuns
from draftgate.backends.core.prefix_cache import PrefixCache


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
        self._free = FreeRuns(num_blocks)
        self._cache = PrefixCache(num_blocks)
        self._sharers: Counter[int] = Counter()  # users of a block beside the first one
        self._lent: set[int] = set()
        self._call_in: Callable[[int], None] | None = None

    @property
    def num_free(self) -> int:
        """Blocks a sequence could have now: free, cached and lent ones."""
        return self._at_hand + len(self._lent)

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold that many tokens."""
        return -(-tokens // self.block_size)

    def num_cached(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of the chain are cached."""
        return len(self._cache.find(hashes))

    def needed(self, hashes: Sequence[bytes], tokens: int) -> int:
        """Return by how much `admit` would lower `num_free`."""
        cached, unused = len(self._cache.find(hashes)), self._cache.count_unused(hashes)
        return self.blocks_for(tokens) - cached + unused

    def admit(self, table: array[int], hashes: Sequence[bytes], tokens: int) -> int:
        """Make an empty table hold `tokens` tokens, sharing what is cached of their prefix.

        Args:
            hashes: chain of the full blocks that may be shared. The last token must not be in one
                of them: it is computed for its logits, and a shared block is never written.

        Returns:
            How many leading blocks are shared: their keys and values are there already.

        Raises:
            OutOfBlocks: not enough free blocks; the table is unchanged.
        """
        needed = self.needed(hashes, tokens)
        if needed > self.num_free:
            raise OutOfBlocks(f"{needed} blocks wanted, {self.num_free} free")
        found = self._cache.find(hashes)
        self._sharers.update(self._cache.use(found))
        table.extend(found)
        self.extend(table, tokens)
        return len(found)

    def extend(self, table: array[int], tokens: int) -> None:
        """Make the table hold `tokens` tokens; no-op if it does already.

        Raises:
            OutOfBlocks: not enough free blocks; the table is unchanged.
        """
        missing = self.blocks_for(tokens) - len(table)
        if missing <= 0:
            return
        if missing > self.num_free:
            raise OutOfBlocks(f"{missing} blocks wanted, {self.num_free} free")
        if self._call_in is not None and missing > self._at_hand:
            self._call_in(missing - self._at_hand)
        self._evict_until(missing)
        table.extend(self._free.take(table[-1] + 1 if table else None, missing))

    def trim(self, table: array[int], tokens: int) -> None:
        """Give back the blocks behind those that `tokens` tokens need."""
        keep = self.blocks_for(tokens)
        if len(table) <= keep:
            return
        # From the end: of a prefix that is evicted block by block, the beginning lasts longest.
        left = table[keep:][::-1]
        del table[keep:]
        self._free.give_back(self._cache.retire(self._unshared(left)))

    def release(self, table: array[int]) -> None:
        """Give back all blocks of the table and empty it."""
        self.trim(table, 0)

    def confirm(self, table: Sequence[int], hashes: Sequence[bytes], blocks: range) -> None:
        """Make blocks of a table known to others: they are full of confirmed tokens, for good."""
        for index in blocks:
            self._cache.insert(hashes[index], table[index])

    # --- for draft pages -----------------------------------------------------------------------

    def lend_to(self, call_in: Callable[[int], None]) -> None:
        """Let somebody borrow blocks; `call_in(n)` makes them give back `n` they have, or all."""
        self._call_in = call_in

    def can_lend(self, block: int) -> bool:
        """Return whether `lend` would lend this very block, without evicting anything."""
        return self._free.begins_gap(block)

    def lend(self, after: int | None) -> int:
        """Lend a block, the one at `after` if it is free.

        Raises:
            OutOfBlocks: all are used or lent.
        """
        if not self._at_hand:
            raise OutOfBlocks("no block is left to lend")
        self._evict_until(1)
        (block,) = self._free.take(after, 1)
        self._lent.add(block)
        return block

    def take_back(self, block: int) -> None:
        """Make a lent block free."""
        self._lent.remove(block)
        self._free.give_back((block,))

    # --- inside --------------------------------------------------------------------------------

    @property
    def _at_hand(self) -> int:
        """Blocks that are free or may be evicted."""
        return len(self._free) + self._cache.num_unused

    def _evict_until(self, free: int) -> None:
        missing = free - len(self._free)
        if missing > 0:
            self._free.give_back(self._cache.evict(missing))

    def _unshared(self, blocks: Sequence[int]) -> Sequence[int]:
        """Take a user off each of these blocks; return those that have none left."""
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
        """Check that every block is free, cached, lent, or in as many of `tables` as it has users.

        Raises:
            AssertionError: a block is lost, in two states, or wrongly counted.
        """
        users = Counter(block for table in tables for block in table)
        sharers = Counter({block: count - 1 for block, count in users.items() if count > 1})
        assert sharers == self._sharers, "a block is lost or doubled: users are miscounted"
        states = [*self._free.blocks(), *self._cache.unused, *self._lent, *users]
        assert sorted(states) == list(range(self.num_blocks)), "a block is lost or doubled"
