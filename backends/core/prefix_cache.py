"""Prefixes of token sequences by hash, and the KV blocks that hold them.

A full block is known by a hash over its tokens and the hash of the block before it, so equal
hashes mean equal prefixes up to the block's end; the chain begins with the tenant, so nobody can
find out by timing what another tenant's prompts contain. The scheme is that of vLLM's automatic
prefix caching, with a cryptographic hash in place of Python's, which can be made to collide.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from itertools import islice, repeat
from typing import Final

HASH_BYTES: Final = 16
"""Two of 2**40 different blocks collide with a chance below 2**-48."""

LOOKED_UP_BLOCKS: Final = 1024
"""Blocks of a chain that are looked up before it is seen whether all are known."""

USED: Final = object()
"""In place of an unused block's entry."""

ARRAY_BLOCKS: Final = 1024
"""Blocks whose tokens are made bytes at once: by itself that takes a block as long as its hash, and
all of a long prompt would keep other threads from running meanwhile."""


def extend_chain(
    hashes: list[bytes], tenant: str, token_ids: Sequence[int], block_size: int
) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` lacks."""
    parent = hashes[-1] if hashes else _digest(tenant.encode())
    end = len(token_ids) // block_size * block_size
    for begin in range(len(hashes) * block_size, end, ARRAY_BLOCKS * block_size):
        tokens = array("q", token_ids[begin : min(begin + ARRAY_BLOCKS * block_size, end)])
        data, block_bytes = tokens.tobytes(), block_size * tokens.itemsize
        for start in range(0, len(data), block_bytes):
            parent = _digest(parent + data[start : start + block_bytes])
            hashes.append(parent)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


class PrefixCache:
    """Which block holds which prefix, and which of these blocks nobody uses.

    Works on many blocks at once: a prompt of a megabyte has 30,000, and a turn of the event loop,
    which the simulator shares, has 5 ms.
    """

    def __init__(self, num_blocks: int) -> None:
        """Start empty, for a memory of so many blocks."""
        self._block_of: dict[bytes, int] = {}
        # By block: neighbours are asked for together, and in a dictionary they lie far apart.
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._unused: dict[int, object] = {}  # in order of last use, the oldest first
        self._last_found: tuple[bytes, list[int]] = b"", []  # the last hash of a chain, its blocks
        self._last_unused = 0, 0  # the first so many of these blocks, how many nobody uses

    @property
    def num_unused(self) -> int:
        """Cached blocks which nobody uses: they may be evicted."""
        return len(self._unused)

    @property
    def unused(self) -> tuple[int, ...]:
        """Those blocks, the next to be evicted first."""
        return tuple(self._unused)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix; used and unused ones.

        The chain that was asked for last is looked up from where it ended: who waits to be admitted
        is asked for several times in each step.
        """
        if not hashes:
            return []
        chain, found = self._last_found
        if chain != hashes[-1]:
            found = []
            self._last_unused = 0, 0
        self._last_found = hashes[-1], found
        while len(found) < len(hashes):
            more = hashes[len(found) : len(found) + LOOKED_UP_BLOCKS]
            blocks = list(map(self._block_of.get, more))
            missing = blocks.index(None) if None in blocks else len(blocks)
            found.extend(blocks[:missing])  # type: ignore[arg-type]
            if missing < len(blocks):
                break
        return found

    def count_unused(self, hashes: Sequence[bytes]) -> int:
        """Return how many blocks of the longest cached prefix are used by nobody."""
        found = self.find(hashes)
        looked_at, unused = self._last_unused
        if looked_at < len(found):
            unused += sum(map(self._unused.__contains__, islice(found, looked_at, None)))
            self._last_unused = len(found), unused
        return unused

    def insert(self, digest: bytes, block: int) -> None:
        """Make a block, which somebody uses, known by its hash; no-op if another one is."""
        if digest not in self._block_of and self._hash_of[block] is None:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def use(self, blocks: Sequence[int]) -> list[int]:
        """Note that somebody uses cached blocks; return those that others use already."""
        self._last_unused = 0, 0
        taken = list(map(self._unused.pop, blocks, repeat(USED)))
        if USED not in taken:
            return []
        return [block for block, was in zip(blocks, taken, strict=True) if was is USED]

    def retire(self, blocks: Sequence[int]) -> list[int]:
        """Keep those blocks that are cached: nobody uses them any more. Return the others."""
        self._last_unused = 0, 0
        hash_of = self._hash_of
        others = [block for block in blocks if hash_of[block] is None]
        if others:
            blocks = [block for block in blocks if hash_of[block] is not None]
        self._unused.update(zip(blocks, repeat(None)))
        return others

    def evict(self, blocks: int) -> list[int]:
        """Forget so many of the unused blocks, those used longest ago, and return them."""
        evicted = list(islice(self._unused, blocks))
        for block in evicted:
            del self._unused[block]
            del self._block_of[self._hash_of[block]]  # type: ignore[arg-type]
            self._hash_of[block] = None
        self._last_found, self._last_unused = (b"", []), (0, 0)
        return evicted


class PendingPrefixes:
    """What running sequences are computing: who shares a prefix with one had better wait for it.

    Of each only the first block that is not cached yet: it is what a sharer lacks first, too.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._owner: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def advance(self, key: int, digest: bytes) -> None:
        """Note which block the sequence of that key computes next, if no other one does."""
        self.drop(key)
        if self._owner.setdefault(digest, key) == key:
            self._hash_of[key] = digest

    def drop(self, key: int) -> None:
        """Forget a sequence: it has computed its prompt, or gave up. Idempotent."""
        digest = self._hash_of.pop(key, None)
        if digest is not None:
            del self._owner[digest]

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._owner
