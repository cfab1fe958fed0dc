"""Which worker has seen which beginnings of prompts: what may still be in its cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

STRIDE: Final = 8
"""Of a chain of hashes every eighth is kept, which stands for 128 tokens at 16 a block: what less
would save (3 ms of an H100's prefill with 8B parameters) is not worth the memory of eight times as
many entries. (Chosen by that reasoning, 2026-11-22.)"""

MOST_ENTRIES: Final = 1 << 15
"""Kept of each worker, however much it caches: 4M tokens, 4 MB."""

MOST_WORKERS: Final = 256
"""Workers that are remembered; those not heard of for longest go first. With all of them full that
is a gigabyte; with caches of 450k tokens (an H100's beside 8B parameters) it is 110 MB."""


class PrefixIndex:
    """For each worker an LRU as large as its cache, which forgets when that does, more or less.

    It is told where prompts go, not what caches do: outputs take room there, too, and what is in
    use is not evicted. Tenants cannot meet in it, as their hashes have nothing in common.
    """

    def __init__(self, most_entries: int = MOST_ENTRIES, most_workers: int = MOST_WORKERS) -> None:
        """Know nothing yet."""
        self._most_entries = most_entries
        self._most_workers = most_workers
        self._seen = OrderedDict[str, OrderedDict[bytes, None]]()  # the latest last, both

    def cached_blocks(self, worker_id: str, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of a chain a worker has seen and may still have."""
        seen = self._seen.get(worker_id)
        if not seen:
            return 0
        known = 0
        for place in range(STRIDE - 1, len(hashes), STRIDE):
            if hashes[place] not in seen:
                break
            known = place + 1
        return known

    def note(self, worker_id: str, hashes: Sequence[bytes], cache_blocks: int) -> None:
        """Note that a prompt goes to a worker, whose memory has so many blocks (0: unknown)."""
        seen = self._seen.setdefault(worker_id, OrderedDict())
        self._seen.move_to_end(worker_id)
        if len(self._seen) > self._most_workers:
            self._seen.popitem(last=False)
        # From its end: of a prefix that is evicted block by block, the beginning lasts longest.
        for digest in reversed(hashes[STRIDE - 1 :: STRIDE]):
            seen[digest] = None
            seen.move_to_end(digest)
        room = cache_blocks // STRIDE if cache_blocks else self._most_entries
        while len(seen) > max(min(room, self._most_entries), 1):
            seen.popitem(last=False)

    def __len__(self) -> int:
        """Return how many entries there are."""
        return sum(map(len, self._seen.values()))
