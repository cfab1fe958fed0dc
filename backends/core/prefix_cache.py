"""Prefix caching: token prefixes by hash, and the KV blocks that hold them.

The hash of a full block covers its tokens and the hash of the previous block. So equal hashes mean
equal prefixes up to the end of the block. The chain begins with the tenant, so a tenant cannot
learn from timing what prompts another tenant sends. It also begins with the LoRA adapter, which
changes keys and values. This is the scheme of vLLM's automatic prefix caching, with a cryptographic
hash, because attackers can make Python's own hash collide.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from itertools import islice, repeat, takewhile
from typing import Final

HASH_BYTES: Final = 16
"""Bytes of a hash. Among 2**40 different blocks, the probability of a collision is below 2**-48."""

LOOKUP_BLOCKS: Final = 1024
"""Number of blocks of a chain in one lookup, before a check whether all are cached."""

USED: Final = object()
"""Default of a lookup among unused blocks, for blocks in use."""

ARRAY_BLOCKS: Final = 1024
"""Number of blocks whose tokens are converted to bytes together. Single blocks take as long as
hashing. A whole long prompt would keep other threads from running."""


def extend_chain(
    hashes: list[bytes], owner: str, token_ids: Sequence[int], block_size: int
) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` lacks.

    Args:
        owner: whose requests share the blocks (`GenerationRequest.cache_owner`).
    """
    parent = hashes[-1] if hashes else chain_root(owner)
    extend_chain_after(parent, hashes, token_ids, len(hashes) * block_size, block_size)


def chain_root(owner: str) -> bytes:
    """Return the hash before the first block of a chain."""
    return _digest(owner.encode())


def extend_chain_after(
    parent: bytes, hashes: list[bytes], token_ids: Sequence[int], begin: int, block_size: int
) -> None:
    """Append the hashes of the full blocks of `token_ids[begin:]`, which follow a hash."""
    end = len(token_ids) // block_size * block_size
    for first in range(begin, end, ARRAY_BLOCKS * block_size):
        tokens = array("q", token_ids[first : min(first + ARRAY_BLOCKS * block_size, end)])
        data, block_bytes = tokens.tobytes(), block_size * tokens.itemsize
        for start in range(0, len(data), block_bytes):
            parent = _digest(parent + data[start : start + block_bytes])
            hashes.append(parent)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


