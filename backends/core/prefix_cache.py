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
from typing import Final

HASH_BYTES: Final = 16
"""Two of 2**40 different blocks collide with a chance below 2**-48."""

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
    """Which block holds which prefix, and which of these blocks nobody uses."""

    def __init__(self) -> None:
        """Start empty."""
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._unused: dict[int, None] = {}  # in order of last use, the oldest first

    @property
    def num_unused(self) -> int:
        """Cached blocks which nobody uses: they may be evicted."""
        return len(self._unused)

    @property
    def unused(self) -> tuple[int, ...]:
        """Those blocks, the next to be evicted first."""
        return tuple(self._unused)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix; used and unused ones."""
        found = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def is_unused(self, block: int) -> bool:
        """Return whether the block is cached and nobody uses it."""
        return block in self._unused

    def insert(self, digest: bytes, block: int) -> None:
        """Make a block, which somebody uses, known by its hash; no-op if another one is."""
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def use(self, block: int) -> None:
        """Note that somebody uses the block again."""
        self._unused.pop(block, None)

    def retire(self, block: int) -> bool:
        """Keep the block if it is cached: nobody uses it any more. Return whether it is."""
        if block not in self._hash_of:
            return False
        self._unused[block] = None
        return True

    def evict(self) -> int:
        """Forget the least recently used of the unused blocks and return it."""
        block = next(iter(self._unused))
        del self._unused[block]
        del self._block_of[self._hash_of.pop(block)]
        return block


class PendingPrefixes:
    """Prefixes that running sequences are computing: who shares one had better wait for it."""

    def __init__(self) -> None:
        """Start empty."""
        self._owner: dict[bytes, int] = {}
        self._hashes: dict[int, list[bytes]] = {}

    def add(self, key: int, hashes: Sequence[bytes]) -> None:
        """Note that the sequence of that key computes these blocks, but for those another does."""
        own = [digest for digest in hashes if self._owner.setdefault(digest, key) == key]
        self._hashes[key] = own

    def drop(self, key: int) -> None:
        """Forget a sequence: it has computed its prompt, or gave up. Idempotent."""
        for digest in self._hashes.pop(key, ()):
            del self._owner[digest]

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._owner
