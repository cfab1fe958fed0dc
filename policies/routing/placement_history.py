"""Where requests went: which worker was last, and which prompts each may still have cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from draftgate.policies.routing.types import Candidate, RouteView

STRIDE: Final = 8
"""Every eighth hash of a chain is kept, which stands for 128 tokens at 16 a block. A finer index
would save at most 3 ms of prefill (H100, 8B parameters) and take eight times the memory. (Chosen by
that reasoning, 2026-11-22.)"""

MOST_ENTRIES: Final = 1 << 15
"""Entries per worker, however much it caches: 4M tokens, 4 MB."""

MOST_WORKERS: Final = 256
"""Workers to remember; the least recently used is forgotten first. All of them full take a
gigabyte; with caches of 450k tokens (an H100 with 8B parameters) 110 MB."""


class PlacementHistory:
    """The last worker, and for each worker an LRU index of prompts, as large as its cache.

    The index learns where prompts go, not what caches do. It is only an estimate: outputs take
    memory as well, and blocks in use are not evicted. Tenants never share a hash.

    Attributes:
        last_worker: id of the worker that got the latest request; "" before the first.
    """

    def __init__(self, most_entries: int = MOST_ENTRIES, most_workers: int = MOST_WORKERS) -> None:
        self.last_worker = ""
        self._most_entries = most_entries
        self._most_workers = most_workers
        self._seen = OrderedDict[str, OrderedDict[bytes, None]]()  # both: the latest last

    def cached_tokens(self, request: RouteView, worker: Candidate) -> int:
        """Return how many prompt tokens a worker may have cached; the last token is computed."""
        blocks = self.cached_blocks(worker.worker_id, request.block_hashes)
        return max(min(blocks * request.block_tokens, request.request.prompt_tokens - 1), 0)

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

    def record(self, worker_id: str, hashes: Sequence[bytes], cache_blocks: int) -> None:
        """Record that a prompt goes to a worker with so many KV blocks (0: unknown)."""
        self.last_worker = worker_id
        if not hashes:
            return
        seen = self._seen.setdefault(worker_id, OrderedDict())
        self._seen.move_to_end(worker_id)
        if len(self._seen) > self._most_workers:
            self._seen.popitem(last=False)
        # Backwards: caches evict a prefix from its end, so its beginning lasts longest.
        for digest in reversed(hashes[STRIDE - 1 :: STRIDE]):
            seen[digest] = None
            seen.move_to_end(digest)
        most = cache_blocks // STRIDE if cache_blocks else self._most_entries
        while len(seen) > max(min(most, self._most_entries), 1):
            seen.popitem(last=False)

    def __len__(self) -> int:
        """Return the number of entries."""
        return sum(map(len, self._seen.values()))