class PrefixCache:
    """The blocks that hold known prefixes, used and unused.

    Unused blocks may be *held* for a request that is expected. Held blocks are evicted last.

    The methods handle many blocks together, because a prompt of one megabyte has 30,000 blocks. In
    the simulator they run on the event loop, where no callback should take longer than 5 ms.
    """

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[bytes, int] = {}
        # A list, because neighbouring blocks are read together and a dictionary would scatter them.
        self._hash_of: list[bytes | None] = [None] * num_blocks
        # Least recently used first, without held blocks, each with `_age` at the end of its use.
        self._unused: dict[int, object] = {}
        self._age = 0
        self._held: dict[int, float] = {}  # held blocks with the end of their hold, oldest first
        self._last_found: tuple[bytes, list[int]] = b"", []  # last hash of a chain, its blocks
        self._last_unused = 0, 0  # number of these blocks that were counted, and unused among them

    @property
    def num_unused(self) -> int:
        """Number of cached blocks that are unused and can be evicted."""
        return len(self._unused) + len(self._held)

    @property
    def num_held(self) -> int:
        """Number of unused blocks that are held."""
        return len(self._held)

    @property
    def unused(self) -> tuple[int, ...]:
        """The unused blocks in order of eviction."""
        return *self._unused, *self._held

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix, used and unused.

        Each step queries the next waiting sequence several times. So a query for the same chain as
        the last query continues from its end.
        """
        if not hashes:
            return []
        chain, found = self._last_found
        if chain != hashes[-1]:
            found = []
            self._last_unused = 0, 0
        self._last_found = hashes[-1], found
        while len(found) < len(hashes):
            more = hashes[len(found) : len(found) + LOOKUP_BLOCKS]
            blocks = list(map(self._block_of.get, more))
            missing = blocks.index(None) if None in blocks else len(blocks)
            found.extend(blocks[:missing])  # type: ignore[arg-type]
            if missing < len(blocks):
                break
        return found

    def count_unused(self, hashes: Sequence[bytes]) -> int:
        """Return how many blocks of the longest cached prefix are unused."""
        if not hashes:
            return 0  # the counts of the last query belong to another chain
        found = self.find(hashes)
        looked_at, unused = self._last_unused
        if looked_at < len(found):
            unused += sum(map(self._unused.__contains__, islice(found, looked_at, None)))
            if self._held:
                unused += sum(map(self._held.__contains__, islice(found, looked_at, None)))
            self._last_unused = len(found), unused
        return unused

    def insert(self, digest: bytes, block: int) -> None:
        """Cache a block in use by its hash, unless another block has that hash."""
        if digest not in self._block_of and self._hash_of[block] is None:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def use(self, blocks: Sequence[int]) -> list[int]:
        """Mark cached blocks as used, and return the blocks that were already in use.

        The use of a block ends its hold.
        """
        self._last_unused = 0, 0
        if self._held:
            self._end_holds([block for block in blocks if block in self._held])
        taken = list(map(self._unused.pop, blocks, repeat(USED)))
        if USED not in taken:
            return []
        return [block for block, was in zip(blocks, taken, strict=True) if was is USED]

    def retire(self, blocks: Sequence[int]) -> list[int]:
        """Mark cached blocks as unused, and return the blocks that are not cached."""
        self._last_unused = 0, 0
        hash_of = self._hash_of
        others = [block for block in blocks if hash_of[block] is None]
        if others:
            blocks = [block for block in blocks if hash_of[block] is not None]
        self._unused.update(zip(blocks, repeat(self._age)))
        return others

    def evict(self, blocks: int) -> list[int]:
        """Evict the least recently used `blocks` unused blocks, and return them."""
        if blocks > len(self._unused):
            # The blocks that came last end a prefix, so its beginning is kept longest.
            self._end_holds(list(islice(reversed(self._held), blocks - len(self._unused))))
        evicted = list(islice(self._unused, blocks))
        for block in evicted:
            del self._unused[block]
            del self._block_of[self._hash_of[block]]  # type: ignore[arg-type]
            self._hash_of[block] = None
        self._last_found, self._last_unused = (b"", []), (0, 0)
        return evicted

    def expire_unused(self) -> list[int]:
        """Evict the blocks that have been unused and unheld since the last call, and return them.

        Two calls thus bound the time for which an unused block stays cached.
        """
        old = sum(1 for _ in takewhile(lambda age: age != self._age, self._unused.values()))
        self._age += 1
        return self.evict(old)

    def locate(self, hashes: Sequence[bytes]) -> list[int | None]:
        """Return the block of each hash, or None if it is not cached.

        The hashes may be any part of a chain.
        """
        return list(map(self._block_of.get, hashes))

    def hold(self, blocks: Sequence[int], until_s: float) -> None:
        """Hold the unused ones of these cached blocks until a time, or the end of earlier holds."""
        for block in blocks:
            if block in self._unused or block in self._held:
                self._unused.pop(block, None)
                self._held.pop(block, None)  # the hold begins again
                self._held[block] = until_s

    def insert_held(self, digest: bytes, block: int, until_s: float) -> None:
        """Cache a block without a user by a hash that is not cached, and hold it until a time."""
        self._last_unused = 0, 0
        self._block_of[digest] = block
        self._hash_of[block] = digest
        self._held[block] = until_s

    def expire_holds(self, now_s: float) -> None:
        """End the first holds whose time has come. Their blocks count as used most recently."""
        expired = list(takewhile(lambda block: self._held[block] <= now_s, self._held))
        self._end_holds(expired[::-1])

    def _end_holds(self, blocks: Sequence[int]) -> None:
        """Make held blocks ordinary unused blocks, the first of which is evicted first."""
        for block in blocks:
            del self._held[block]
            self._unused[block] = self._age


class PendingPrefixes:
    """The blocks that running sequences compute, and for which other sequences wait.

    The object holds the first uncached block of each sequence, because other sequences with the
    same prefix lack the same block first.
    """

    def __init__(self) -> None:
        self._owner: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def advance(self, key: int, digest: bytes) -> None:
        """Set the block that a sequence computes next, unless another sequence computes it."""
        self.drop(key)
        if self._owner.setdefault(digest, key) == key:
            self._hash_of[key] = digest

    def drop(self, key: int) -> None:
        """Forget a sequence that computed its prompt or left the batch. The call is idempotent."""
        digest = self._hash_of.pop(key, None)
        if digest is not None:
            del self._owner[digest]

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._owner
