"""The prefix cache: hash chains, and hit rates on recorded traffic."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from draftgate.backends.core.kv_blocks import KvBlocks, OutOfBlocks
from draftgate.backends.core.prefix_cache import HASH_BYTES, PendingPrefixes, extend_chain

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "mooncake"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded traces are not here")


def chain(tokens: Iterable[int], tenant: str = "", block_size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, tenant, list(tokens), block_size)
    return hashes


def test_equal_prefixes_have_equal_hashes_and_others_do_not() -> None:
    """A hash covers the whole prefix up to its block, so one changed token changes all later
    hashes."""
    tokens = list(range(100, 120))
    known = chain(tokens)
    assert len(known) == 5
    assert {len(digest) for digest in known} == {HASH_BYTES}
    assert chain([*tokens, 7]) == known  # a partial block has no hash
    for place in range(20):
        changed = chain([*tokens[:place], 5, *tokens[place + 1 :]])
        same = [a == b for a, b in zip(known, changed, strict=True)]
        assert same == [index < place // 4 for index in range(5)]
    assert len(set(known)) == 5


def test_tenants_have_different_hashes() -> None:
    """No block of one tenant has the hash of another tenant's block."""
    assert not set(chain(range(40), "a")) & set(chain(range(40), "b"))


def test_a_chain_can_be_extended_step_by_step() -> None:
    """Hashes computed as tokens arrive equal those of the whole sequence."""
    tokens, growing = list(range(30)), []
    for length in range(31):
        extend_chain(growing, "t", tokens[:length], 4)
    assert growing == chain(tokens, "t")


def test_eviction_keeps_the_beginning_of_a_prefix() -> None:
    """The last block of an unused prefix is evicted first, so that the rest stays usable."""
    blocks = KvBlocks(4, 4)
    hashes = chain(range(16))
    table: list[int] = []
    blocks.admit(table, hashes, 16)
    blocks.confirm(table, hashes, range(4))
    blocks.release(table)
    other: list[int] = []
    blocks.extend(other, 4)
    assert blocks.num_cached(hashes) == 3


def test_blocks_in_use_are_not_evicted() -> None:
    """Allocation takes unused blocks and then fails."""
    blocks = KvBlocks(3, 4)
    hashes = chain(range(8))
    table: list[int] = []
    blocks.admit(table, hashes, 8)
    blocks.confirm(table, hashes, range(2))
    blocks.extend([], 4)
    with pytest.raises(OutOfBlocks):
        blocks.extend([], 4)
    assert blocks.num_cached(hashes) == 2


def test_a_pending_block_belongs_to_the_first_sequence() -> None:
    """A block is pending until the first sequence that computes it advances or leaves."""
    pending = PendingPrefixes()
    pending.advance(1, b"a")
    pending.advance(2, b"a")
    pending.drop(2)
    assert b"a" in pending
    pending.advance(1, b"b")
    assert b"a" not in pending
    assert b"b" in pending
    pending.drop(1)
    pending.drop(1)
    assert b"b" not in pending


def test_repeated_lookup_sees_confirmed_and_evicted_blocks() -> None:
    """A second lookup of the same chain reflects all changes in between."""
    blocks = KvBlocks(4, 4)
    hashes = chain(range(16))
    table: list[int] = []
    blocks.admit(table, hashes, 16)
    for known in range(5):
        assert blocks.num_cached(hashes) == known
        assert blocks.num_cached(hashes[:2]) == min(known, 2)
        blocks.confirm(table, hashes, range(min(known + 1, 4)))
    blocks.release(table)
    for left in (3, 2):
        blocks.extend([], 4)
        assert blocks.num_cached(hashes) == left


# --- recorded traffic --------------------------------------------------------------------------


@cache
def trace(name: str) -> tuple[tuple[int, ...], ...]:
    """Read the prefix-block ids of each request; one block of the trace is one token here."""
    lines = (TRACES / f"{name}_trace.jsonl").read_text().splitlines()
    return tuple(tuple(json.loads(line)["hash_ids"]) for line in lines)


def replay(requests: Iterable[tuple[int, ...]], num_blocks: int) -> list[int]:
    """Return the cached blocks of each request, from the allocator; -1 if it is too long."""
    blocks = KvBlocks(num_blocks, 1)
    found = []
    for ids in requests:
        table: list[int] = []
        hashes = chain(ids, block_size=1)
        try:
            found.append(blocks.admit(table, hashes, len(ids)))
        except OutOfBlocks:
            found.append(-1)
            continue
        blocks.confirm(table, hashes, range(len(ids)))
        blocks.release(table)
    blocks.check_integrity([])
    return found


def simulate(requests: Iterable[tuple[int, ...]], capacity: int) -> list[int]:
    """Compute the same numbers with an LRU dictionary, without blocks, users or hashes.

    An entry is a whole prefix. A request uses its prefixes from the longest to the shortest.
    """
    used: OrderedDict[tuple[int, ...], None] = OrderedDict()
    found = []
    for ids in requests:
        if len(ids) > capacity:
            found.append(-1)
            continue
        wanted = [ids[:length] for length in range(len(ids), 0, -1)]
        hits = next((len(prefix) for prefix in wanted if prefix in used), 0)
        found.append(hits)
        for prefix in wanted:
            used.pop(prefix, None)
        while len(used) + len(ids) > capacity:
            used.popitem(last=False)
        used.update(dict.fromkeys(wanted))
    return found


def hit_rate(requests: tuple[tuple[int, ...], ...], found: list[int]) -> float:
    return sum(found) / sum(map(len, requests))


@needs_traces
@pytest.mark.parametrize(("name", "rate"), [("conversation", 0.366), ("synthetic", 0.640)])
def test_hit_rate_of_an_infinite_cache_matches_the_published_one(name: str, rate: float) -> None:
    """With unlimited memory, 36.6% and 64.0% of the recorded blocks are found in the cache."""
    requests = trace(name)
    found = replay(requests, sum(map(len, requests)))
    assert hit_rate(requests, found) == pytest.approx(rate, abs=0.0005)


@needs_traces
@pytest.mark.parametrize("capacity", [100, 1000, 5000])
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_a_finite_cache_is_lru(name: str, capacity: int) -> None:
    """With little memory, each request finds exactly what an independent LRU simulation finds."""
    requests = tuple(ids[:64] for ids in trace(name)[:1500])
    found = replay(requests, capacity)
    assert found == simulate(requests, capacity)
    assert max(found) > 0
