"""Earlier placements: the last worker, and the prompts that each worker may still have cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from draftgate.policies.routing.types import Candidate, RouteView

STRIDE: Final = 8
"""Interval of the hashes that are kept from a chain: every eighth, or 128 tokens at 16 per block. A
finer index would save at most 3 ms of prefill (H100, 8B parameters) and take eight times the
memory. (Chosen by that reasoning, 2026-11-22.)"""

MOST_ENTRIES: Final = 1 << 15
"""Maximum number of entries per worker: 4M tokens, 4 MB."""

MOST_WORKERS: Final = 256
"""Maximum number of workers. The least recently used worker is forgotten first. All entries
together take a gigabyte, or 110 MB with caches of 450k tokens (an H100 with 8B parameters)."""


class PlacementHistory:
    """The last worker, and an LRU index of prompts for each worker, as large as its cache.

    The index records placements, not the contents of caches. It is only an estimate, because
    outputs take memory too and blocks in use are not evicted. Tenants never share a hash.

    Attributes:
        last_worker: id of the worker that got the latest request, or "" before the first.
    """

    def __init__(self, most_entries: int = MOST_ENTRIES, most_workers: int = MOST_WORKERS) -> None:
        self.last_worker = ""
        self._most_entries = most_entries
        self._most_workers = most_workers
        # The most recently used entry is last, in both dictionaries.
        self._placed = OrderedDict[str, OrderedDict[bytes, None]]()

    def cached_tokens(self, request: RouteView, worker: Candidate) -> int:
        """Return how many prompt tokens a worker may have cached, without the last token."""
        blocks = self.cached_blocks(worker.worker_id, request.block_hashes)
        return max(min(blocks * request.block_tokens, request.request.prompt_tokens - 1), 0)

    def cached_blocks(self, worker_id: str, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of a chain a worker has seen and may still have cached."""
        seen = self._placed.get(worker_id)
        if not seen:
            return 0
        known = 0
        for place in range(STRIDE - 1, len(hashes), STRIDE):
            if hashes[place] not in seen:
                break
            known = place + 1
        return known

    def record(self, worker_id: str, hashes: Sequence[bytes], cache_blocks: int) -> None:
        """Record a prompt that goes to a worker with `cache_blocks` KV blocks (0 if unknown)."""
        self.last_worker = worker_id
        if not hashes:
            return
        seen = self._placed.setdefault(worker_id, OrderedDict())
        self._placed.move_to_end(worker_id)
        if len(self._placed) > self._most_workers:
            self._placed.popitem(last=False)
        # Go backwards, because caches evict a prefix from its end, so its beginning lasts longest.
        for digest in reversed(hashes[STRIDE - 1 :: STRIDE]):
            seen[digest] = None
            seen.move_to_end(digest)
        most = cache_blocks // STRIDE if cache_blocks else self._most_entries
        while len(seen) > max(min(most, self._most_entries), 1):
            seen.popitem(last=False)

    def __len__(self) -> int:
        """Return the number of entries."""
        return sum(map(len, self._placed.values()))
