"""Earlier placements: the prompts that each worker may still have cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from typing import Final

STRIDE: Final = 8
"""Interval of the hashes that are kept from a chain: every eighth, or 128 tokens at 16 per block. A
finer index would save at most 3 ms of prefill (H100, 8B parameters) and take eight times the
memory. (Chosen by that reasoning, 2026-11-22.)"""

MOST_ENTRIES: Final = 1 << 15
"""Maximum number of entries per worker: 4M tokens, 4 MB."""

MOST_IN_ALL: Final = 1 << 23
"""Maximum number of entries of all workers, which take a gigabyte. The least recently used worker
is forgotten first. 2,300 workers with caches of 450k tokens (an H100 with 8B parameters) fit.
(Chosen by that arithmetic, 2026-11-24.)"""


class PlacementHistory:
    """An LRU index of prompts for each worker, as large as its cache.

    The index records placements, not the contents of caches. It is only an estimate, because
    outputs take memory too and blocks in use are not evicted. Tenants never share a hash.
    """

    def __init__(self, most_entries: int = MOST_ENTRIES, most_in_all: int = MOST_IN_ALL) -> None:
        self._most_entries = most_entries
        self._most_in_all = most_in_all
        self._entries = 0
        # The most recently used entry is last, in both dictionaries.
        self._placed = OrderedDict[str, OrderedDict[bytes, None]]()

    def cached_blocks(self, worker_ids: Iterable[str], hashes: Sequence[bytes]) -> dict[str, int]:
        """Return how many leading blocks of a chain workers have seen and may still have cached.

        The result omits workers with none. The numbers are multiples of `STRIDE`.
        """
        if len(hashes) < STRIDE:
            return {}
        found = {}
        for worker_id in worker_ids:
            seen = self._placed.get(worker_id)
            if seen and hashes[STRIDE - 1] in seen:
                found[worker_id] = _leading(seen, hashes)
        return found

    def record(self, worker_id: str, hashes: Sequence[bytes], cache_blocks: int) -> None:
        """Record a prompt that goes to a worker with `cache_blocks` KV blocks (0 if unknown)."""
        if len(hashes) < STRIDE:
            return
        seen = self._placed.setdefault(worker_id, OrderedDict())
        self._placed.move_to_end(worker_id)
        before = len(seen)
        # Go backwards, because caches evict a prefix from its end, so its beginning lasts longest.
        for digest in reversed(hashes[STRIDE - 1 :: STRIDE]):
            seen[digest] = None
            seen.move_to_end(digest)
        most = cache_blocks // STRIDE if cache_blocks else self._most_entries
        while len(seen) > max(min(most, self._most_entries), 1):
            seen.popitem(last=False)
        self._entries += len(seen) - before
        while self._entries > self._most_in_all and len(self._placed) > 1:
            _, forgotten = self._placed.popitem(last=False)
            self._entries -= len(forgotten)

    def __len__(self) -> int:
        """Return the number of entries."""
        return self._entries


def _leading(seen: Container[bytes], hashes: Sequence[bytes]) -> int:
    """Return how many leading blocks of a chain were seen, of which the first entry was."""
    for place in range(2 * STRIDE - 1, len(hashes), STRIDE):
        if hashes[place] not in seen:
            return place + 1 - STRIDE
    return len(hashes) // STRIDE * STRIDE
